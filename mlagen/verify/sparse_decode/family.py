"""Verification of sparse attention over a paged cache: calls, results against the reference, own checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from mlagen.layout import ScalesField
from mlagen.verify import checks, tolerance
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.invalid import RefusedCase, check_refused
from mlagen.verify.call.memory import NAN, bits, is_wholly_used
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject, sm90_modules
from mlagen.verify.checks import (
    Variant,
    Workspaces,
    copied,
    decode,
    merges,
    pairs,
    quantised,
    recomputed,
    require_bits,
    variants,
)
from mlagen.verify.checks.decode import FLASH
from mlagen.verify.sparse_decode.cases import CacheProblem, Listing, SparseDecodeCase, cases
from mlagen.verify.sparse_decode.facts import CacheFacts
from mlagen.verify.sparse_decode.inputs import Inputs, ListInputs, attend, build
from mlagen.verify.sparse_decode.invalid import NAME, refused

SparseDecodeRun = Run[SparseDecodeCase, Inputs]


def _known(subject: Subject) -> CacheFacts:
    return CacheFacts.of(subject.package.SPEC["spec"])


def _build(subject: Subject, case: SparseDecodeCase, seed: int) -> Inputs:
    return build(case.problem, _known(subject), subject.device, seed)


def _leaves_fp16(one: ListInputs) -> bool:
    """Whether rows of any codes and scales leave fp16. Those with e4m3 scales do not: 448 times a code of fp4 fits."""
    return any(isinstance(part, ScalesField) and part.dtype != "e4m3" for part in one.layout.fields)


def _call(run: SparseDecodeRun, **given: Any) -> Results:
    subject, case = run.subject, run.case
    arguments: dict[str, Any] = {
        "head_dim_v": subject.facts.d_v,
        "enable_batch_invariant": case.batch_invariant,
        "tile_scheduler_metadata": subject.package.get_mla_metadata()[0],
        **run.inputs.arguments(),
        **given,
    }
    with recomputed.noted() as found:
        out, lse = subject.call(FLASH, multiprocessors=case.multiprocessors, **arguments)
    if found.watched and bool(run.inputs.q.isfinite().all()):
        lists = zip(run.inputs.lists, case.problem.listings, strict=True)
        wide = any(listing.contents == "wide" and _leaves_fp16(one) for one, listing in lists)
        recomputed.require_calls(found, wide or case.problem.wide_q)
    outs = quantised.named(subject.facts, out)
    if subject.facts.out_heads:
        shape = given.get("q", run.inputs.q).shape[:2]
        outs = {name: one.unflatten(0, shape) for name, one in outs.items()}  # type: ignore[no-untyped-call]
    return {**outs, "lse": lse}


def _compare(run: SparseDecodeRun, results: Results) -> list[Figure]:
    subject, inputs = run.subject, run.inputs
    # The sm90 kernel rounds scaled elements to fp16, where the reference rounds them to bf16.
    may_round = subject.runs_sm90 and "_sparse_decode_sm90" in sm90_modules(subject.package)
    k_error = 0.0
    if may_round and any(one.any_scales for one in inputs.lists):
        k_error = 2 * tolerance.UNIT_ROUNDOFF[inputs.q.dtype]
    topk = sum(one.indices.shape[2] for one in inputs.lists)
    # sm90 adds products of fp8 where rows are aligned; of others q is made the model's dtype first. Numpy adds exactly.
    short = subject.device == "cuda" and inputs.q_scale is not None
    return decode.compare(run, results, attend(inputs, subject.facts), topk, k_error, short=short)


def _nan(run: SparseDecodeRun) -> list[Figure]:
    subject, inputs = run.subject, run.inputs
    first = copied(run.call())
    figures = run.compare(first)
    inputs.placed.clear()
    inputs.q[0, 0, 1, 5] = NAN
    inputs.q[-1, -1] = NAN
    results = run.call()
    reached = inputs.q.isnan().any(3) & ~first["lse"].transpose(1, 2).isinf()  # [requests, s_q, heads]
    lse_reached = reached.transpose(1, 2)
    facts = subject.facts
    outs = [quantised.by_head(facts, one["out"]) for one in (first, results)]
    for name, rows in (("out", outs[1][reached].float()), ("lse", results["lse"][lse_reached])):
        if not bool(rows.isnan().all()):
            raise CaseFailedError(f"{name}: {int((~rows.isnan()).sum())} elements of heads with NaN in q are numbers")
    out = torch.where(reached[..., None], bits(outs[0]), bits(outs[1]))
    lse = torch.where(lse_reached, first["lse"], results["lse"])
    require_bits("beside NaN", {"out": outs[0], "lse": first["lse"]}, {"out": out, "lse": lse})
    return figures


def _variants(run: SparseDecodeRun) -> Iterator[Variant]:
    inputs = run.inputs
    every = list(range(len(inputs.q)))
    # The first request stays; the others get other queries and indices.
    others = inputs.pick(every)
    others.q[1:] = others.q[1:].flip(3)
    for one in others.lists:
        one.indices[1:, :, ::2] = -1
    yield Variant("beside other rows", others, [0])
    for columns in (1, 800):
        wider = inputs.pick(every)
        last = wider.lists[-1]
        last.indices = torch.nn.functional.pad(last.indices, (0, columns), value=-1)
        yield Variant(f"in a call {columns} wider", wider, every)
    if not run.subject.runs_sm90:  # where another kernel takes rows that begin off 16 bytes
        moved = inputs.pick(every)
        moved.q = checks.moved(moved.q)
        yield Variant("with q an element further", moved, every)
    if all(one.length is None for one in inputs.lists):
        lists = [replace(one, indices=one.indices.transpose(0, 1).contiguous()) for one in inputs.lists]
        joined = replace(inputs, q=inputs.q.transpose(0, 1).contiguous(), lists=lists, given={}, placed={})
        yield Variant("as tokens of one request", joined, every, _by_request)


def _by_request(results: Results) -> Results:
    """Results of the tokens of one request as those of requests of one token."""
    outs = {name: one.transpose(0, 1) for name, one in results.items() if name != "lse"}
    return {**outs, "lse": results["lse"].permute(2, 1, 0)}


def _workspaces(run: SparseDecodeRun) -> Workspaces:
    case, inputs = run.case, run.inputs
    requests, s_q, heads, _ = inputs.q.shape
    topks = [one.indices.shape[2] for one in inputs.lists]

    def size(count: int) -> int:
        with run.subject.planned_for(case.multiprocessors):
            options = {"enable_batch_invariant": case.batch_invariant}
            package = run.subject.package
            return int(package.kvcache_workspace_size(inputs.q.device, 1, count, heads, *topks, **options))

    sizes = {"for all tokens": size(requests * s_q), "for two tokens": size(2), "for one token": size(1)}
    return Workspaces(sizes, lambda flat: is_wholly_used(flat, run.subject.facts), size(1) - 4)


def _merged(run: SparseDecodeRun) -> list[Figure]:
    inputs, cuts = run.inputs, merges.cuts_of(run.case.name)
    sink, parts = merges.left_out(run.subject, inputs.q.shape[2]), []
    for part in range(len(cuts) - 1):
        lists = []
        for one in inputs.lists:
            position = torch.arange(one.indices.shape[2], device=one.indices.device)
            first, last = list(merges.positions(cuts, len(position)))[part]
            own = (position >= first) & (position < last)
            lists.append(replace(one, indices=torch.where(own, one.indices, -1)))
        results = copied(run.on(replace(inputs, lists=lists, sink=sink, given={}, placed={})).call())
        parts.append(decode.by_token(results))
    figures = []
    for whole in merges.merged(run, parts, inputs.sink):
        figures += run.compare(decode.by_request(whole, inputs.q.shape[0]))
    return figures


def _others(run: SparseDecodeRun) -> Mapping[str, Inputs]:
    inputs = run.inputs
    heads = inputs.q.shape[2] - run.subject.facts.whole_groups(1)
    fewer = replace(inputs, q=inputs.q[:, :, :heads], sink=None if inputs.sink is None else inputs.sink[:heads])
    narrower = inputs.pick(range(len(inputs.q)))
    narrower.lists[-1].indices = narrower.lists[-1].indices[:, :, :-1]
    return {"h_q": fewer, "b": inputs.pick([0]), "topk": narrower}


def _renew(run: SparseDecodeRun) -> Iterator[None]:
    checks.flip(run.inputs.q, *(one.indices for one in run.inputs.lists))
    if run.inputs.rotation is not None:
        run.inputs.rotation.renew()
    yield


def _valid_arguments(subject: Subject) -> dict[str, Any]:
    """So wide a call runs in splits in batch-invariant mode, and so needs a workspace."""
    known = _known(subject)
    length = "full" if known.facts.length == "required" else None
    extra = Listing(32, 60, 7, length=length) if len(known.layouts) > 1 else None
    sink = "random" if known.facts.sink == "required" else None
    problem = CacheProblem(2, 2, known.facts.whole_groups(4), Listing(1100, 200, length=length), extra, sink)
    arguments = build(problem, known, subject.device, 0).arguments()
    return arguments | {"head_dim_v": known.facts.d_v, "enable_batch_invariant": True}


def _fresh(subject: Subject, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with metadata that has recorded nothing."""
    return {**arguments, "tile_scheduler_metadata": subject.package.get_mla_metadata()[0]}


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    return _fresh(subject, _valid_arguments(subject))


def _refusals_after_a_call(run: SparseDecodeRun) -> list[Figure]:
    subject = run.subject
    valid = _valid_arguments(subject)
    subject.call(FLASH, **_fresh(subject, valid))
    for case in refused(_known(subject)):
        check_refused(subject, case, _fresh(subject, valid))
    return []


SPARSE_DECODE = Family(
    name=NAME,
    kinds=(SparseDecodeCase,),
    cases=cases,
    build=_build,
    call=_call,
    compare=_compare,
    checks={
        "reference": checks.reference,
        "buffers": checks.reference,
        "determinism": checks.determinism,
        "nan": _nan,
        "invariance": checks.invariance(
            Inputs.pick, _variants, crowd=lambda requests, big: [0] * (300 if big else 1) + list(range(requests))
        ),
        "workspace": checks.workspace(_workspaces),
        "defaults": checks.defaults,
        "metadata": decode.metadata(_others),
        "refusals": _refusals_after_a_call,
        "stream": checks.stream,
        "graph": checks.graph(_renew),
        "merged": _merged,
        "quantised": merges.quantised,
        variants.TILES: variants.each_tile("SPARSE_DECODE_TILES", splits=(1, 2), by_e4m3=True),
        variants.SMALL: variants.each_tile("SPARSE_DECODE_UNALIGNED_TILES", splits=(1, 2), by_e4m3=True),
        variants.SPLITS: variants.each_combine,
        **pairs.checks(lambda run: run.inputs.arguments()["q"]),
    },
    valid=_valid,
)
