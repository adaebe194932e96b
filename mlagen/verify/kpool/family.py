"""Verification of the functions around pools of keys."""

from __future__ import annotations

from typing import Any

from mlagen.verify import checks
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.subject import Subject
from mlagen.verify.kpool import inputs
from mlagen.verify.kpool.cases import (
    CHAIN,
    SELECT,
    ExpandCase,
    PoolsCase,
    RowsCase,
    SeedCase,
    SelectCase,
    UpdateCase,
    cases,
)
from mlagen.verify.kpool.chained import chained
from mlagen.verify.kpool.inputs import KpoolInputs
from mlagen.verify.kpool.selected import selected
from mlagen.verify.kpool.side import COMPRESS, EXPAND, NAME, QUERY, SEED, UPDATE, side_of

KpoolCase = RowsCase | PoolsCase | SeedCase | UpdateCase | ExpandCase | SelectCase
KpoolRun = Run[Any, KpoolInputs]
WRAPPERS = {RowsCase: QUERY, PoolsCase: COMPRESS, SeedCase: SEED, UpdateCase: UPDATE, ExpandCase: EXPAND}
BUILD: dict[type, Any] = {
    RowsCase: inputs.build_rows,
    PoolsCase: inputs.build_pools,
    SeedCase: inputs.build_seed,
    UpdateCase: inputs.build_update,
    ExpandCase: inputs.build_expand,
}


def _build(subject: Subject, case: KpoolCase, seed: int) -> KpoolInputs:
    side = side_of(subject.package.SPEC["spec"])
    if isinstance(case, SelectCase):
        return KpoolInputs(side, case, {})
    found: KpoolInputs = BUILD[type(case)](case, side, subject.device, seed)
    return found


def _run(run: KpoolRun, **given: Any) -> Results:
    """Calls the wrapper, which returns tensors or writes to the cache and the tails."""
    returned = run.subject.call(WRAPPERS[type(run.case)], **{**run.inputs.arguments, **given})
    if isinstance(run.case, RowsCase):
        return dict(zip(("q_fp8", "q_scale"), returned, strict=True))
    if isinstance(run.case, ExpandCase):
        return {"indices": returned}
    checks.require_none(returned)
    return {}


def _call(run: KpoolRun, **given: Any) -> Results:
    """Calls the wrapper on memory as it was before any call."""
    run.inputs.reset()
    return _run(run, **given)


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    ordinary: dict[str, KpoolCase] = {
        QUERY: RowsCase("", "", 3),
        COMPRESS: PoolsCase("", "", mask="mixed"),
        SEED: SeedCase("", ""),
        UPDATE: UpdateCase("", "", next_n=3),
        EXPAND: ExpandCase("", "", picked=100),
    }
    return _build(subject, ordinary[case.wrapper], 0).arguments


KPOOL = Family(
    name=NAME,
    kinds=(RowsCase, PoolsCase, SeedCase, UpdateCase, ExpandCase, SelectCase),
    cases=cases,
    build=_build,
    call=_call,
    compare=lambda run, results: run.inputs.compare(results),
    checks={
        "reference": checks.reference,
        "defaults": checks.defaults,
        "graph": checks.replays(_run),
        CHAIN: chained,
        SELECT: selected,
    },
    valid=_valid,
)
