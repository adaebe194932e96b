"""Verification of multi-head attention: calls, results against the reference, and checks of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from mlagen.verify import checks
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import NAN
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject
from mlagen.verify.checks import merges, require_bits, variants
from mlagen.verify.dense_fwd import parts
from mlagen.verify.dense_fwd.cases import DenseFwdCase, cases
from mlagen.verify.dense_fwd.inputs import Inputs, build
from mlagen.verify.dense_fwd.invalid import NAME, WRAPPER

DenseFwdRun = Run[DenseFwdCase, Inputs]


def _build(subject: Subject, case: DenseFwdCase, seed: int) -> Inputs:
    return build(case, subject.package.SPEC["spec"], subject.device, seed)


def _call(run: DenseFwdRun, **given: Any) -> Results:
    out, lse = run.subject.call(WRAPPER, **{**run.inputs.arguments, **given})
    return {"out": out, "lse": lse}


def _compare(run: DenseFwdRun, results: Results) -> list[Figure]:
    return parts.compare(run, results, run.inputs.expected())


def _out_alone(run: DenseFwdRun) -> list[Figure]:
    both = run.call()
    alone = run.subject.call(WRAPPER, **run.inputs.arguments, return_softmax_lse=False)
    if not isinstance(alone, torch.Tensor):
        raise CaseFailedError("return_softmax_lse=False does not give out alone")
    require_bits("return_softmax_lse=False", {"out": alone}, both)
    again = run.call(return_softmax_lse=False, return_attn_probs=True)
    require_bits("return_attn_probs=True", both, again)
    return []


def _neighbours(run: DenseFwdRun) -> list[Figure]:
    """The middle request's keys become NaN and its values infinite; the others' results keep their bits."""
    inputs = run.inputs
    changed = {name: inputs.arguments[name].clone() for name in ("k", "v")}
    first = run.call(**changed)
    begin, end = inputs.cu_k[1:3]
    changed["k"][begin:end] = NAN
    changed["v"][begin:end] = math.inf
    results = run.call(**changed)
    own = slice(*inputs.cu_q[1:3])
    kept = [*range(inputs.cu_q[0], own.start), *range(own.stop, inputs.cu_q[3])]
    one, other = ({"out": found["out"][kept], "lse": found["lse"][:, kept]} for found in (first, results))
    require_bits("beside a request of NaN", one, other)
    if not results["out"][own].isnan().all():
        raise CaseFailedError("a request's NaN does not show in its own out")
    return run.compare(first)


def _renew(run: DenseFwdRun) -> Iterator[None]:
    checks.flip(*(run.inputs.arguments[name] for name in ("q", "k", "v")))
    yield


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    return _build(subject, DenseFwdCase("", "", ((2, 5), (1, 3))), 0).arguments


DENSE_FWD = Family(
    name=NAME,
    kinds=(DenseFwdCase,),
    cases=cases,
    build=_build,
    call=_call,
    compare=_compare,
    checks={
        variants.TILES: variants.each_tile("DENSE_FWD_TILES"),
        variants.SMALL: variants.each_tile("DENSE_FWD_UNALIGNED_TILES"),
        "reference": checks.reference,
        "determinism": checks.determinism,
        "defaults": checks.defaults,
        "out alone": _out_alone,
        "neighbours": _neighbours,
        "chunks": parts.chunks,
        "cascade": parts.cascade,
        "parts": parts.any_number,
        "merged": parts.with_sink,
        "quantised": merges.quantised,
        "graph": checks.graph(_renew),
    },
    valid=_valid,
)
