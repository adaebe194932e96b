"""The indexer that scores pools of keys: its query, keys of pools, the tails of requests, and picked pools' tokens."""

from __future__ import annotations

from typing import Any

from mlagen.backends.parts import cache_argument, indexer_layout, layout, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.common import TORCH_DTYPES
from mlagen.plan import IndexerRows, KpoolPlan, Plan
from mlagen.plan.families.kpool import COMPRESS, EXPAND, QUERY, SEED, UPDATE

MODULE = "kpool"
VALUES_DTYPES = {"e4m3": "float8_e4m3fn", "e4m3fnuz": "float8_e4m3fnuz"}


def _shared(plan: Plan, family: KpoolPlan) -> dict[str, Any]:
    """Return the context of both templates; without keys, their facts are None."""
    wrappers, rows = plan.spec.wrappers, family.rows
    found: dict[str, Any] = {
        "dtype": plan.spec.model.dtype,
        "layout": rows and rows.layout,
        "quantises_query": QUERY in wrappers,
        "compresses": COMPRESS in wrappers,
        "seeds": SEED in wrappers,
        "updates": UPDATE in wrappers,
        "expands": EXPAND in wrappers,
        "writes": bool({COMPRESS, UPDATE} & set(wrappers)),
        "needs_e4m3": rows is not None and layout.needs_e4m3(rows.layout),
    }
    return found


def _kernels(plan: Plan, family: KpoolPlan) -> dict[str, Any]:
    """Context of the kernels' template."""
    found = {**_shared(plan, family), "args": None, "pads": False, "store": None, "query_store": None, "element": None}
    rows = family.rows
    if rows is None:
        return found
    of_keys = indexer_layout.keys_context(plan, rows)
    return found | {
        **{name: getattr(of_keys, name) for name in ("args", "pads", "element")},
        "store": layout.store_text(rows.layout),
        "query_store": indexer_layout.query_store_text(rows, valid="there"),
    }


def _wrappers(plan: Plan, family: KpoolPlan) -> dict[str, Any]:
    """Context of the wrappers' template."""
    found = {**_shared(plan, family), "torch_dtype": TORCH_DTYPES[plan.spec.model.dtype], "takes_pages": False}
    rows = family.rows
    names = ("row_constant", "unit_name", "row_alignment", "cache_dtypes", "cache_strides", "cache_doc")
    if rows is None:
        return found | dict.fromkeys((*names, "values_dtype", "is_ue8m0", "query_formula", "key_formula"))
    scales, query_scales = rows.scales, rows.query.scales_of(rows.query.data[0])
    assert scales is not None  # checked by the plan
    assert query_scales is not None
    return found | {
        **vars(cache_argument.described(plan, rows.layout, indexer_layout.keys_context(plan, rows))),
        "values_dtype": VALUES_DTYPES[rows.values.dtype],
        "is_ue8m0": scales.rule.rounding == "power_of_two",
        "query_formula": query_scales.formula,
        "key_formula": scales.formula,
    }


def _layouts(plan: Plan, rows: IndexerRows | None) -> list[GeneratedFile]:
    """Modules of the layouts that the kernels write."""
    found = []
    if rows is not None and {COMPRESS, UPDATE} & set(plan.spec.wrappers):
        found.append(indexer_layout.keys_file(plan, rows))
    if rows is not None and QUERY in plan.spec.wrappers:
        found.append(indexer_layout.query_file(plan, rows))
    return found


def shared(plan: Plan, family: KpoolPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    kernels = generated(f"_{MODULE}_kernels", _kernels(plan, family))
    return [*_layouts(plan, family.rows), tiles.file(plan), kernels]


def modules(plan: Plan, family: KpoolPlan) -> list[Module]:
    """The module of the family's wrappers."""
    names = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
    return [Module(generated(MODULE, _wrappers(plan, family)), names)]
