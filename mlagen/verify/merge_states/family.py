"""What merges are to verification: calls, and results against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mlagen.verify import checks
from mlagen.verify.checks import require_none, require_tensors
from mlagen.verify.family import Family, Results, Run
from mlagen.verify.invalid import RefusedCase
from mlagen.verify.merge_states.cases import PartsCase, StatesCase, cases, value_dims
from mlagen.verify.merge_states.inputs import Inputs, build_parts, build_states
from mlagen.verify.merge_states.invalid import NAME, PARTS, STATES
from mlagen.verify.merge_states.reference import figures
from mlagen.verify.results import Figure
from mlagen.verify.subject import Subject

MergeRun = Run[StatesCase | PartsCase, Inputs]


def _dtype(subject: Subject) -> torch.dtype:
    found: torch.dtype = getattr(torch, subject.facts.dtype)
    return found


def _build(subject: Subject, case: StatesCase | PartsCase, seed: int) -> Inputs:
    if isinstance(case, PartsCase):
        return build_parts(case, _dtype(subject), subject.device, seed)
    return build_states(case, _dtype(subject), subject.device, seed)


def _call(run: MergeRun, **given: Any) -> Results:
    arguments = run.inputs.arguments | given
    if isinstance(run.case, PartsCase):
        outputs, lses = arguments.pop("outputs"), arguments.pop("lses")
        out, lse = run.subject.call(PARTS, outputs, lses, **arguments)
        return {"out": out, "output_lse": lse}
    require_none(run.subject.call(STATES, **arguments))
    return {name: arguments[name] for name in ("output", "output_lse") if name in arguments}


def _compare(run: MergeRun, results: Results) -> list[Figure]:
    case, sizes = run.case, (run.case.tokens, run.case.heads, run.case.d_v)
    out = "out" if isinstance(case, PartsCase) else "output"
    lse = (torch.float32, (case.heads, case.tokens))
    require_tensors(run, results, {out: (_dtype(run.subject), sizes), "output_lse": lse})
    return figures(results[out], results.get("output_lse"), run.inputs.expected, run.inputs.unit)


def _renew(run: MergeRun) -> Iterator[None]:
    yield  # the same inputs


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    d_v = value_dims(subject.package.SPEC["spec"])[0]
    if case.wrapper == STATES:
        return _build(subject, StatesCase("", "", 4, 3, d_v), 0).arguments
    values = torch.zeros(2, 4, 3, d_v, dtype=_dtype(subject), device=subject.device)
    lses = torch.zeros(2, 3, 4, device=subject.device)
    return {"outputs": values, "lses": lses, "out": values[0].clone(), "output_lse": lses[0].clone()}


MERGE_STATES = Family(
    name=NAME,
    kinds=(StatesCase, PartsCase),
    cases=cases,
    build=_build,
    call=_call,
    compare=_compare,
    checks={"reference": checks.reference, "defaults": checks.defaults, "graph": checks.graph(_renew)},
    valid=_valid,
)
