"""Verification of attention's prologue."""

from __future__ import annotations

from typing import Any

from mlagen.verify import checks
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.subject import Subject
from mlagen.verify.paged.pages import Pages
from mlagen.verify.prologue.cases import CHAIN, PrologueCase, cases
from mlagen.verify.prologue.chained import chained
from mlagen.verify.prologue.inputs import PrologueInputs, build
from mlagen.verify.prologue.side import CONCAT, NAME, PADDED, Q_ARGUMENT, PrologueSide, side_of

PrologueRun = Run[PrologueCase, PrologueInputs]


def _side(subject: Subject) -> PrologueSide:
    side = side_of(subject.package.SPEC["spec"])
    assert side is not None
    return side


def _build(subject: Subject, case: PrologueCase, seed: int) -> PrologueInputs:
    return build(case, _side(subject), subject.device, seed)


def _run(run: PrologueRun, **given: Any) -> Results:
    """Calls the wrapper. Tensors that it changes in place are results."""
    wrapper, arguments = run.case.wrapper, {**run.inputs.arguments, **given}
    returned = run.subject.call(wrapper, **arguments)
    if wrapper == PADDED:
        heads = run.case.heads + run.case.padded
        q = arguments["q_in"]
        checks.require_tensors(run, {"q": returned}, {"q": (q.dtype, (len(q), heads, q.shape[2]))})
        return {"q": returned}
    checks.require_none(returned)
    latent = {name: arguments[name] for name in ("kv_c", "k_pe")} if wrapper == CONCAT else {}
    return {"q": arguments[Q_ARGUMENT[wrapper]], **latent}


def _call(run: PrologueRun, **given: Any) -> Results:
    """Calls the wrapper on the tensors as they were before any call."""
    run.inputs.reset()
    return _run(run, **given)


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    valid = PrologueCase("", "", wrapper=case.wrapper, pages=Pages(4), tokens=4, weights="q, kv")
    arguments = _build(subject, valid, 0).arguments
    if case.wrapper == CONCAT:
        arguments.pop("q_norm_weight", None)
    return arguments


PROLOGUE = Family(
    name=NAME,
    kinds=(PrologueCase,),
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
