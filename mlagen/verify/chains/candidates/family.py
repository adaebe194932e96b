"""Verification of candidate blocks: calls, and results against the reference."""

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
from mlagen.verify.chains.candidates.cases import BlocksCase, CandidateCase, cases
from mlagen.verify.chains.candidates.inputs import Inputs, build, build_blocks, ranges_of
from mlagen.verify.chains.candidates.invalid import (
    FLAT,
    NAME,
    OVER_PAGES,
    PAGED,
    PICKS,
    SELECT,
)
from mlagen.verify.chains.candidates.reference import best_blocks, keys_of
from mlagen.verify.checks import Workspaces, require_none, require_tensors, variants
from mlagen.verify.mqa_logits.cases import FlatCase, PagedCase
from mlagen.verify.mqa_logits.facts import LogitsFacts
from mlagen.verify.mqa_logits.reference import Logits, tolerance
from mlagen.verify.tolerance import worst
from mlagen.verify.topk.reference import top_k

AnyCase = BlocksCase | CandidateCase
AnyRun = Run[AnyCase, Inputs]
ROW_FLOATS = 256  # a row of logits takes a multiple of it


def _block_of(subject: Subject) -> int:
    """Keys of a block."""
    size: int = subject.package.SPEC["spec"]["indexer"]["candidates"]["block"]
    return size


def _build(subject: Subject, case: AnyCase, seed: int) -> Inputs:
    block = _block_of(subject)
    if isinstance(case, BlocksCase):
        return build_blocks(case, block, subject.device, seed)
    facts = LogitsFacts.of(subject.package.SPEC["spec"])
    assert facts is not None
    return build(case, facts, block, subject.device, seed)


def _row_floats(run: AnyRun) -> int:
    columns: int = run.inputs.arguments["candidate_blocks"].shape[1] * _block_of(run.subject)
    return -(-max(columns, 1) // ROW_FLOATS) * ROW_FLOATS


def _step(case: CandidateCase) -> int:
    """Tokens that go together."""
    return case.scored.next_n if isinstance(case.scored, PagedCase) else 1


def _forced(run: AnyRun) -> Any:
    """Choices that a case forces."""
    case, choices = run.case, dict[str, Any]()
    if isinstance(case, BlocksCase) and case.splits is not None:
        choices["num_splits"] = case.splits
    if isinstance(case, CandidateCase) and case.room is not None:
        choices["workspace_bytes"] = 4 * _row_floats(run) * case.room * _step(case)
    return launch_of(run.subject.package).force(**choices) if choices else contextlib.nullcontext()


def _call(run: AnyRun, **given: Any) -> Results:
    """Calls by position up to the blocks, or `topk`, as callers do, the rest by name."""
    case, arguments = run.case, {**run.inputs.arguments, **given}
    results = {name: one.view for name, one in run.inputs.given.items()}
    if isinstance(case, BlocksCase):
        named = {"row_repeat": arguments.pop("row_repeat")} if case.by_name and "row_repeat" in arguments else {}
        with _forced(run):
            require_none(run.subject.call(SELECT, *arguments.values(), **named))
        return results
    last = "topk" if case.wrapper in PICKS else "candidate_blocks"
    names = list(arguments)
    positional = [arguments.pop(name) for name in names[: names.index(last) + 1]]
    with _forced(run):
        returned = run.subject.call(case.wrapper, *positional, **arguments)
    return {**results, "out": returned} if case.wrapper in PICKS else {"logits": returned}


def _compare(run: AnyRun, results: Results) -> list[Figure]:
    case = run.case
    if isinstance(case, BlocksCase):
        _require_equal(run, results, {"out": _expected_blocks(run, case)})
        return []
    if case.wrapper in PICKS:
        _require_equal(run, results, _expected_picks(run, case))
        return []
    return _compare_logits(run, case, results)


def _require_equal(run: AnyRun, results: Results, expected: Results) -> None:
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


def _expected_blocks(run: AnyRun, case: BlocksCase) -> torch.Tensor:
    arguments, block = run.inputs.arguments, _block_of(run.subject)
    rows, ranges = arguments["logits"], _block_ranges(case, arguments)
    found = [best_blocks(rows[row, first:end], case.k, block) for row, (first, end) in enumerate(ranges)]
    return torch.stack(found) if found else torch.empty((0, case.k), dtype=torch.int32, device=rows.device)


def _block_ranges(case: BlocksCase, arguments: dict[str, Any]) -> list[tuple[int, int]]:
    """The columns that each row sees, by the tensors as they are now."""
    ends = arguments["row_ke"].tolist()
    starts = [0] * len(ends) if arguments["row_ks"] is None else arguments["row_ks"].tolist()
    found = []
    for row in range(case.rows):
        first = min(max(starts[row // case.repeat], 0), case.columns)
        found.append((first, max(first, min(ends[row // case.repeat], case.columns))))
    return found


def _keys(run: AnyRun, case: CandidateCase) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, positions) of compact columns, i64 [tokens, columns]: among all keys, and from a token's first; or -1."""
    arguments, block = run.inputs.arguments, _block_of(run.subject)
    blocks = arguments["candidate_blocks"].cpu()
    keys, positions = [], []
    for token, (first, end) in enumerate(ranges_of(case.scored, arguments)):
        found = keys_of(blocks[token], block, end - first)
        if isinstance(case.scored, PagedCase):  # pages that hold no key are outside the cache
            least = case.scored.block_size if case.scored.blocks == "outside" else 0
            most = case.scored.lengths[token // case.scored.next_n]
            found = torch.where((found < least) | (found >= most), -1, found)
        scored = run.inputs.scored
        begin = scored.first[token] if scored is not None and scored.first else 0
        keys.append(torch.where(found >= 0, found + first + begin, -1))
        positions.append(found)
    empty = torch.empty((0, blocks.shape[1] * block), dtype=torch.int64)
    return (torch.stack(keys), torch.stack(positions)) if keys else (empty, empty)


def _exact(run: AnyRun, keys: torch.Tensor) -> Logits:
    """Logits of the compact columns in float64; those of no key are those of key 0."""
    assert run.inputs.scored is not None
    every, at = run.inputs.scored.expected, keys.clamp(min=0)
    if not every.values.shape[1]:
        nothing = torch.zeros(keys.shape, dtype=torch.float64)
        return Logits(nothing, nothing)
    at = at.to(every.values.device)
    return Logits(every.values.gather(1, at), every.size.gather(1, at))


def _compare_logits(run: AnyRun, case: CandidateCase, results: Results) -> list[Figure]:
    got, (keys, _) = results["logits"], _keys(run, case)
    dtype = torch.bfloat16 if case.scored.bf16 else torch.float32
    require_tensors(run, results, {"logits": (dtype, tuple(keys.shape))})
    if not keys.numel():
        return []
    assert run.inputs.scored is not None
    facts, expected = run.inputs.scored.facts, _exact(run, keys)
    seen, values = (keys >= 0).to(expected.values.device), got.to(expected.values.device).double()
    if bool((values[~seen] != -torch.inf).any()):
        raise CaseFailedError(f"{int((values[~seen] != -torch.inf).sum())} columns without a key are not -inf")
    short = run.subject.runs_sm90 and not facts.packed
    limit = tolerance(expected, facts.heads, facts.columns, got.dtype, short=short)
    same = (values == expected.values) | (values.isnan() & expected.values.isnan())
    error = torch.where(same, 0.0, (values - expected.values).abs())
    return [worst("logits", error[seen], limit.nan_to_num(nan=0.0)[seen])]


def _expected_picks(run: AnyRun, case: CandidateCase) -> Results:
    keys, positions = _keys(run, case)
    exact = _exact(run, keys).values.float().cpu().masked_fill(keys < 0, -torch.inf)
    wrapper = PAGED if case.wrapper in OVER_PAGES else FLAT
    rows = exact
    if case.scored.contents != "whole":
        names = list(run.inputs.arguments)
        given = [run.inputs.arguments[name] for name in names[: names.index("candidate_blocks") + 1]]
        rows = run.subject.call(wrapper, *given).cpu()
    picked = [top_k(row, case.k) for row in rows]
    device = run.inputs.arguments["weights"].device
    kept = {"out", *case.gives} if case.out else {"out"}
    found: Results = {
        "out": torch.empty((len(rows), case.k), dtype=torch.int32),
        "scores": torch.empty((len(rows), case.k)),
    }
    for token, (columns, scores) in enumerate(picked):
        padded = torch.cat([positions[token], torch.tensor([-1])])
        found["out"][token] = padded[torch.where(columns < 0, len(padded) - 1, columns).long()].int()
        found["scores"][token] = scores
    return {name: one.to(device) for name, one in found.items() if name in kept}


def _one_level(run: AnyRun) -> list[Figure]:
    """Check that tokens with all their blocks pick the best of all keys. Sums are exact."""
    results, case, inputs = run.call(), run.case, run.inputs
    figures = run.compare(results)
    assert isinstance(case, CandidateCase)
    assert inputs.scored is not None
    device = results["out"].device
    for token, (first, end) in enumerate(ranges_of(case.scored, inputs.arguments)):
        begin = inputs.scored.first[token] if inputs.scored.first else 0
        row = inputs.scored.expected.values[token, begin + first : begin + end]
        if not torch.equal(results["out"][token], top_k(row.float(), case.k)[0].to(device)):
            raise CaseFailedError(f"token {token} picks other keys than of all keys")
    return figures


def _renew(run: AnyRun) -> Iterator[None]:
    arguments = run.inputs.arguments
    if isinstance(run.case, BlocksCase):
        checks.flip(arguments["row_ke"])
    elif isinstance(run.case.scored, FlatCase):
        checks.flip(arguments["cu_seq_len_k_start"], arguments["cu_seq_len_k_end"], arguments["candidate_blocks"])
    else:  # a table names pages as far as its request's keys reach, so that lengths may only fall
        arguments["context_lens"].sub_(9).clamp_(min=0)
    yield


def _workspaces(run: AnyRun) -> Workspaces:
    """Of one token, of some, of all, and of more."""
    assert isinstance(run.case, CandidateCase)
    each = _row_floats(run) * _step(run.case)
    steps = len(run.inputs.arguments["candidate_blocks"]) // _step(run.case)
    floats = {"of one": each, "of three": 3 * each + 17, "of all": steps * each, "of more": (steps + 9) * each + 5}

    def is_used(workspace: torch.Tensor) -> bool:
        return bool((workspace.view(torch.int32)[:each] != TWICE_NAN).any())

    return Workspaces(floats, is_used, each - 1)


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    if case.wrapper == SELECT:
        return _build(subject, BlocksCase("", "", rows=6, starts=(0,), repeat=3, by_name=False), 0).arguments
    scored: FlatCase | PagedCase = FlatCase("", "", "", 3, 16, clean=False)
    if case.wrapper in OVER_PAGES:
        scored = PagedCase("", "", "", (30, 70), next_n=2)
    made = CandidateCase("", "", case.wrapper, scored, 5, k=5)
    return dict(_build(subject, made, 0).arguments)


CANDIDATES = Family(
    name=NAME,
    kinds=(BlocksCase, CandidateCase),
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
        "workspace": checks.workspace(_workspaces),
        "one level": _one_level,
    },
    valid=_valid,
)
