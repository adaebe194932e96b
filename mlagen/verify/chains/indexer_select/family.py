"""Verification of wrappers that score and select: calls, and results against the unfused chain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mlagen.verify import checks
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import TWICE_NAN, bits
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject, launch_of
from mlagen.verify.chains.candidates.reference import best_blocks
from mlagen.verify.chains.indexer_select.cases import PickCase, cases
from mlagen.verify.chains.indexer_select.inputs import Inputs, build, tokens_of
from mlagen.verify.chains.indexer_select.invalid import NAME, PAGED
from mlagen.verify.checks import Workspaces, require_tensors
from mlagen.verify.mqa_logits.cases import FlatCase, PagedCase
from mlagen.verify.mqa_logits.facts import FLAT, FLAT_PAIR, PAGED_PAIR, SCHEDULE, LogitsFacts
from mlagen.verify.mqa_logits.facts import PAGED as PAGED_ALONE
from mlagen.verify.mqa_logits.inputs import sees
from mlagen.verify.topk.reference import slots, top_k

PickRun = Run[PickCase, Inputs]
ROW_FLOATS = 256  # a row of logits takes a multiple of it
FLAT_NAMES = ("q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end")
PAGED_NAMES = ("q", "kv_cache", "weights", "context_lens", "block_table")


def _build(subject: Subject, case: PickCase, seed: int) -> Inputs:
    facts = LogitsFacts.of(subject.package.SPEC["spec"])
    assert facts is not None
    return build(case, facts, subject.device, seed)


def _schedule(run: PickRun) -> torch.Tensor:
    """The schedule of a call over pages."""
    case = run.case.scored
    assert isinstance(case, PagedCase)
    made: torch.Tensor = run.subject.call(SCHEDULE, run.inputs.arguments["context_lens"], case.block_size, case.ranges)
    return made


def _columns(run: PickRun) -> int:
    """Keys that a row of the call's logits has."""
    case, arguments = run.case.scored, run.inputs.arguments
    if isinstance(case, FlatCase):
        return case.keys
    pages: int = arguments["block_table"].shape[1] * case.block_size
    return min(int(arguments["max_context_len"]), pages)


def _row_floats(run: PickRun) -> int:
    return -(-max(_columns(run), 1) // ROW_FLOATS) * ROW_FLOATS


def _step(case: PickCase) -> int:
    """Tokens that go together."""
    return case.scored.next_n if isinstance(case.scored, PagedCase) else 1


def _call(run: PickRun, **given: Any) -> Results:
    """Calls by position up to `topk`, as callers do, the rest by name."""
    arguments, case = {**run.inputs.arguments, **given}, run.case
    if case.wrapper == PAGED:
        arguments["schedule_meta"] = _schedule(run)
    names = list(arguments)
    positional = [arguments.pop(name) for name in names[: names.index("topk") + 1]]
    how: Any = contextlib.nullcontext()
    if case.room is not None:
        room = 4 * _row_floats(run) * case.room * _step(case)
        how = launch_of(run.subject.package).force(workspace_bytes=room)
    with how:
        returned = run.subject.call(case.wrapper, *positional, **arguments)
    results = {name: one.view for name, one in run.inputs.given.items()}
    return {**results, "out": returned}


def _ranges(run: PickRun) -> list[tuple[int, int]]:
    """The columns of the logits that each token sees."""
    case, arguments, columns = run.case.scored, run.inputs.arguments, _columns(run)
    if isinstance(case, PagedCase):
        return [(0, min(end, columns)) for end in sees(case, arguments["context_lens"]).tolist()]
    starts, ends = (arguments[name].tolist() for name in ("cu_seq_len_k_start", "cu_seq_len_k_end"))
    firsts = [min(max(start, 0), columns) for start in starts]
    return [(first, max(first, min(end, columns))) for first, end in zip(firsts, ends, strict=True)]


def _logits(run: PickRun) -> torch.Tensor:
    """The package's own logits, fp32 [tokens, columns]."""
    case, arguments, package = run.case, run.inputs.arguments, run.subject.package
    names = PAGED_NAMES if case.wrapper == PAGED else FLAT_NAMES
    q, *rest = (arguments[name] for name in names)
    pair, alone = (PAGED_PAIR, PAGED_ALONE) if case.wrapper == PAGED else (FLAT_PAIR, FLAT)
    wrapper = pair if hasattr(package, pair) else alone
    if case.wrapper == PAGED:
        rest += [_schedule(run), arguments["max_context_len"]]
    found: torch.Tensor = run.subject.call(wrapper, q if wrapper == pair else q[0], *rest, clean_logits=False)
    return found


def _exact(run: PickRun) -> list[torch.Tensor]:
    """Logits in float64 of the keys that each token sees, where the package's are exact."""
    scored, found = run.inputs.scored, []
    for token, (first, end) in enumerate(_ranges(run)):
        begin = scored.first[token] if scored.first else 0
        found.append(scored.expected.values[token, begin + first : begin + end])
    return found


def _expected(run: PickRun) -> Results:
    case, logits = run.case, _logits(run)
    found = [top_k(logits[token, first:end], case.k) for token, (first, end) in enumerate(_ranges(run))]
    if case.scored.contents == "whole":
        for (indices, scores), exact in zip(found, _exact(run), strict=True):
            wanted = top_k(exact.float().to(logits.device), case.k)
            if not (torch.equal(indices, wanted[0]) and torch.equal(scores, wanted[1])):
                raise CaseFailedError("the package's logits are not float64's, though every sum is exact")
    results = {"out": [one for one, _ in found], "scores": [one for _, one in found]}
    if "slots" in case.gives:
        results["slots"] = [_slots(run, token, one) for token, (one, _) in enumerate(found)]
    if case.kept:
        block, ranges = run.subject.package.SPEC["spec"]["indexer"]["candidates"]["block"], enumerate(_ranges(run))
        results["candidate_blocks"] = [best_blocks(logits[token, a:b], case.kept, block) for token, (a, b) in ranges]
    empty = {"out": torch.int32, "slots": torch.int32, "scores": torch.float32}
    kept = {"out", *case.gives, "candidate_blocks"}
    return {
        name: torch.stack(rows) if rows else torch.empty((0, case.k), dtype=empty[name], device=logits.device)
        for name, rows in results.items()
        if name in kept
    }


def _slots(run: PickRun, token: int, indices: torch.Tensor) -> torch.Tensor:
    given, case = run.inputs.arguments, run.case.scored
    batches, table = given.get("row_to_batch"), given.get("src_page_table")
    batch = token if batches is None else int(batches[token])
    if table is None:
        assert isinstance(case, PagedCase)
        return slots(indices, given["block_table"][batch], 0, case.block_size)
    return slots(indices, table[batch] if batch < len(table) else None, 0, given["page_size"])


def _compare(run: PickRun, results: Results) -> list[Figure]:
    expected = _expected(run)
    if results.keys() != expected.keys():
        raise CaseFailedError(f"gave {', '.join(results)} instead of {', '.join(expected)}")
    require_tensors(run, results, {name: (want.dtype, tuple(want.shape)) for name, want in expected.items()})
    for name, want in expected.items():
        got = results[name]
        wrong = (bits(got.contiguous()) != bits(want)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            found = f"{list(at)} first: {got[at].item()}, not {want[at].item()}"
            raise CaseFailedError(f"{len(wrong)} of {want.numel()} {name} differ, {found}")
    return []


def _renew(run: PickRun) -> Iterator[None]:
    arguments = run.inputs.arguments
    if isinstance(run.case.scored, FlatCase):
        checks.flip(arguments["cu_seq_len_k_start"], arguments["cu_seq_len_k_end"])
    else:  # a table names pages as far as its request's keys reach, so that lengths may only fall
        arguments["context_lens"].sub_(1).clamp_(min=0)
    yield


def _workspaces(run: PickRun) -> Workspaces:
    """Of one token, of some, of all, and of more."""
    each, tokens = _row_floats(run) * _step(run.case), tokens_of(run.case) // _step(run.case)
    floats = {"of one": each, "of three": 3 * each + 17, "of all": tokens * each, "of more": (tokens + 9) * each + 5}

    def is_used(workspace: torch.Tensor) -> bool:
        return bool((workspace.view(torch.int32)[:each] != TWICE_NAN).any())

    return Workspaces(floats, is_used, each - 1)


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    scored: FlatCase | PagedCase = FlatCase("", "", "", 3, 16, clean=False)
    if case.wrapper == PAGED:
        scored = PagedCase("", "", "", (30, 70), next_n=2)
    made = PickCase("", "", case.wrapper, scored, 5, ("scores", "slots"), own_table=16, mapped=True)
    run = Run(INDEXER_SELECT, subject, made, _build(subject, made, 0))
    arguments = dict(run.inputs.arguments)
    return arguments | ({"schedule_meta": _schedule(run)} if case.wrapper == PAGED else {})


INDEXER_SELECT = Family(
    name=NAME,
    kinds=(PickCase,),
    cases=cases,
    build=_build,
    call=_call,
    compare=_compare,
    checks={
        "reference": checks.reference,
        "determinism": checks.determinism,
        "defaults": checks.defaults,
        "graph": checks.graph(_renew),
        "workspace": checks.workspace(_workspaces),
    },
    valid=_valid,
)
