"""Verification of the index kernels: calls, and results against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mlagen.verify import checks
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import allocate
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject
from mlagen.verify.checks import require_tensors
from mlagen.verify.indices.cases import CombineCase, MapCase, cases
from mlagen.verify.indices.inputs import Inputs, build_combine, build_map
from mlagen.verify.indices.invalid import COMBINE, CONVERT, GLOBAL, NAME
from mlagen.verify.indices.reference import combine_indices, map_indices

IndicesCase = MapCase | CombineCase
IndicesRun = Run[IndicesCase, Inputs]
POSITIONS = {GLOBAL: 5, COMBINE: 9, CONVERT: 4}  # that all versions of vLLM's signatures share


def _build(subject: Subject, case: IndicesCase, seed: int) -> Inputs:
    if isinstance(case, CombineCase):
        return build_combine(case, subject.device, seed)
    return build_map(case, subject.device, seed)


def _expected(run: IndicesRun) -> Results:
    """The expected results of the case's wrapper, on the CPU."""
    case = run.case
    here: dict[str, Any] = {
        name: one.cpu() if isinstance(one, torch.Tensor) else one for name, one in run.inputs.arguments.items()
    }
    given = {
        name: here[name] for name in here.keys() & {"compact", "left_visible", "right_visible", "max_image_tokens"}
    }
    if isinstance(case, CombineCase):
        positional = [here[name] for name in list(here)[: POSITIONS[COMBINE]]]
        rows, lens = combine_indices(*positional, **given)
        return {"indices": rows, "lens": lens}
    assert isinstance(case, MapCase)
    if case.wrapper == CONVERT:
        ranks, rank, interleave = case.ranks
        given |= {"block_rows": case.block_rows, "ranks": ranks, "rank": rank, "interleave": interleave}
        table = (here["block_table"], here["BLOCK_SIZE"])
        slots, lens = map_indices(here["token_indices"], here["req_id"], *table, **given)
        return {"indices": slots, "lens": lens} if case.counts else {"indices": slots}
    request = here["token_to_req_indices" if case.newer else "token_to_req"]
    slots, lens = map_indices(here["topk_indices"], request, here["block_table"], here["block_size"], **given)
    return {"indices": slots, "lens": torch.where(here["is_valid_token"], lens, 0)}


def _call(run: IndicesRun, **given: Any) -> Results:
    """Calls by position, as callers do, as far as all versions of a signature agree; the rest by name."""
    case, arguments = run.case, run.inputs.arguments
    wrapper = COMBINE if isinstance(case, CombineCase) else case.wrapper
    positions = 0 if "token_to_req_indices" in arguments else POSITIONS[wrapper]
    positional, named = list(arguments)[:positions], list(arguments)[positions:]
    values = [arguments[name] for name in positional]
    returned = run.subject.call(wrapper, *values, **{name: arguments[name] for name in named}, **given)
    found = [returned] if isinstance(returned, torch.Tensor) else returned
    return dict(zip(("indices", "lens"), found, strict=False))


def _compare(run: IndicesRun, results: Results) -> list[Figure]:
    expected = _expected(run)
    if results.keys() != expected.keys():
        raise CaseFailedError(f"returned {len(results)} tensors instead of {len(expected)}")
    require_tensors(run, results, {name: (want.dtype, tuple(want.shape)) for name, want in expected.items()})
    for name, want in expected.items():
        got = results[name].cpu()
        wrong = (got != want).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            found = f"{list(at)} first: {int(got[at])}, not {int(want[at])}"
            raise CaseFailedError(f"{len(wrong)} of {want.numel()} {name} differ, {found}")
    return []


def _repeated(run: IndicesRun) -> list[Figure]:
    """One token many times over."""
    case, device, arguments = run.case, run.subject.device, run.inputs.arguments
    assert isinstance(case, MapCase)
    allocate(2 * case.repeat * case.topk, torch.int32, device, None)  # skips the case where memory is short
    expected = _expected(run)
    for name in arguments.keys() & {"topk_indices", "token_indices"}:
        arguments[name] = arguments[name].expand(case.repeat, -1)
    for name in arguments.keys() & {"token_to_req", "req_id", "is_valid_token"}:
        arguments[name] = arguments[name].repeat(case.repeat)
    got = run.call()
    piece = 1 << 16
    for name, want in expected.items():
        for first in range(0, case.repeat, piece):
            if not bool((got[name][first : first + piece] == want.to(device)).all()):
                raise CaseFailedError(f"results from token {first} on differ")
    return []


def _renew(run: IndicesRun) -> Iterator[None]:
    checks.flip(next(one for one in run.inputs.arguments.values() if isinstance(one, torch.Tensor) and one.dim() == 2))
    yield


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    if case.wrapper == COMBINE:
        return _build(subject, CombineCase("", "", ((2, 9, 9), (1, 5, 5)), layout="contiguous"), 0).arguments
    return _build(subject, MapCase("", "", case.wrapper, 3, 16), 0).arguments


INDICES = Family(
    name=NAME,
    kinds=(MapCase, CombineCase),
    cases=cases,
    build=_build,
    call=_call,
    compare=_compare,
    checks={
        "reference": checks.reference,
        "defaults": checks.defaults,
        "graph": checks.graph(_renew),
        "repeated": _repeated,
    },
    valid=_valid,
)
