"""Verification of writers and gathers."""

from __future__ import annotations

import importlib
from typing import Any

from mlagen.verify import checks
from mlagen.verify.cache import fields
from mlagen.verify.cache.cases import CacheCase, GatherCase, WriteCase, cases
from mlagen.verify.cache.fields import FieldsCase
from mlagen.verify.cache.gather import GatherInputs, build_gather
from mlagen.verify.cache.sides import INSERT, NAME, WRITERS, sides_of
from mlagen.verify.cache.write import WriteInputs, build_write
from mlagen.verify.call.family import Family, Inputs, Results, Run
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject, launch_of
from mlagen.verify.paged.pages import Pages
from mlagen.verify.paged.side import Side

CacheRun = Run[CacheCase, WriteInputs | GatherInputs]


def _side(subject: Subject, module: str) -> Side:
    (side,) = [one for one in sides_of(subject.package.SPEC["spec"]) if one.module == module]
    return side


def _build(subject: Subject, case: CacheCase | FieldsCase, seed: int) -> Inputs:
    return Inputs() if isinstance(case, FieldsCase) else _built(subject, case, seed)


def _built(subject: Subject, case: CacheCase, seed: int) -> WriteInputs | GatherInputs:
    side = _side(subject, case.module)
    if isinstance(case, WriteCase):
        return build_write(case, side, subject.device, seed)
    assert isinstance(case, GatherCase)
    return build_gather(case, side, subject.device, seed)


def _call(run: CacheRun, **given: Any) -> Results:
    """Calls the wrapper, which returns nothing: its results are in the cache or in the output."""
    arguments = {**run.inputs.arguments, **given}
    checks.require_none(run.subject.call(run.case.wrapper, module=run.case.module, **arguments))
    return {}


def _compare(run: CacheRun, results: Results) -> list[Figure]:
    run.inputs.compare()
    return []


def _few_programs(run: CacheRun) -> list[Figure]:
    """As if a call had many tokens: one program a request, and the tile of many tokens."""
    package = run.subject.package
    tile = importlib.import_module(f"{package.__name__}._tiles").GATHER_TILE
    with launch_of(package).force(tile=tile, num_splits=1):
        return checks.reference(run)


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    side = _side(subject, case.module)
    options: dict[str, Any] = {"wrapper": case.wrapper, "module": case.module, "pages": Pages(4)}
    if case.wrapper not in WRITERS:
        return _apart(side, _built(subject, GatherCase("", "", requests=((0, 3), (2, 4)), **options), 0).arguments)
    k_pe = "2d" if side.facts.d_rope else "none"
    arguments = _built(subject, WriteCase("", "", tokens=4, k_pe=k_pe, **options), 0).arguments
    if case.wrapper == INSERT:
        arguments["is_ue8m0"] = any(field.dtype == "ue8m0" for field in side.layout.fields)
    return _apart(side, arguments)


def _apart(side: Side, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with each further tensor of the cache in memory of its own: a graph takes no two dtypes in one."""
    return arguments | {name: arguments[name].clone() for name in side.layout.tensors}


CACHE = Family(
    name=NAME,
    kinds=(WriteCase, GatherCase, FieldsCase),
    cases=cases,
    build=_build,
    call=_call,
    compare=_compare,
    checks={
        "reference": checks.reference,
        "few programs": _few_programs,
        "graph": checks.graph(lambda run: run.inputs.renew()),
        fields.CHECK: lambda run: fields.check_fields(run.subject.package.SPEC["spec"], run.case.cache),
    },
    valid=_valid,
)
