"""Verification of attention's output, rotated back and quantised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlagen.verify import checks
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.subject import Subject
from mlagen.verify.out_quant.cases import OutQuantCase, cases
from mlagen.verify.out_quant.inputs import OutQuantInputs, build
from mlagen.verify.out_quant.side import NAME, WRAPPER, side_of

OutQuantRun = Run[OutQuantCase, OutQuantInputs]


def _build(subject: Subject, case: OutQuantCase, seed: int) -> OutQuantInputs:
    side = side_of(subject.package.SPEC["spec"])
    assert side is not None
    return build(case, side, subject.device, seed)


def _call(run: OutQuantRun, **given: Any) -> Results:
    """Calls the wrapper."""
    returned = run.subject.call(WRAPPER, **{**run.inputs.arguments, **given})
    return dict(zip(("out", "scales"), returned, strict=True))


def _renew(run: OutQuantRun) -> Iterator[None]:
    return run.inputs.renew()


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    return _build(subject, OutQuantCase("", ""), 0).arguments


OUT_QUANT = Family(
    name=NAME,
    kinds=(OutQuantCase,),
    cases=cases,
    build=_build,
    call=_call,
    compare=lambda run, results: run.inputs.compare(results),
    checks={"reference": checks.reference, "defaults": checks.defaults, "graph": checks.graph(_renew)},
    valid=_valid,
)
