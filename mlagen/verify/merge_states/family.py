"""Verification of merges: calls, and results against the reference."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from mlagen.verify import checks
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import NAN
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject, launch_of
from mlagen.verify.checks import require_none, require_tensors
from mlagen.verify.checks.merges import PARTS, STATES, Conventions
from mlagen.verify.merge_states.cases import PartsCase, StatesCase, cases, value_dims
from mlagen.verify.merge_states.inputs import Inputs, build_parts, build_states
from mlagen.verify.merge_states.invalid import NAME
from mlagen.verify.merge_states.reference import figures

MergeRun = Run[StatesCase | PartsCase, Inputs]


def _dtype(subject: Subject) -> torch.dtype:
    found: torch.dtype = getattr(torch, subject.facts.dtype)
    return found


def _build(subject: Subject, case: StatesCase | PartsCase, seed: int) -> Inputs:
    conventions = Conventions.of(subject.package.SPEC["spec"])
    if isinstance(case, PartsCase):
        return build_parts(case, conventions, _dtype(subject), subject.device, seed)
    return build_states(case, conventions, _dtype(subject), subject.device, seed)


def _call(run: MergeRun, **given: Any) -> Results:
    arguments = run.inputs.arguments | given
    if isinstance(run.case, PartsCase):
        outputs, lses = arguments.pop("outputs"), arguments.pop("lses")
        out, lse = run.subject.call(PARTS, outputs, lses, **arguments)
        return {"out": out, "output_lse": lse}
    with _forced(run.subject, run.case):
        require_none(run.subject.call(STATES, **arguments))
    return {name: arguments[name] for name in ("output", "output_lse") if name in arguments}


def _forced(subject: Subject, case: StatesCase) -> Any:
    """The tile that a merge of two parts is forced to, as the package has it."""
    if case.tile is None:
        return contextlib.nullcontext()
    table = importlib.import_module(f"{subject.package.__name__}._tiles").MERGE_STATES_TILES[case.d_v]
    tiles = [*dict.fromkeys(tile for *_, tile in table)]
    return launch_of(subject.package).force(tile=tiles[case.tile])


def _compare(run: MergeRun, results: Results) -> list[Figure]:
    case, inputs, sizes = run.case, run.inputs, (run.case.tokens, run.case.heads, run.case.d_v)
    out, scale = "out" if isinstance(case, PartsCase) else "output", case.scale
    dtype = _dtype(run.subject) if scale is None else torch.float8_e4m3fn
    lse_sizes = (case.heads, case.tokens) if case.lse_layout == "ht" else (case.tokens, case.heads)
    require_tensors(run, results, {out: (dtype, sizes), "output_lse": (torch.float32, lse_sizes)})
    lse = results.get("output_lse")
    if lse is not None and case.lse_layout == "th":
        lse = lse.T
    return figures(results[out], lse, inputs.expected, inputs.unit, inputs.sink, scale or 1.0)


def _beside(run: MergeRun) -> list[Figure]:
    """LSE of heads that take turns in one buffer share no element, and are taken."""
    names = ("prefix_lse", "suffix_lse", "output_lse")
    heads, tokens = run.case.heads, run.case.tokens
    buffer = torch.full((heads, len(names), tokens), NAN, device=run.subject.device)
    views = dict(zip(names, buffer.unbind(1), strict=True))
    for name in names[:2]:
        views[name].copy_(run.inputs.arguments[name])
    run.inputs.given.pop("output_lse")
    return run.compare(run.call(**views))


def _renew(run: MergeRun) -> Iterator[None]:
    yield  # the same inputs


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    d_v = value_dims(subject.package.SPEC["spec"])[0]
    scale = 1.0 if case.invalid.argument == "output_scale" else None
    if case.wrapper == STATES:
        return _build(subject, StatesCase("", "", 4, 3, d_v, scale=scale), 0).arguments
    return _build(subject, PartsCase("", "", 2, 4, 3, d_v, given="contiguous", scale=scale), 0).arguments


MERGE_STATES = Family(
    name=NAME,
    kinds=(StatesCase, PartsCase),
    cases=cases,
    build=_build,
    call=_call,
    compare=_compare,
    checks={
        "reference": checks.reference,
        "beside": _beside,
        "defaults": checks.defaults,
        "graph": checks.graph(_renew),
    },
    valid=_valid,
)
