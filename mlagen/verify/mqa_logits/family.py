"""Verification of the indexer's logits: calls, and results against the reference."""

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
from mlagen.verify.call.subject import Subject, fills_allocations, launch_of
from mlagen.verify.checks import require_bits, require_tensors, variants
from mlagen.verify.mqa_logits.cases import FlatCase, PagedCase, ScheduleCase, cases
from mlagen.verify.mqa_logits.facts import FLAT, FLAT_PAIR, SCHEDULE, LogitsFacts
from mlagen.verify.mqa_logits.inputs import Inputs, build_flat, build_paged, build_schedule, schedule, sees
from mlagen.verify.mqa_logits.invalid import NAME
from mlagen.verify.mqa_logits.reference import Logits, mqa_logits, tolerance
from mlagen.verify.tolerance import worst

LogitsCase = FlatCase | PagedCase | ScheduleCase
LogitsRun = Run[LogitsCase, Inputs]
ALIGNMENT = 1024  # bytes; rows are rounded up to a multiple of it
UNIT_KEYS, SM90_UNIT_KEYS = 64, 256  # in a unit of schedules
SAMPLED = 16  # tokens of a call that is too large to compare whole


def _facts(subject: Subject) -> LogitsFacts:
    facts = LogitsFacts.of(subject.package.SPEC["spec"])
    assert facts is not None
    return facts


def _unit_keys(subject: Subject) -> int:
    """Keys of a unit of schedules: on sm90 DeepGEMM's."""
    with subject.planned_for(None):
        target = launch_of(subject.package).device_facts(torch.device(subject.device)).target
    return SM90_UNIT_KEYS if target == "sm90" else UNIT_KEYS


def _build(subject: Subject, case: LogitsCase, seed: int) -> Inputs:
    facts = _facts(subject)
    if isinstance(case, ScheduleCase):
        return build_schedule(case, facts, subject.device)
    if isinstance(case, PagedCase):
        return build_paged(case, facts, subject.device, seed)
    return build_flat(case, facts, subject.device, seed)


def _scheduled(run: LogitsRun) -> torch.Tensor:
    """The schedule of a call over pages: the package's own, or the reference's where it makes none or another one."""
    case, lens = run.case, run.inputs.arguments["context_lens"]
    assert isinstance(case, PagedCase)
    if SCHEDULE in run.inputs.facts.wrappers and not case.first_longer:
        made: torch.Tensor = run.subject.call(SCHEDULE, lens, case.block_size, case.ranges)
        return made
    made_here = schedule(lens.cpu(), case.ranges, _unit_keys(run.subject), first_longer=case.first_longer)
    return made_here.to(lens.device)


def _call(run: LogitsRun, **given: Any) -> Results:
    case, arguments = run.case, dict(run.inputs.arguments)
    if isinstance(case, ScheduleCase):
        return {"schedule": run.subject.call(SCHEDULE, **arguments, **given)}
    if isinstance(case, PagedCase):
        arguments["schedule_meta"] = _scheduled(run)
    positional, named = [], arguments
    if case.positional:
        positional, named = list(arguments.values()), {}
    planned = case.multiprocessors if isinstance(case, FlatCase) else None
    logits = run.subject.call(case.wrapper, *positional, multiprocessors=planned, **named, **given)
    # torch.empty_strided, which kept calls use, fills no gap between rows.
    poisoned = not run.subject.keeps and fills_allocations()
    if poisoned and (run.subject.device == "cpu" or not torch.cuda.is_current_stream_capturing()):
        _check_rows(logits)
    return {"logits": logits}


def _compare(run: LogitsRun, results: Results) -> list[Figure]:
    case = run.case
    if isinstance(case, ScheduleCase):
        expected = schedule(run.inputs.arguments["context_lens"].cpu(), case.ranges, _unit_keys(run.subject))
        require_tensors(run, results, {"schedule": (torch.int32, (case.ranges + 1, 2))})
        require_bits("the schedule", {"schedule": expected}, {"schedule": results["schedule"].cpu()})
        return []
    arguments, tokens = run.inputs.arguments, len(run.inputs.weights) if run.inputs.weights is not None else 0
    columns = arguments["max_context_len"] if isinstance(case, PagedCase) else case.compressed or case.keys
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    require_tensors(run, results, {"logits": (dtype, (tokens, columns))})
    every = list(range(tokens))
    return [_compare_tokens(run, results["logits"], every, run.inputs.expected, columns)] if tokens else []


def _check_rows(got: torch.Tensor) -> None:
    """Rows begin at multiples of ALIGNMENT, and the padding behind them is as it was allocated."""
    stride, (count, columns) = got.stride(0), got.shape
    if not columns:
        return
    if count > 1 and (stride * got.itemsize % ALIGNMENT or stride < columns):
        raise CaseFailedError(f"rows are {stride * got.itemsize} bytes apart, no multiple of {ALIGNMENT}")
    if count and stride > columns:
        between = got.as_strided((count, stride - columns), (stride, 1), got.storage_offset() + columns)
        if not bool(between.isnan().all()):
            raise CaseFailedError("wrote behind a row")


def _where(run: LogitsRun) -> torch.device:
    """The device of the reference: that of the inputs."""
    assert run.inputs.q is not None
    return run.inputs.q.device


def _seen(run: LogitsRun, tokens: list[int], columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether a column is a key that a token sees, and which key it is, [tokens, columns] each."""
    case, inputs, device = run.case, run.inputs, _where(run)
    at, column = torch.tensor(tokens, device=device), torch.arange(columns, device=device)[None, :]
    if isinstance(case, PagedCase):
        ends = sees(case, inputs.arguments["context_lens"].to(device))[at]
        seen = (column < ends[:, None]).expand(len(tokens), columns)
        return seen, torch.tensor(inputs.first, device=device)[at][:, None] + column
    assert isinstance(case, FlatCase)
    bounds = (
        inputs.arguments[name].to(device).long()[at][:, None] for name in ("cu_seq_len_k_start", "cu_seq_len_k_end")
    )
    start, end = next(bounds).clamp(min=0), next(bounds).clamp(max=case.keys)
    key = column + start if case.compressed else column.expand(len(tokens), columns)
    return (key >= start) & (key < end), key


def _compare_tokens(run: LogitsRun, got: torch.Tensor, tokens: list[int], all_keys: Logits, columns: int) -> Figure:
    """The error of some tokens' logits; `all_keys` are theirs."""
    case, facts = run.case, run.inputs.facts
    assert not isinstance(case, ScheduleCase)
    seen, key = _seen(run, tokens, columns)
    key = key.clamp(0, max(all_keys.values.shape[1] - 1, 0))
    values = got.to(_where(run)).double()
    if case.clean and bool((values[~seen] != -torch.inf).any()):
        raise CaseFailedError(f"{int((values[~seen] != -torch.inf).sum())} keys that no token sees are not -inf")
    if not all_keys.values.shape[1]:
        return Figure("logits", 0.0, 0.0)
    expected = Logits(all_keys.values.gather(1, key), all_keys.size.gather(1, key))
    short = run.subject.runs_sm90 and not facts.packed
    limit = tolerance(expected, facts.heads, facts.columns, got.dtype, short=short)
    wanted = expected.values
    if isinstance(case, PagedCase) and case.blocks == "outside":
        seen &= torch.arange(columns, device=_where(run))[None, :] >= case.block_size  # the keys of its first page
    same = (values == wanted) | (values.isnan() & wanted.isnan())
    error = torch.where(same, 0.0, (values - wanted).abs())
    return worst("logits", error[seen], limit.nan_to_num(nan=0.0)[seen])


def _sampled(run: LogitsRun) -> list[Figure]:
    """Some tokens of a call with too many logits to compare them all."""
    case, inputs = run.case, run.inputs
    assert isinstance(case, FlatCase)
    allocate(case.tokens * (case.keys + 256), torch.float32, run.subject.device, None)  # skips it where memory is short
    logits = run.call()["logits"]
    tokens = sorted({0, 1, case.tokens - 1, *range(0, case.tokens, max(1, case.tokens // SAMPLED))})
    assert inputs.q is not None
    assert inputs.k is not None
    assert inputs.k_scale is not None
    assert inputs.weights is not None
    expected = mqa_logits(inputs.q[tokens], inputs.k, inputs.k_scale, inputs.weights[tokens])
    return [_compare_tokens(run, logits[tokens], tokens, expected, case.keys)]


def _renew(run: LogitsRun) -> Iterator[None]:
    arguments = run.inputs.arguments
    if isinstance(run.case, FlatCase):
        checks.flip(arguments["cu_seq_len_k_start"], arguments["cu_seq_len_k_end"])
    else:  # a table names pages as far as its request's keys reach, so that lengths may only fall
        arguments["context_lens"].sub_(1).clamp_(min=0)
    yield


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    if case.wrapper == SCHEDULE:
        return _build(subject, ScheduleCase("", ""), 0).arguments
    if case.wrapper in (FLAT, FLAT_PAIR):
        return _build(subject, FlatCase("", "", case.wrapper, 3, 16), 0).arguments
    arguments = _build(subject, PagedCase("", "", case.wrapper, (30, 70), next_n=2, clean=True), 0).arguments
    lens = arguments["context_lens"]
    return arguments | {"schedule_meta": schedule(lens.cpu(), 4, _unit_keys(subject)).to(lens.device)}


MQA_LOGITS = Family(
    name=NAME,
    kinds=(FlatCase, PagedCase, ScheduleCase),
    cases=cases,
    build=_build,
    call=_call,
    compare=_compare,
    checks={
        "reference": checks.reference,
        variants.TARGETS: variants.each_target,
        "determinism": checks.determinism,
        "defaults": checks.defaults,
        "graph": checks.graph(_renew),
        "sampled": _sampled,
    },
    valid=_valid,
)
