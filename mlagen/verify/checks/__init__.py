"""Checks of a call that mean the same in every family, each written once over a run of a case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.family import Check, Inputs, Results, Run
from mlagen.verify.call.memory import NAN, bits, place_workspace
from mlagen.verify.call.results import Figure

AnyRun = Run[Any, Any]
View = Callable[[Results], Results]


def mapped(results: Results, change: Callable[[torch.Tensor], torch.Tensor]) -> Results:
    """The results, each changed."""
    return {name: change(tensor) for name, tensor in results.items()}


def copied(results: Results) -> Results:
    """The results in memory of their own."""
    return mapped(results, torch.Tensor.clone)


def picked(results: Results, rows: Sequence[int]) -> Results:
    """Entries of the results' first dimension."""
    return mapped(results, lambda tensor: tensor[torch.tensor(rows, device=tensor.device)])


def require_tensors(run: AnyRun, results: Results, wanted: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Raises CaseFailedError unless each result has its dtype and shape, and is where the call was."""
    for name, tensor in results.items():
        dtype, shape = wanted[name]
        if tensor.dtype != dtype or tensor.shape != shape or tensor.device.type != run.subject.device:
            found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise CaseFailedError(f"{name} is {found} instead of {dtype} {list(shape)}")


def require_none(returned: Any) -> None:
    """Raises CaseFailedError if a wrapper returned something."""
    if returned is not None:
        raise CaseFailedError(f"returned a {type(returned).__name__} instead of None")


def require_bits(what: str, one: Results, other: Results) -> None:
    """Raises CaseFailedError unless both hold the same bits."""
    for name in one:
        left, right = bits(one[name]), bits(other[name])
        if not torch.equal(left, right):
            count = int((left != right).sum())
            raise CaseFailedError(f"{what}: {count} of {left.numel()} elements of {name} have other bits")


def reference(run: AnyRun) -> list[Figure]:
    """The results are the reference's, and stand in the buffers given for them."""
    results = run.call()
    figures = run.compare(results)
    for name, buffer in run.inputs.given.items():
        if results[name].data_ptr() != buffer.view.data_ptr():
            raise CaseFailedError(f"{name} was given, but another tensor was returned")
    return figures


def determinism(run: AnyRun) -> list[Figure]:
    """Two calls give the same bits."""
    first = copied(run.call())
    require_bits("second call", first, run.call())
    return run.compare(first)


def defaults(run: AnyRun) -> list[Figure]:
    """Torch's default dtype and device are neither read nor changed."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        results = run.call()
        if torch.get_default_dtype() != torch.float64 or torch.get_default_device().type != "meta":
            raise CaseFailedError("changed torch's default dtype or device")
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
    return run.compare(results)


def stream(run: AnyRun) -> list[Figure]:
    """Launches go to the current stream."""
    reference(run)  # compiles, so that the launch below is not late
    q = run.inputs.q
    wanted = q.clone()
    q.fill_(NAN)
    torch.cuda.synchronize()
    own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(own):
        # A launch on another stream would read q too early.
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        q.copy_(wanted)
        results = run.call()
    own.synchronize()
    return run.compare(results)


def graph(renew: Callable[[AnyRun], Iterator[None]]) -> Check:
    """A captured call replays on other inputs: at each step `renew` puts such where the first ones were."""

    def check(run: AnyRun) -> list[Figure]:
        run.call()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            results = run.call()
        figures = []
        for _ in renew(run):
            run.inputs.placed.clear()  # the inputs now differ from it
            for tensor in results.values():
                tensor.fill_(NAN if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
            captured.replay()
            torch.cuda.synchronize()
            figures += run.compare(results)
        return figures

    return check


def replays(call: Callable[[AnyRun], Results]) -> Check:
    """A captured call that changes its tensors replays on other inputs, those of `run.inputs.renew`.

    Args:
        call: runs the wrapper on memory as it is; `run.call` does so on memory as it was before any call.
    """

    def check(run: AnyRun) -> list[Figure]:
        run.call()
        captured, figures = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(captured):
            results = call(run)
        for _ in run.inputs.renew():
            run.inputs.placed.clear()  # the inputs now differ from it
            run.inputs.given.clear()
            captured.replay()
            torch.cuda.synchronize()
            figures += run.compare(results)
        return figures

    return check


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that begins an element behind where memory begins."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def flip(*tensors: torch.Tensor) -> None:
    """Turns the order of entries of the first dimension round, in place."""
    for tensor in tensors:
        tensor.copy_(tensor.flip(0))


class Variant(NamedTuple):
    """A call with some results that must have the bits of another call's.

    Attributes:
        what: how it differs.
        inputs: its inputs.
        rows: entries of the first call's results that it begins with.
        view: how those stand in its results.
    """

    what: str
    inputs: Inputs
    rows: Sequence[int]
    view: View = dict


def invariance(
    pick: Callable[[Any, Sequence[int]], Inputs],
    variants: Callable[[AnyRun], Iterator[Variant]],
    *,
    alone: int = -1,
    crowd: Callable[[int, bool], Sequence[int]],
) -> Check:
    """A row's bits are the same with any other rows in the call.

    Args:
        pick: the same call for some of its rows, in another order.
        variants: further calls.
        alone: the row that a call by itself has.
        crowd: rows of a larger batch, from how many there are and whether a GPU runs it, before all of them.
    """

    def calls(run: AnyRun, rows: int) -> Iterator[Variant]:
        every = list(range(rows))
        crowded = [*crowd(rows, run.subject.device == "cuda"), *every]
        for what, own in (("alone", [every[alone]]), ("in another order", every[::-1]), ("in a larger batch", crowded)):
            yield Variant(what, pick(run.inputs, own), own)
        yield from variants(run)

    def check(run: AnyRun) -> list[Figure]:
        whole = copied(run.call())
        for variant in calls(run, len(whole["out"])):
            got = variant.view(run.on(variant.inputs).call())
            require_bits(variant.what, picked(whole, variant.rows), picked(got, range(len(variant.rows))))
        return run.compare(whole)

    return check


class Workspaces(NamedTuple):
    """The workspaces that a call may be given.

    Attributes:
        floats: floats of each workspace, by its purpose.
        is_used: whether a call wrote to all that it should of one that `place_workspace` made.
        too_small: floats of one that it must refuse; None: not asked.
    """

    floats: Mapping[str, int]
    is_used: Callable[[torch.Tensor], bool]
    too_small: int | None


def workspace(sizes: Callable[[AnyRun], Workspaces]) -> Check:
    """A given workspace is used, nothing outside it is written, and its size changes no bit."""

    def check(run: AnyRun) -> list[Figure]:
        given = sizes(run)
        figures: list[Figure] = []
        first: Results = {}
        for what, floats in given.floats.items():
            if floats == 0:
                raise CaseFailedError("the size of a workspace is 0 for a call in splits")
            buffer = place_workspace(floats, run.subject.device)
            flat = buffer.view.view(-1)
            results = copied(run.call(workspace=flat))
            figures += run.compare(results)
            if not given.is_used(flat):
                raise CaseFailedError(f"a workspace {what} is not used")
            if buffer.spilled():
                raise CaseFailedError(f"wrote outside a workspace {what}")
            first = first or results
            require_bits(f"workspace {what}", first, results)
        require_bits("without a workspace", first, run.call())
        if given.too_small is not None:
            with contextlib.suppress(ValueError):
                run.call(workspace=torch.empty(given.too_small, device=run.subject.device))
                raise CaseFailedError("took a workspace too small for one token")
        return figures

    return check
