"""Verification of latents."""

from __future__ import annotations

from typing import Any

from mlagen.verify import checks
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.subject import Subject
from mlagen.verify.latents import groups
from mlagen.verify.latents import inputs as insert_inputs
from mlagen.verify.latents.cases import CHAIN, InsertCase, PoolCase, cases
from mlagen.verify.latents.chained import chained
from mlagen.verify.latents.groups import PoolInputs
from mlagen.verify.latents.inputs import InsertInputs
from mlagen.verify.latents.side import INSERT, NAME, POOL, side_of

LatentsRun = Run[Any, Any]


def _build(subject: Subject, case: PoolCase | InsertCase, seed: int) -> PoolInputs | InsertInputs:
    side = side_of(subject.package.SPEC["spec"])
    assert side is not None
    if isinstance(case, PoolCase):
        return groups.build(case, side, subject.device, seed)
    return insert_inputs.build(case, side, subject.device, seed)


def _run(run: LatentsRun, **given: Any) -> Results:
    """Calls the wrapper, which writes to latents and states, or to the cache."""
    wrapper = POOL if isinstance(run.case, PoolCase) else INSERT
    checks.require_none(run.subject.call(wrapper, **{**run.inputs.arguments, **given}))
    return {}


def _call(run: LatentsRun, **given: Any) -> Results:
    """Calls the wrapper on memory as it was before any call."""
    run.inputs.reset()
    return _run(run, **given)


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    valid = PoolCase("", "") if case.wrapper == POOL else InsertCase("", "", tokens=4)
    return _build(subject, valid, 0).arguments


LATENTS = Family(
    name=NAME,
    kinds=(PoolCase, InsertCase),
    cases=cases,
    build=_build,
    call=_call,
    compare=lambda run, results: run.inputs.compare(results),
    checks={
        "reference": checks.reference,
        "defaults": checks.defaults,
        "graph": checks.replays(_run),
        CHAIN: chained,
    },
    valid=_valid,
)
