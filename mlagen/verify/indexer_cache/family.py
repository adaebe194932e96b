"""Verification of the kernels around the indexer's keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mlagen.verify import checks
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import bits
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject
from mlagen.verify.checks import variants
from mlagen.verify.indexer_cache.cases import KeysCase, KeysGatherCase, KeysQueryCase, QueryCase, cases
from mlagen.verify.indexer_cache.inputs import (
    GatherInputs,
    Inputs,
    KeysInputs,
    build_gather,
    build_keys,
    build_query,
)
from mlagen.verify.indexer_cache.keys_query import (
    KeysQueryInputs,
    beside,
    build_keys_query,
    call_keys_query,
    expected_of,
)
from mlagen.verify.indexer_cache.reference import quantise_query
from mlagen.verify.indexer_cache.side import GATHER, KEYS_QUERY, NAME, NORMALISE, QUERY, IndexerSide, side_of
from mlagen.verify.paged.pages import Pages

IndexerCase = KeysCase | KeysGatherCase | QueryCase | KeysQueryCase
IndexerRun = Run[IndexerCase, Inputs]


def _side(subject: Subject) -> IndexerSide:
    side = side_of(subject.package.SPEC["spec"])
    assert side is not None
    return side


def _build(subject: Subject, case: IndexerCase, seed: int) -> Inputs:
    side = _side(subject)
    if isinstance(case, KeysCase):
        return build_keys(case, side, subject.device, seed)
    if isinstance(case, QueryCase):
        return build_query(case, side, subject.device, seed)
    if isinstance(case, KeysQueryCase):
        return build_keys_query(subject, case, side, seed)
    return build_gather(case, side, subject.device, seed)


def _call(run: IndexerRun, **given: Any) -> Results:
    """Calls by position, as engines do. Results of a writer or the gather are in the cache or in the outputs."""
    if isinstance(run.case, KeysQueryCase):
        return call_keys_query(run, **given)
    case, arguments = run.case, list({**run.inputs.arguments, **given}.values())
    if isinstance(case, QueryCase):
        q, weights = run.subject.call(QUERY, *arguments)
        values, *scales = q if isinstance(q, tuple) else (q,)
        return {"values": values, "weights": weights, **dict(zip(("scales",), scales, strict=False))}
    wrapper = case.wrapper if isinstance(case, KeysCase) else GATHER
    named = {}
    if isinstance(case, KeysCase) and "use_fp4_cache" in run.inputs.arguments:
        named = {"use_fp4_cache": arguments.pop()}  # behind compress_ratio, which may be left out
    checks.require_none(run.subject.call(wrapper, *arguments, **named))
    return {}


def _compare(run: IndexerRun, results: Results) -> list[Figure]:
    inputs = run.inputs
    if isinstance(inputs, KeysInputs | GatherInputs):
        inputs.compare()
        return []
    side = inputs.side
    if isinstance(inputs, KeysQueryInputs):
        inputs.keys.compare()
        expected = _expected(side, *expected_of(inputs))
    else:
        q = inputs.tensor("index_q")
        positions = inputs.tensor("positions")[: len(q)]
        angles = inputs.tensor("index_q_cos_sin_cache") if side.rope else torch.zeros(1, 0)
        scales = [inputs.arguments[f"index_weights_{name}_scale"] for name in ("softmax", "head")]
        expected = _expected(side, q, positions, angles, inputs.tensor("index_weights"), *scales)
        dtypes = {"e4m3": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
        expected["values"] = expected["values"].view(dtypes.get(side.values.dtype, torch.uint8))
    _compare_query(run, results, expected)
    return []


def _expected(side: IndexerSide, *query: Any) -> Results:
    """The reference's results for a query, by name; values as bytes."""
    return dict(zip(("values", "scales", "weights"), quantise_query(side, *query), strict=True))


def _compare_query(run: IndexerRun, results: Results, expected: Results) -> None:
    """Raises CaseFailedError unless results of a query have the expected bits."""
    if not run.inputs.side.packed:
        del expected["scales"]
    if results.keys() != expected.keys():
        raise CaseFailedError(f"returned {sorted(results)} instead of {sorted(expected)}")
    shapes = {name: (one.dtype, tuple(one.shape)) for name, one in expected.items()}
    checks.require_tensors(run, results, shapes)
    for name, want in expected.items():
        got = results[name].cpu()
        wrong = bits(got.contiguous()) != bits(want.contiguous())
        if name == "weights":
            wrong &= ~(got.isnan() & want.isnan())
        if bool(wrong.any()):
            raise CaseFailedError(f"{int(wrong.sum())} of {wrong.numel()} {name} differ from the reference's")


def _renew(run: IndexerRun) -> Iterator[None]:
    inputs = run.inputs
    if isinstance(inputs, KeysInputs | GatherInputs | KeysQueryInputs):
        return inputs.renew()
    checks.flip(inputs.arguments["index_q"], inputs.arguments["positions"])
    return iter((None,))


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    if case.wrapper == QUERY:
        return _build(subject, QueryCase("", ""), 0).arguments
    if case.wrapper == KEYS_QUERY:
        keys = KeysCase("", "", wrapper=NORMALISE, pages=Pages(4), tokens=4)
        return _build(subject, KeysQueryCase("", "", keys), 0).arguments
    if case.wrapper == GATHER:
        return _build(subject, KeysGatherCase("", "", pages=Pages(4), requests=(3, 5)), 0).arguments
    return _build(subject, KeysCase("", "", wrapper=case.wrapper, pages=Pages(4), tokens=4), 0).arguments


INDEXER_CACHE = Family(
    name=NAME,
    kinds=(KeysCase, KeysGatherCase, QueryCase, KeysQueryCase),
    cases=cases,
    build=_build,
    call=_call,
    compare=_compare,
    checks={
        "reference": checks.reference,
        variants.TARGETS: variants.each_target,
        "defaults": checks.defaults,
        "beside": beside,
        "graph": checks.graph(_renew),
    },
    valid=_valid,
)
