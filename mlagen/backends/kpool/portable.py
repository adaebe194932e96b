"""The indexer that scores pools of keys: its query, keys of pools, the tails of requests, and picked pools' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlagen.backends.parts import cache_argument, indexer_layout, layout, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.common import TORCH_DTYPES
from mlagen.backends.parts.layout_module import Arguments, Pad
from mlagen.layout import CacheLayout
from mlagen.plan import IndexerRows, KpoolPlan, Plan
from mlagen.plan.families.kpool import COMPRESS, EXPAND, QUERY, SEED, UPDATE

MODULE = "kpool"


@dataclass(frozen=True)
class Facts:
    """Facts that both templates take.

    Attributes:
        dtype: the model's dtype.
        layout: layout of the keys; None without keys.
        quantises_query, compresses, seeds, updates, expands: the wrappers of the package.
        writes: whether a wrapper writes keys.
        needs_e4m3: whether kernels depend on the device's e4m3 support.
    """

    dtype: str
    layout: CacheLayout | None
    quantises_query: bool
    compresses: bool
    seeds: bool
    updates: bool
    expands: bool
    writes: bool
    needs_e4m3: bool


@dataclass(frozen=True)
class Kernels(Facts):
    """Context of the kernels' template. Without keys, their facts are None.

    Attributes:
        args: text for argument lists of the layout's helpers.
        pads: padding that is stored.
        element: Triton's name of the model's dtype.
        store, query_store: arguments of each store_... of keys and of the query, as text.
    """

    args: Arguments | None = None
    pads: Sequence[Pad] = ()
    element: str | None = None
    store: str | None = None
    query_store: str | None = None


@dataclass(frozen=True)
class Wrappers(Facts):
    """Context of the wrappers' template. Without keys, their facts are None.

    Attributes:
        torch_dtype: torch's name of the model's dtype.
        row_constant, unit_name, row_alignment, cache_dtypes, cache_strides, cache_doc, takes_pages, checked_in: see
            CacheArgument.
        values_dtype: torch's name of the dtype of values.
        is_ue8m0: whether scales are powers of two.
        query_formula, key_formula: formulas of the scales, for docstrings.
    """

    torch_dtype: str
    row_constant: str | None = None
    unit_name: str | None = None
    row_alignment: int | None = None
    cache_dtypes: str | None = None
    cache_strides: str | None = None
    cache_doc: str | None = None
    takes_pages: bool = False
    checked_in: str | None = None
    values_dtype: str | None = None
    is_ue8m0: bool | None = None
    query_formula: str | None = None
    key_formula: str | None = None


def _facts(plan: Plan, family: KpoolPlan) -> Facts:
    """Return the facts that both templates take."""
    wrappers, rows = plan.spec.wrappers, family.rows
    return Facts(
        dtype=plan.spec.model.dtype,
        layout=rows.layout if rows else None,
        quantises_query=QUERY in wrappers,
        compresses=COMPRESS in wrappers,
        seeds=SEED in wrappers,
        updates=UPDATE in wrappers,
        expands=EXPAND in wrappers,
        writes=bool({COMPRESS, UPDATE} & set(wrappers)),
        needs_e4m3=rows is not None and layout.needs_e4m3(rows.layout),
    )


def _kernels(plan: Plan, family: KpoolPlan) -> Kernels:
    """Context of the kernels' template."""
    found, rows = Kernels(**vars(_facts(plan, family))), family.rows
    if rows is None:
        return found
    of_keys = indexer_layout.keys_context(plan, rows)
    return replace(
        found,
        args=of_keys.args,
        pads=of_keys.pads,
        element=of_keys.element,
        store=layout.store_text(rows.layout),
        query_store=indexer_layout.query_store_text(rows, valid="exists"),
    )


def _wrappers(plan: Plan, family: KpoolPlan) -> Wrappers:
    """Context of the wrappers' template."""
    found = Wrappers(**vars(_facts(plan, family)), torch_dtype=TORCH_DTYPES[plan.spec.model.dtype])
    rows = family.rows
    if rows is None:
        return found
    scales, query_scales = rows.scales, rows.query.scales_of(rows.query.data[0])
    assert scales is not None  # checked by the plan
    assert query_scales is not None
    checked_in = indexer_layout.checking_module(plan)
    return replace(
        found,
        **vars(cache_argument.described(plan, rows.layout, indexer_layout.keys_context(plan, rows), checked_in)),
        values_dtype=TORCH_DTYPES[rows.values.dtype],
        is_ue8m0=scales.rule.rounding == "power_of_two",
        query_formula=query_scales.formula,
        key_formula=scales.formula,
    )


def _layouts(plan: Plan, rows: IndexerRows | None) -> list[GeneratedFile]:
    """Modules of the layouts that the kernels write."""
    found = []
    if rows is not None and {COMPRESS, UPDATE} & set(plan.spec.wrappers):
        found.append(indexer_layout.keys_file(plan, rows))
    if rows is not None and QUERY in plan.spec.wrappers:
        found.append(indexer_layout.query_file(plan, rows))
    return found


def private_files(plan: Plan, family: KpoolPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    kernels = generated(f"_{MODULE}_kernels", vars(_kernels(plan, family)))
    return [*_layouts(plan, family.rows), tiles.file(plan), kernels]


def modules(plan: Plan, family: KpoolPlan) -> list[Module]:
    """The module of the family's wrappers."""
    return [Module(generated(MODULE, vars(_wrappers(plan, family))), family.wanted(plan.spec))]
