"""Verification of the compressor."""

from __future__ import annotations

from typing import Any

from mlagen.verify import checks
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.subject import Subject
from mlagen.verify.compressor import inputs as compress_inputs
from mlagen.verify.compressor import states
from mlagen.verify.compressor.cases import CHAIN, CompressCase, SaveCase, cases
from mlagen.verify.compressor.chained import chained
from mlagen.verify.compressor.inputs import CompressInputs
from mlagen.verify.compressor.side import COMPRESS, NAME, SAVE, CompressorSide, sides_of
from mlagen.verify.compressor.states import StatesInputs

CompressorCase = SaveCase | CompressCase
CompressorInputs = StatesInputs | CompressInputs
CompressorRun = Run[Any, Any]


def _side(subject: Subject, short: str) -> CompressorSide:
    return next(one for one in sides_of(subject.package.SPEC["spec"]) if one.short == short)


def _build(subject: Subject, case: CompressorCase, seed: int) -> CompressorInputs:
    if isinstance(case, SaveCase):
        return states.build(case, _side(subject, "rows"), subject.device, seed)
    return compress_inputs.build(case, _side(subject, case.short), subject.device, seed)


def _run(run: CompressorRun, **given: Any) -> Results:
    """Calls the wrapper, which writes to the states or to the cache."""
    wrapper = SAVE if isinstance(run.case, SaveCase) else COMPRESS
    checks.require_none(run.subject.call(wrapper, **{**run.inputs.arguments, **given}))
    return {}


def _call(run: CompressorRun, **given: Any) -> Results:
    """Calls the wrapper on memory as it was before any call."""
    run.inputs.reset()
    return _run(run, **given)


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    if case.wrapper == SAVE:
        return _build(subject, SaveCase("", "", tokens=4), 0).arguments
    short = "keys" if case.name.endswith("(keys)") else "rows"
    return _build(subject, CompressCase("", "", short=short), 0).arguments


COMPRESSOR = Family(
    name=NAME,
    kinds=(SaveCase, CompressCase),
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
