"""Contexts of the modules with the layouts of the indexer's keys and query.

Writers take whole rows, or slices if RoPE rotates them (`IndexerRows.slice_columns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlagen.backends.parts.base import GeneratedFile, generated
from mlagen.backends.parts.common import tuple_text
from mlagen.backends.parts.layout import (
    MODULE,
    bytes_context,
    decodes,
    encodes,
    needs_e4m3,
    typed,
    writes_of,
)
from mlagen.backends.parts.layout_module import Decodes, Encodes, LayoutModule, Slices, StoredColumns
from mlagen.layout import CacheLayout, ScalesField
from mlagen.plan import IndexerCachePlan, IndexerRows, Plan
from mlagen.plan.families.compressor import COMPRESS
from mlagen.plan.families.kpool import COMPRESS as POOLS
from mlagen.plan.families.kpool import UPDATE
from mlagen.plan.rows import tiled_chunks

KEYS_MODULE, QUERY_MODULE = "_indexer_layout", "_indexer_query"
WRITE = "indexer_k_quant_and_cache"
NORMALISE, KEYS_QUERY = SLICE_WRITERS = ("indexer_k_norm_rope_store", "indexer_qk_rope_quant_and_cache")
WHOLE_WRITERS = (WRITE, COMPRESS, POOLS, UPDATE)
CHECKING_WRAPPERS = {WRITE, NORMALISE, KEYS_QUERY, "cp_gather_indexer_k_quant_cache"}  # of indexer_cache.py
# Most names in a line of 120 columns, next to other arguments and joined.
SLICES_A_LINE, SCALES_A_LINE = 6, 4


@dataclass(frozen=True)
class QueryModule:
    """Context of the template of the query's quantisation.

    Attributes:
        dtype, dtype_name: the model's dtype, and the query's.
        query_scales: scales of a head.
        returns_scales: whether scales are returned, not stored behind the columns.
        stored: chunks of a head.
        slices: how a head is quantised from its slices; None: not from slices.
        store_parameters: parameters of each store_..., as text.
        decodes, encodes: helpers for its dtypes.
    """

    dtype: str
    dtype_name: str
    query_scales: ScalesField | None
    returns_scales: bool
    stored: Sequence[StoredColumns]
    slices: Slices | None
    store_parameters: str
    decodes: Decodes
    encodes: Encodes


def checking_module(plan: Plan) -> str | None:
    """Return the module with the check of the indexer's cache, which other modules import; None without one."""
    return None if CHECKING_WRAPPERS.isdisjoint(plan.spec.wrappers) else IndexerCachePlan.NAME


def keys_context(plan: Plan, rows: IndexerRows) -> LayoutModule:
    """Context of the layout's template for keys. No kernel reads them as rows of the model's dtype."""
    whole = any(name in plan.spec.wrappers for name in WHOLE_WRITERS)
    turned = not set(SLICE_WRITERS).isdisjoint(plan.spec.wrappers)
    slices = _slices(rows, rows.layout) if turned else None
    return replace(
        bytes_context(plan, rows.layout, rows.chunks, reads=False, writes=whole or turned),
        stores="a cached key of the indexer",
        slices=slices,
        whole=slices is None or whole,
    )


def query_context(plan: Plan, rows: IndexerRows) -> QueryModule:
    """Context of the template of the query's quantisation."""
    query, dtype = rows.query, plan.spec.model.dtype
    return QueryModule(
        dtype=dtype,
        dtype_name=query.data[0].dtype,
        query_scales=query.scales_of(query.data[0]),
        returns_scales=not rows.packed,
        stored=writes_of(query, tiled_chunks(query))[0],
        slices=_slices(rows, query),
        store_parameters=typed(query_store_text(rows, "slices" if rows.slice_columns else "x")),
        decodes=decodes(query, reads=False, writes=True),
        encodes=encodes(query, dtype, writes=True),
    )


def query_store_text(rows: IndexerRows, columns: str = "x", valid: str = "valid") -> str:
    """Return the arguments of each store_... of the query, with these names of columns and masks."""
    pointers = "rows, plane_rows" if rows.packed else "rows"
    return f"{pointers}, {columns}, {valid}{_constants(rows.query)}"


def slices_of(rows: IndexerRows, name: str) -> list[str]:
    """Return the names of a row's slices, derived from the name of the whole row."""
    width = rows.slice_columns
    return [f"{name}_{number}" for number in range(rows.indexer.head_dim // width)] if width else []


def binds_slices(rows: IndexerRows, name: str) -> bool:
    """Whether there are too many names for one line, so that they are passed as a tuple."""
    return len(slices_of(rows, name)) > SLICES_A_LINE if rows.slice_columns else False


def slices_text(rows: IndexerRows, name: str) -> str:
    """Return the slices as one argument; for whole rows, the name."""
    if binds_slices(rows, name):
        return "slices"
    return tuple_text(slices_of(rows, name)) if rows.slice_columns else name


def _constants(layout: CacheLayout) -> str:
    """Return the constexprs at the end of storing helpers' arguments."""
    return f"{', ROUNDS_E4M3' if needs_e4m3(layout) else ''}, ALIGNMENT"


def _joined(names: list[str]) -> str:
    """Return blocks joined in new last dimensions of size 2, in the order of the names."""
    return names[0] if len(names) == 1 else f"tl.join({_joined(names[::2])}, {_joined(names[1::2])})"


def _slices(rows: IndexerRows, layout: CacheLayout) -> Slices | None:
    """Template context for quantising a row from its slices; None for whole rows."""
    width, scales = rows.slice_columns, layout.scales_of(layout.data[0])
    if width is None or scales is None:
        return None
    each, places = min(scales.tile, layout.columns) // width, width // 2 if rows.packed else width
    tiles = []
    for number in range(scales.count):
        first = number * each
        tile = tuple_text([f"slices[{number}]" for number in range(first, first + each)])
        begin = f"rows + {first * places}" if first else "rows"
        tiles.append((f"scales_{number}", f"{begin}, {tile}, valid{_constants(layout)}"))
    if scales.count == 1:
        tiles = [("stored_scales", f"rows, slices, valid{_constants(layout)}")]
    names = [name for name, _ in tiles]
    halves = {"even": _joined(names[::2]), "odd": _joined(names[1::2])} if len(names) > SCALES_A_LINE else {}
    return Slices(
        width=width,
        places=places,
        each=each,
        tile_parameters=typed(f"rows, slices, valid{_constants(layout)}"),
        tiles=tiles,
        halves=halves,
        joined=_joined(list(halves) or names) if len(names) > 1 else None,
    )


def keys_file(plan: Plan, rows: IndexerRows) -> GeneratedFile:
    """Return the module of the layout of the indexer's keys."""
    return generated(KEYS_MODULE, vars(keys_context(plan, rows)), MODULE)


def query_file(plan: Plan, rows: IndexerRows) -> GeneratedFile:
    """Return the module that quantises the indexer's query."""
    return generated(QUERY_MODULE, vars(query_context(plan, rows)))
