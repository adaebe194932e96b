"""Verification of dense attention over a paged cache: calls, results against the reference, own checks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from mlagen.verify import checks
from mlagen.verify.call.case import ROWS_32, CaseFailedError
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import GARBAGE, NAN
from mlagen.verify.call.patterns import sinks
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject, kernels_of, launch_of, sm90_modules
from mlagen.verify.checks import Variant, Workspaces, copied, decode, merges, pairs, require_bits, variants
from mlagen.verify.checks.decode import FLASH
from mlagen.verify.dense_decode.cases import DenseDecodeCase, DenseDecodeProblem, cases
from mlagen.verify.dense_decode.facts import E4M3_P, DenseDecodeFacts
from mlagen.verify.dense_decode.inputs import Inputs, attend, build
from mlagen.verify.dense_decode.invalid import DECODE, NAME
from mlagen.verify.dense_decode.schedule import share, splits_of

LONGEST = 4  # query tokens a request where bits are compared

DenseDecodeRun = Run[DenseDecodeCase, Inputs]


def _known(subject: Subject) -> DenseDecodeFacts:
    return DenseDecodeFacts.of(subject.package.SPEC["spec"])


def _build(subject: Subject, case: DenseDecodeCase, seed: int) -> Inputs:
    # Bits are compared between calls of one query token a request and of several.
    problem = replace(case.problem, s_q=LONGEST) if case.check == "invariance" else case.problem
    return build(problem, _known(subject), subject.device, seed)


@contextlib.contextmanager
def _planned(run: DenseDecodeRun) -> Iterator[None]:
    """Has calls planned for the case's multiprocessors, and in a case of shares as if sharing requests cost nothing."""
    combine_units = 0 if run.case.check in ("shares", "invariance") else None
    with (
        run.subject.planned_for(run.case.multiprocessors),
        launch_of(run.subject.package).force(combine_units=combine_units),
    ):
        yield


def _call(run: DenseDecodeRun, **given: Any) -> Results:
    subject, case, inputs = run.subject, run.case, run.inputs
    arguments = {**inputs.arguments(case.wrapper), "enable_batch_invariant": case.batch_invariant, **given}
    options: dict[str, Any] = {"multiprocessors": case.multiprocessors}
    with _planned(run):
        if case.wrapper == FLASH:
            metadata = subject.package.get_mla_metadata()[0]
            arguments = {"head_dim_v": subject.facts.d_v, "tile_scheduler_metadata": metadata, **arguments}
            out, lse = subject.call(FLASH, **options, **arguments)
            return {"out": out, "lse": lse}
        shape = (*inputs.q.shape[:3], subject.facts.d_v)
        dtype = merges.QUANTISED if "output_scale" in given else inputs.q.dtype
        out = torch.full(shape, NAN, dtype=dtype, device=subject.device)
        out = arguments.pop("out", out)
        out = inputs.given["out"].view if "out" in inputs.given else out
        subject.call(DECODE, **options, **arguments, o=out[:, 0])
        return {"out": out, "lse": arguments["lse"][:, :, None]}


def _compare(run: DenseDecodeRun, results: Results) -> list[Figure]:
    facts = run.subject.facts
    empty_row_lse = facts.empty_row_lse if run.case.wrapper == FLASH else "-inf"
    expected, keys = attend(run.inputs, facts, empty_row_lse), max([1, *run.inputs.keys])
    return decode.compare(run, results, expected, keys, short=_short(run), e4m3_p=_e4m3_p(run))


def _short(run: DenseDecodeRun) -> bool:
    """Whether the logits of a call are products of fp8 that sm90 adds; in numpy they are added exactly."""
    inputs, subject = run.inputs, run.subject
    if subject.device == "cpu" or not inputs.layout.tensor_scale or not sm90_modules(subject.package):
        return False
    return inputs.q.numel() > 0 and bool(_schedule(run).kernel != "portable")


def _e4m3_p(run: DenseDecodeRun) -> bool:
    """Whether P of a call is e4m3."""
    return _known(run.subject).e4m3_p and run.inputs.q.numel() > 0 and _schedule(run).kernel in E4M3_P


def _view(token: slice) -> checks.View:
    """Results of one of a request's query tokens."""
    return lambda results: {"out": results["out"][:, token], "lse": results["lse"][:, :, token]}


def _variants(run: DenseDecodeRun, longer: Inputs) -> Iterator[Variant]:
    """Of calls of one query token; `longer` has several."""
    every = list(range(len(run.inputs.q)))
    wider = run.inputs.pick(every)
    wider.block_table = torch.nn.functional.pad(wider.block_table, (0, 32), value=GARBAGE)
    yield Variant("with a wider block table", wider, every)
    if run.case.wrapper == FLASH:
        for s_q in (2, longer.q.shape[1]):
            what = f"as the last of {s_q} query tokens"
            yield Variant(what, longer.last_tokens(s_q), every, _view(slice(-1, None)))


def _invariance(run: DenseDecodeRun) -> list[Figure]:
    longer = run.inputs
    check = checks.invariance(
        Inputs.pick,
        lambda alone: _variants(alone, longer),
        alone=0,
        crowd=lambda requests, big: [1] * (300 if big else 12),
    )
    alone = longer.last_tokens(1)
    figures = check(run.on(alone))
    if run.case.wrapper == FLASH and longer.q.shape[1] > 1:
        shorter = replace(alone, q=longer.q[:, -2:-1].contiguous(), lengths=longer.lengths - 1)
        first = copied(run.on(shorter).call())
        got = run.on(longer.last_tokens(2)).call()
        require_bits("as the first of 2 query tokens", first, _view(slice(1))(got))
    return figures


def _schedule(run: DenseDecodeRun) -> Any:
    """The package's schedule of a call with aligned rows."""
    package, inputs = run.subject.package, run.inputs
    module: Any = package.dense_decode
    requests, s_q, heads, _ = inputs.q.shape
    size, kv_heads = inputs.cache.shape[1:3]
    window = [] if module.__dict__.get("WINDOW") is None else [inputs.window or module.MAX_KEYS]
    keys = inputs.block_table.shape[1] * size
    with _planned(run):
        facts = package._launch.device_facts(inputs.q.device)
        d_v = run.subject.facts.d_v
        q = inputs.called_q
        rope = [q[..., d_v:]] if run.subject.facts.takes_pair else []
        tensors = (inputs.cache, *inputs.others.values())
        alignment = module._alignment(q, *rope, *tensors, inputs.q[:, 0, :, :d_v])
        sizes = (requests, s_q, heads, kv_heads, size, keys)
        sm90 = {}
        if "_dense_decode_sm90" in sm90_modules(package):
            sm90["can_sm90"] = module._can_sm90(facts, alignment, size)
        if ROWS_32 in kernels_of(package):
            sm90["e4m3"] = inputs.problem.q_scale is not None
        return module.schedule(facts, alignment, *sizes, *window, run.case.batch_invariant, **sm90)


def _shares(run: DenseDecodeRun) -> list[Figure]:
    inputs, schedule = run.inputs, _schedule(run)
    workspace = torch.zeros(schedule.floats, device=run.subject.device)
    results = run.call(workspace=workspace)
    requests, block = inputs.q.shape[0], schedule.unit_keys
    width = 2 if run.subject.package.dense_decode.__dict__.get("WINDOW") is None else 3
    found = workspace[-width * requests :].view(torch.int32).view(requests, width).tolist()
    kv_blocks = [max(1, -(-keys // block) - inputs.first_key(index) // block) for index, keys in enumerate(inputs.keys)]
    alike = schedule.kernel != "portable"
    parts = share(kv_blocks, schedule.overhead, schedule.combine_units, schedule.programs, alike=alike)
    wanted = splits_of(parts, requests)
    if [tuple(row[:2]) for row in found] != wanted:
        raise CaseFailedError(f"requests have (first program, programs) {found}, and should have {wanted}")
    if run.case.check == "shares" and schedule.programs > 20 and max(count for _, count in wanted) < 2:
        raise CaseFailedError("no request is shared")
    return run.compare(results)


def _blocks(run: DenseDecodeRun) -> list[Figure]:
    with launch_of(run.subject.package).force(block_b=4 if run.subject.device == "cpu" else None):
        return _shares(run)


def _workspaces(run: DenseDecodeRun) -> Workspaces:
    requests, s_q, heads, _ = run.inputs.q.shape
    size, kv_heads = run.inputs.cache.shape[1:3]
    sizes = (requests, s_q, heads, run.inputs.block_table.shape[1] * size, kv_heads)
    with _planned(run):
        options = {"enable_batch_invariant": run.case.batch_invariant}
        floats = run.subject.package.dense_workspace_size(run.inputs.q.device, *sizes, **options)
    return Workspaces({"for the batch": floats}, lambda flat: not bool(flat.isnan().all()), None)


def _pieces(run: DenseDecodeRun) -> list[Figure]:
    whole = copied(run.call())
    with launch_of(run.subject.package).force(workspace_bytes=4):
        schedule = _schedule(run)
        require_bits("in pieces", whole, run.call())
    if schedule.requests != 1:
        raise CaseFailedError(f"a piece has {schedule.requests} requests instead of 1")
    return run.compare(whole)


def _others(run: DenseDecodeRun) -> Mapping[str, Inputs]:
    inputs = run.inputs
    return {
        "h_q": replace(inputs, q=inputs.q[:, :, :-1]),
        "b": inputs.pick([0]),
        "s_q": replace(inputs, q=inputs.q.repeat(1, 2, 1, 1)),
        "causal": replace(inputs, problem=replace(inputs.problem, causal=True)),
    }


def _merged(run: DenseDecodeRun) -> list[Figure]:
    inputs, facts, size = run.inputs, run.subject.facts, run.inputs.problem.block_size
    parts, (requests, width) = [], inputs.block_table.shape
    for first, last in merges.positions(merges.cuts_of(run.case.name), width):
        lengths = (inputs.lengths - first * size).clamp(0, (last - first) * size)
        table = inputs.block_table[:, first : max(last, first + 1)].contiguous()
        keys = lengths.tolist()
        part = replace(inputs, block_table=table, lengths=lengths, keys=keys, given={}, placed={})
        parts.append(decode.by_token(copied(run.on(part).call())))
    sink, heads = None, inputs.q.shape[2]
    if run.case.sink is not None:
        sink = sinks(run.case.sink, heads, 64, torch.Generator().manual_seed(1)).to(inputs.q.device)
    unit = math.log(2) if facts.lse_base == "2" else 1.0
    expected = merges.with_sink(attend(inputs, facts, facts.empty_row_lse), sink, unit)
    figures = []
    for whole in merges.merged(run, parts, sink):
        figures += decode.compare(
            run,
            decode.by_request(whole, requests),
            expected,
            max(inputs.keys),
            short=_short(run),
            e4m3_p=_e4m3_p(run),
        )
    return figures


def _renew(run: DenseDecodeRun) -> Iterator[None]:
    inputs = run.inputs
    for order in ([2, 0, 3, 1], [1, 3, 0, 2]):
        changed = inputs.pick(order)
        inputs.q.copy_(changed.q)
        inputs.block_table.copy_(changed.block_table)
        inputs.lengths.copy_(changed.lengths)
        inputs.keys = changed.keys
        yield


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    flash, known = case.wrapper == FLASH, _known(subject)
    kv_heads = 2 if known.layout.takes_heads else 1
    problem = DenseDecodeProblem((1100, 200), s_q=2 if flash else 1, heads=4, kv_heads=kv_heads)
    inputs = build(problem, known, subject.device, 0)
    arguments = inputs.arguments(case.wrapper) | {"enable_batch_invariant": True}
    if flash:
        metadata = subject.package.get_mla_metadata()[0]
        return arguments | {"head_dim_v": known.facts.d_v, "tile_scheduler_metadata": metadata}
    return arguments | {"o": inputs.q.new_zeros(2, 4, known.facts.d_v)}


DENSE_DECODE = Family(
    name=NAME,
    kinds=(DenseDecodeCase,),
    cases=cases,
    build=_build,
    call=_call,
    compare=_compare,
    checks={
        variants.TILES: variants.each_tile("DENSE_DECODE_TILES", "DENSE_DECODE_UNALIGNED_TILES", by_e4m3=True),
        variants.SMALL: variants.each_tile("DENSE_DECODE_UNALIGNED_TILES", by_e4m3=True),
        "reference": checks.reference,
        "determinism": checks.determinism,
        "invariance": _invariance,
        "shares": _shares,
        "blocks": _blocks,
        "workspace": checks.workspace(_workspaces),
        "pieces": _pieces,
        "defaults": checks.defaults,
        "metadata": decode.metadata(_others),
        "graph": checks.graph(_renew),
        "merged": _merged,
        "quantised": merges.quantised,
        **pairs.checks(lambda run: run.inputs.arguments(run.case.wrapper)["q"]),
    },
    valid=_valid,
)
