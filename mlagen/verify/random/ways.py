"""The ways to make a random call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from mlagen.verify import checks
from mlagen.verify.cache.cases import GatherCase
from mlagen.verify.call.case import Case, CaseFailedError
from mlagen.verify.call.family import Family, Inputs, Run
from mlagen.verify.call.memory import NAN
from mlagen.verify.call.patterns import INT32, LENGTH_PROMISES, SINK_PROMISES
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject, unfilled_allocations
from mlagen.verify.chains.candidates.cases import BlocksCase, CandidateCase
from mlagen.verify.chains.indexer_select.cases import PickCase
from mlagen.verify.checks import AnyRun, copied, require_bits
from mlagen.verify.dense_decode.cases import DenseDecodeCase
from mlagen.verify.dense_fwd.cases import DenseFwdCase
from mlagen.verify.indexer_cache.cases import KeysGatherCase
from mlagen.verify.latents.cases import PoolCase
from mlagen.verify.mqa_logits.cases import RANGES, FlatCase, PagedCase
from mlagen.verify.mqa_logits.facts import SCHEDULE
from mlagen.verify.random import late
from mlagen.verify.random.dice import Dice
from mlagen.verify.sparse_decode.cases import SparseDecodeCase
from mlagen.verify.sparse_fwd.cases import SparseFwdCase
from mlagen.verify.topk.cases import SCORE_PROMISES, SelectCase


def built(family: Family, subject: Subject, case: Any, seed: int) -> AnyRun:
    """The run of a case, with inputs drawn on the subject's device."""
    with torch.device(subject.device):
        return Run(family, subject, case, family.build(subject, case, seed))


def _judge(run: AnyRun, results: dict[str, torch.Tensor]) -> None:
    """Raises CaseFailedError unless results are the reference's, and inputs and the memory around results untouched."""
    _require(run.compare(results))
    run.inputs.check_memory()


def _require(figures: list[Figure]) -> None:
    over = [figure for figure in figures if not figure.share <= 1]
    if over:
        found = (f"{one.name} differs by {one.error:.3g}, {one.tolerance:.3g} allowed" for one in over)
        raise CaseFailedError("; ".join(found))


def _once(run: AnyRun, dice: Dice) -> int:
    _require(checks.reference(run))
    run.inputs.check_memory()
    return 1


def _twice(run: AnyRun, dice: Dice) -> int:
    """Two calls give the same bits, each from outputs that hold poison."""
    first = copied(run.call())
    for one in run.inputs.given.values():
        if one.before is not None:
            one.buffer.copy_(one.before)
    second = run.call()
    require_bits("second call", first, second)
    _judge(run, second)
    return 2


def _beside(run: AnyRun, dice: Dice) -> int:
    """A call on a side stream while the same call, with other numbers, runs on the main one."""
    other = built(run.family, run.subject, run.case, dice.seed())
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    first: dict[str, torch.Tensor] = {}
    for own in (True, False) if dice.chance(0.5) else (False, True):
        if own:
            first = run.call()
        else:
            with torch.cuda.stream(side):
                second = other.call()
    torch.cuda.synchronize()
    _judge(run, first)
    _judge(other, second)
    return 2


def _in_a_row(run: AnyRun, dice: Dice) -> int:
    """A call right behind the same call with other numbers: kernels with PDL begin while those before still run."""
    other = built(run.family, run.subject, run.case, dice.seed())
    first = run.call()
    second = other.call()
    _judge(run, first)
    _judge(other, second)
    return 2


def _late(run: AnyRun, dice: Dice) -> int:
    """A call right behind a kernel that lets it begin at once, and writes its inputs late over other ones."""
    memory = _memory(run.inputs)
    fits = 0 < sum(one.nbytes for one in memory) <= late.MOST_BYTES
    if not fits or not late.begins_early() or isinstance(run.case, DenseFwdCase):  # those kernels never begin early
        return _in_a_row(run, dice)
    written = [one.clone() for one in memory]
    run.call()  # compiles
    for own, new in _paired(run.inputs, built(run.family, run.subject, run.case, dice.seed()).inputs):
        own.copy_(new)
    with unfilled_allocations():  # a fill between the two kernels would wait for the first
        late.write(memory, written)
        results = run.call()
    _judge(replace(run, subject=replace(run.subject, keeps=True)), results)  # as of kept calls, unpoisoned
    return 1


def _replayed(run: AnyRun, dice: Dice) -> int:
    """A captured call replays on other inputs, lengths and tables, of the same sizes."""
    run.call()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = run.call()
    other = built(run.family, run.subject, renewed(run.case, dice), dice.seed())
    pairs = _paired(run.inputs, other.inputs)
    for own, new in pairs:
        own.copy_(new)
    given = {one.view.data_ptr() for one in run.inputs.given.values()}
    for tensor in results.values():
        if tensor.data_ptr() not in given and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
            tensor.fill_(NAN)
        elif tensor.data_ptr() not in given and tensor.dtype == torch.int32:
            tensor.fill_(INT32.max)
    captured.replay()
    torch.cuda.synchronize()
    for own, new in pairs:
        new.copy_(own)
    _judge(other, results)
    return 1


WAYS: dict[str, Callable[[AnyRun, Dice], int]] = {
    "once": _once,
    "twice": _twice,
    "beside": _beside,
    "in a row": _in_a_row,
    "late": _late,
    "replayed": _replayed,
}


def way_of(family: Family, subject: Subject, case: Case, dice: Dice) -> str:
    """The way to make a call."""
    if subject.device == "cpu":
        return dice.mostly("once", "twice", "in a row")
    way = dice.pick("once", "once", "twice", "twice", "in a row", "late", "beside", "beside", "replayed")
    scored = case.scored if isinstance(case, PickCase) else case
    if isinstance(scored, PagedCase) and SCHEDULE not in subject.facts.wrappers and way == "replayed":
        return "twice"  # the reference's schedule is made on the host
    if isinstance(case, PoolCase) and case.ratio > 1 and way == "replayed":
        return "twice"  # each call puts the states back first, from the host
    return way


def renewed(case: Any, dice: Dice) -> Any:
    """A case with other numbers in its tensors, but the same sizes and the same arguments on the host."""
    match case:
        case SelectCase():
            lens = None if case.lens is None else dice.shuffled(case.lens)
            return replace(case, lens=lens, scores=dice.pick(*SCORE_PROMISES))
        case SparseFwdCase():
            return replace(case, problem=_with_others(case.problem, dice))
        case SparseDecodeCase():
            return replace(case, problem=_with_others(case.problem, dice))
        case DenseDecodeCase():
            problem = case.problem
            return replace(case, problem=replace(problem, lengths=dice.shuffled(problem.lengths)))
        case DenseFwdCase():
            return replace(case, requests=dice.shuffled(case.requests))
        case GatherCase():
            return replace(case, requests=dice.shuffled(case.requests))
        case KeysGatherCase():
            return replace(case, requests=dice.shuffled(case.requests))
        case FlatCase():
            return replace(case, ranges=dice.pick(*RANGES) if case.keys > 2 else case.ranges)
        case PagedCase():
            return replace(case, lengths=dice.shuffled(case.lengths))
        case BlocksCase():
            ends = None if case.ends is None else dice.shuffled(case.ends)
            return replace(case, ends=ends, scores=dice.pick(*SCORE_PROMISES))
        case PickCase() | CandidateCase():
            return replace(case, scored=renewed(case.scored, dice))
    return case


def _with_others(problem: Any, dice: Dice) -> Any:
    """A problem of sparse attention with other lengths and sinks, where there are any."""
    changes: dict[str, Any] = {}
    if problem.sink is not None:
        changes["sink"] = dice.pick(*[name for name in SINK_PROMISES if name != "extreme"])
    if getattr(problem, "length", None) is not None:
        changes["length"] = dice.pick(*LENGTH_PROMISES)
    return replace(problem, **changes)


def _paired(one: Inputs, other: Inputs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The memory of both inputs on a device, byte by byte, side by side.

    Raises:
        CaseFailedError: they have other memory; then a case and its renewed one differ in sizes.
    """
    pairs = list(zip(_memory(one), _memory(other), strict=True))
    if any(left.shape != right.shape for left, right in pairs):
        raise CaseFailedError("the inputs of a replay have other sizes: a fault of the tester")
    return pairs


def _memory(inputs: Inputs) -> list[torch.Tensor]:
    """Each piece of device memory that the inputs hold, uint8, in the order of discovery."""
    found: dict[int, torch.Tensor] = {}
    for tensor in _tensors(inputs):
        storage = tensor.untyped_storage()
        if tensor.device.type == "cuda" and storage.nbytes() and storage.data_ptr() not in found:
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            found[storage.data_ptr()] = empty.set_(storage)
    return list(found.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
