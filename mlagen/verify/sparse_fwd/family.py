"""Verification of sparse attention over rows: calls, results against the reference, and checks of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mlagen.verify import checks, tolerance
from mlagen.verify.batched import sparse_attention
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import NAN, is_wholly_used
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject, launch_of
from mlagen.verify.checks import (
    Variant,
    Workspaces,
    copied,
    mapped,
    merges,
    pairs,
    picked,
    quantised,
    recomputed,
    require_tensors,
    variants,
)
from mlagen.verify.sparse_fwd.cases import Problem, SparseFwdCase, cases
from mlagen.verify.sparse_fwd.inputs import Inputs, build
from mlagen.verify.sparse_fwd.invalid import FLASH, NAME

SparseFwdRun = Run[SparseFwdCase, Inputs]


def _build(subject: Subject, case: SparseFwdCase, seed: int) -> Inputs:
    problem = replace(case.problem, heads=subject.fitting(case.problem.heads))
    stats = ("max_logits", "lse") if case.wrapper == FLASH else ("lse",)
    return build(problem, subject.facts, subject.device, seed, stats if case.check == "buffers" else ())


def _call(run: SparseFwdRun, **given: Any) -> Results:
    with recomputed.noted() as found:
        results = _results(run, **given)
    if found.flags:
        _check_recomputed(run, given.get("q", run.inputs.q), found)
    return results


def _check_recomputed(run: SparseFwdRun, q: torch.Tensor, found: recomputed.Noted) -> None:
    """Groups of tokens are computed again where one names a row twice, and where values that count are not finite."""
    inputs, group = run.inputs, run.subject.package.sparse_fwd.GROUP
    kv = inputs.kv.flatten(0, 1)
    repeats, not_finite = [], []
    for token in range(len(q)):
        named = inputs.indices[token, 0]
        named = named if inputs.length is None else named[: max(int(inputs.length[token]), 0)]
        named = named[(named >= 0) & (named < len(kv))].long()
        repeats.append(len(set(named.tolist())) < len(named))
        not_finite.append(not bool(q[token].isfinite().all() and kv[named].isfinite().all()))

    def grouped(tokens: list[bool]) -> torch.Tensor:
        return torch.tensor([any(tokens[first : first + group]) for first in range(0, len(tokens), group)])

    named_twice = grouped(repeats)
    recomputed.require_flags("the union", found.after("_index_union_kernel"), named_twice, named_twice)
    allowed = named_twice | grouped(not_finite)
    recomputed.require_flags("attention", found.after("_sparse_fwd_sm90_shared_kernel"), named_twice, allowed)


def _results(run: SparseFwdRun, **given: Any) -> Results:
    subject, case, inputs = run.subject, run.case, run.inputs
    named = {**inputs.optional(), "enable_batch_invariant": case.batch_invariant, **given}
    arguments = (named.pop("q", inputs.q), inputs.kv, inputs.indices, inputs.passed_scale)
    plan = case.multiprocessors
    if case.wrapper == FLASH:
        out, max_logits, lse = subject.call(FLASH, *arguments, multiprocessors=plan, d_v=subject.facts.d_v, **named)
        found = {**quantised.named(subject.facts, out), "max_logits": max_logits, "lse": lse}
    else:
        named = {"lse": torch.full(inputs.q.shape[:2], NAN, dtype=torch.float32, device=subject.device), **named}
        out = subject.call(case.wrapper, *arguments, case.splits, plan, multiprocessors=plan, **named)
        found = {**quantised.named(subject.facts, out), "lse": named["lse"]}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _compare(run: SparseFwdRun, results: Results) -> list[Figure]:
    facts, inputs = run.subject.facts, run.inputs
    tokens, heads, d_qk = inputs.q.shape
    stat = (torch.float32, (tokens, heads))
    outs = quantised.shapes(facts, tokens, heads)
    require_tensors(run, results, {**outs, "max_logits": stat, "lse": stat})
    expected = sparse_attention(
        inputs.q,
        inputs.kv,
        inputs.indices[:, 0],
        inputs.sm_scale,
        facts.d_v,
        inputs.sink,
        inputs.length,
        facts.lse_base,
        facts.empty_row_lse,
    )
    if inputs.rotation is not None:
        expected = inputs.rotation.turned(expected)
    if facts.out_heads:
        figures = quantised.errors(facts, results["out"], results["out_scales"], expected, d_qk)
    else:
        figures = tolerance.out_errors(results["out"], expected, d_qk, partials=facts.partials)
    if "max_logits" in results:
        figures.append(tolerance.max_logits_error(results["max_logits"], expected, d_qk, facts.lse_base))
    if "lse" in results:
        topk = inputs.indices.shape[2]
        figures.append(tolerance.lse_error(results["lse"], expected, d_qk, topk, facts.lse_base))
    return figures


def _out_alone(run: SparseFwdRun) -> list[Figure]:
    return run.compare(run.call(lse=None))


def _renew(run: SparseFwdRun) -> Iterator[None]:
    checks.flip(run.inputs.q, run.inputs.indices)
    if run.inputs.rotation is not None:
        run.inputs.rotation.renew()
    yield


def _variants(run: SparseFwdRun) -> Iterator[Variant]:
    every = list(range(len(run.inputs.q)))
    # The first row stays; the others get other queries, indices and lengths.
    others = run.inputs.pick(every)
    others.q[1:] = others.q[1:].flip(2)
    others.indices[1:, :, ::2] = -1
    if others.length is not None:
        others.length[1:] = 1
    yield Variant("beside other rows", others, [0])
    for columns in (1, 800):
        wider = run.inputs.pick(every)
        wider.indices = torch.nn.functional.pad(wider.indices, (0, columns), value=-1)
        yield Variant(f"in a call {columns} wider", wider, every)
    if not run.subject.runs_sm90:  # where another kernel takes rows that begin off 16 bytes
        moved = run.inputs.pick(every)
        moved.q = checks.moved(moved.q)
        yield Variant("with q an element further", moved, every)


def _workspaces(run: SparseFwdRun) -> Workspaces:
    case, q = run.case, run.inputs.q
    tokens, heads, _ = q.shape

    def size(count: int) -> int:
        with run.subject.planned_for(case.multiprocessors):
            sizes = (q.device, count, heads, run.inputs.indices.shape[2], case.splits)
            package = run.subject.package
            return int(package.workspace_size(*sizes, enable_batch_invariant=case.batch_invariant))

    sizes = {"for all tokens": size(tokens), "for two tokens": size(2), "for one token": size(1)}
    return Workspaces(sizes, lambda flat: is_wholly_used(flat, run.subject.facts), size(1) - 4)


def _rows_not_finite(run: SparseFwdRun) -> list[Figure]:
    """Rows with values that are not finite. Only one token names one; it has no part in the others' results."""
    inputs = run.inputs
    inputs.placed.clear()
    tokens, _, topk = inputs.indices.shape
    page_size = inputs.kv.shape[1]
    named = set(torch.unique(inputs.indices).tolist())
    free = [row for row in range(1, inputs.kv.shape[0] * page_size) if row not in named]
    token = tokens // 2
    others = [each for each in range(tokens) if each != token]
    figures = []
    for value, columns in ((NAN, slice(None)), (NAN, slice(3, 4)), (float("inf"), slice(7, 9)), (NAN, slice(-1, None))):
        row = free.pop()
        inputs.kv[row // page_size, row % page_size] = 1.0
        inputs.kv[row // page_size, row % page_size, columns] = value
        changed = replace(inputs, indices=inputs.indices.clone(), given={})
        changed.indices[token, 0, topk // 3] = row
        results = copied(run.on(changed).call())
        if bool(results["out"][token].isfinite().all()):
            raise CaseFailedError(f"a row with {value} has no part in the result of the token that names it")
        figures += run.on(changed.pick(others)).compare(picked(results, others))
    return figures


def _one_by_one(run: SparseFwdRun) -> list[Figure]:
    subject, inputs = run.subject, run.inputs
    module: Any = subject.package.sparse_fwd
    tokens, heads, _ = inputs.q.shape
    device = inputs.q.device
    recompute = 1 - torch.arange(-(-tokens // module.GROUP), dtype=torch.int32, device=device) % 2
    recompute[-1] = 1  # which is not full
    out = torch.full((tokens, heads, subject.facts.d_v), NAN, dtype=inputs.q.dtype, device=device)
    stats = [torch.full((tokens, heads), NAN, device=device) for _ in range(2)]
    launch = launch_of(subject.package)
    with subject.planned_for(run.case.multiprocessors), launch.force(kernel="sm90_shared"):
        facts = launch.device_facts(device)
        topk = inputs.indices.shape[2]
        alignment = module.ALIGNED if topk % 16 == 0 else module.Alignment(16, 1)
        schedule = module.schedule(facts, alignment, tokens, heads, topk, can_share=True)
        rope = [inputs.q[..., subject.facts.d_v :]] if subject.facts.takes_pair else []
        given = (inputs.q, *rope, inputs.kv, inputs.indices, inputs.sm_scale, inputs.length, inputs.sink)
        call = module._Call(facts, schedule, *given, out, *stats, None)
        call.recompute = recompute
        module._launch_recompute(call)
    results = {"out": out, "max_logits": stats[0], "lse": stats[1]}
    flagged = recompute.bool().repeat_interleave(module.GROUP)[:tokens]
    if any(not bool(tensor[~flagged].isnan().all()) for tensor in results.values()):
        raise CaseFailedError("wrote results of tokens that are not flagged")
    rows = flagged.nonzero()[:, 0]
    return run.on(inputs.pick(rows.tolist())).compare(mapped(results, lambda tensor: tensor[rows]))


def _merged(run: SparseFwdRun) -> list[Figure]:
    inputs = run.inputs
    position = torch.arange(inputs.indices.shape[2], device=inputs.indices.device)
    sink, parts = merges.left_out(run.subject, inputs.q.shape[1]), []
    for first, last in merges.positions(merges.cuts_of(run.case.name), len(position)):
        indices = torch.where((position >= first) & (position < last), inputs.indices, -1)
        results = copied(run.on(replace(inputs, indices=indices, sink=sink, given={}, placed={})).call())
        parts.append({"out": results["out"], "lse": results["lse"].T})
    figures = []
    for whole in merges.merged(run, parts, inputs.sink):
        figures += run.compare({"out": whole["out"], "lse": whole["lse"].T})
    return figures


def valid_problem(facts: Facts) -> Problem:
    """So wide a call runs in splits in batch-invariant mode, and so needs a workspace."""
    sink = "random" if facts.sink == "required" else None
    return Problem(2, facts.whole_groups(4), 1100, 60, sink=sink, length="full" if facts.length == "required" else None)


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    inputs = build(valid_problem(subject.facts), subject.facts, subject.device, 0)
    named = {"q": inputs.q, "kv": inputs.kv, "indices": inputs.indices, "sm_scale": inputs.sm_scale}
    return {**named, **inputs.optional(), "enable_batch_invariant": True}


SPARSE_FWD = Family(
    name=NAME,
    kinds=(SparseFwdCase,),
    cases=cases,
    build=_build,
    call=_call,
    compare=_compare,
    checks={
        "reference": checks.reference,
        "buffers": checks.reference,
        "determinism": checks.determinism,
        "invariance": checks.invariance(
            Inputs.pick, _variants, crowd=lambda tokens, big: [0] * (300 if big else 1) + list(range(tokens))
        ),
        "out alone": _out_alone,
        "workspace": checks.workspace(_workspaces),
        "defaults": checks.defaults,
        "stream": checks.stream,
        "graph": checks.graph(_renew),
        "not finite": _rows_not_finite,
        "one by one": _one_by_one,
        "merged": _merged,
        "quantised": merges.quantised,
        variants.TILES: variants.each_tile("SPARSE_FWD_TILES", splits=(1, 2)),
        variants.SMALL: variants.each_tile("SPARSE_FWD_UNALIGNED_TILES", splits=(1, 2)),
        variants.SPLITS: variants.each_combine,
        **pairs.checks(lambda run: run.inputs.q),
    },
    valid=_valid,
)
