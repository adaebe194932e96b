"""Contexts of the modules with the layouts of the indexer's keys and query.

Writers take whole rows, or pieces if RoPE rotates them (`IndexerRows.piece`).
"""

from __future__ import annotations

from typing import Any

from mlagen.backends.parts.base import GeneratedFile, generated
from mlagen.backends.parts.layout import MODULE, bytes_context, needs_e4m3, store_text, typed
from mlagen.layout import CacheLayout
from mlagen.plan import IndexerRows, Plan
from mlagen.plan.families.compressor import COMPRESS
from mlagen.plan.families.kpool import COMPRESS as POOLS
from mlagen.plan.families.kpool import UPDATE
from mlagen.plan.rows import tiled_chunks

KEYS_MODULE, QUERY_MODULE = "_indexer_layout", "_indexer_query"
WRITE = "indexer_k_quant_and_cache"
NORMALISE, BOTH = PIECE_WRITERS = ("indexer_k_norm_rope_store", "indexer_qk_rope_quant_and_cache")
WHOLE_WRITERS = (WRITE, COMPRESS, POOLS, UPDATE)
# Most names in a line of 120 columns, next to other arguments and joined.
PIECES_A_LINE, SCALES_A_LINE = 6, 4


def keys_context(plan: Plan, rows: IndexerRows) -> dict[str, Any]:
    """Context of the layout's template for keys. No kernel reads them as rows of the model's dtype."""
    whole = any(name in plan.spec.wrappers for name in WHOLE_WRITERS)
    turned = not set(PIECE_WRITERS).isdisjoint(plan.spec.wrappers)
    found = bytes_context(plan, rows.layout, rows.chunks, reads=False, writes=whole or turned)
    pieces = _pieces(rows, rows.layout) if turned else None
    return {
        **found,
        "stores": "a cached key of the indexer",
        "attends": False,
        "chunks": [],
        "loaded": [],
        "pieces": pieces,
        "whole": pieces is None or whole,
        "pieces_parameters": typed(store_text(rows.layout, "pieces")),
    }


def query_context(plan: Plan, rows: IndexerRows) -> dict[str, Any]:
    """Context of the template of the query's quantisation."""
    query = rows.query
    found = bytes_context(plan, query, tiled_chunks(query), reads=False, writes=True)
    return {
        **{name: found[name] for name in ("dtype", "encodes", "decodes", "stored")},
        "dtype_name": query.data[0].dtype,
        "query_scales": query.scales_of(query.data[0]),
        "returns_scales": not rows.packed,
        "pieces": _pieces(rows, query),
        "store_parameters": typed(query_store_text(rows, "pieces" if rows.piece else "x")),
    }


def query_store_text(rows: IndexerRows, columns: str = "x", valid: str = "valid") -> str:
    """Return the arguments of each store_... of the query, with these names of columns and masks."""
    pointers = "rows, plane_rows" if rows.packed else "rows"
    return f"{pointers}, {columns}, {valid}{_constants(rows.query)}"


def pieces_of(rows: IndexerRows, name: str) -> list[str]:
    """Return the names of a row's pieces, derived from the name of the whole row."""
    return [f"{name}_{number}" for number in range(rows.indexer.head_dim // rows.piece)] if rows.piece else []


def binds_pieces(rows: IndexerRows, name: str) -> bool:
    """Whether there are too many names for one line, so that they are passed as a tuple."""
    return len(pieces_of(rows, name)) > PIECES_A_LINE if rows.piece else False


def pieces_text(rows: IndexerRows, name: str) -> str:
    """Return the pieces as one argument; for whole rows, the name."""
    if binds_pieces(rows, name):
        return "pieces"
    return tuple_text(pieces_of(rows, name)) if rows.piece else name


def tuple_text(names: list[str]) -> str:
    """Return the text of a tuple of names."""
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _constants(layout: CacheLayout) -> str:
    """Return the constexprs at the end of storing helpers' arguments."""
    return f"{', ROUNDS_E4M3' if needs_e4m3(layout) else ''}, ALIGNMENT"


def _joined(names: list[str]) -> str:
    """Return blocks joined in new last dimensions of size 2, in the order of the names."""
    return names[0] if len(names) == 1 else f"tl.join({_joined(names[::2])}, {_joined(names[1::2])})"


def _pieces(rows: IndexerRows, layout: CacheLayout) -> dict[str, Any] | None:
    """Template context for quantising a row from its pieces; None for whole rows."""
    width, scales = rows.piece, layout.scales_of(layout.data[0])
    if width is None or scales is None:
        return None
    each, places = min(scales.tile, layout.columns) // width, width // 2 if rows.packed else width
    tiles = []
    for number in range(scales.count):
        first = number * each
        tile = tuple_text([f"pieces[{piece}]" for piece in range(first, first + each)])
        begin = f"rows + {first * places}" if first else "rows"
        tiles.append({"scales": f"scales_{number}", "arguments": f"{begin}, {tile}, valid{_constants(layout)}"})
    if scales.count == 1:
        tiles = [{"scales": "stored_scales", "arguments": f"rows, pieces, valid{_constants(layout)}"}]
    names = [tile["scales"] for tile in tiles]
    halves = {"even": _joined(names[::2]), "odd": _joined(names[1::2])} if len(names) > SCALES_A_LINE else {}
    return {
        "width": width,
        "places": places,
        "each": each,
        "tile_parameters": typed(f"rows, pieces, valid{_constants(layout)}"),
        "tiles": tiles,
        "halves": halves,
        "joined": _joined(list(halves) or names) if len(names) > 1 else None,
    }


def keys_file(plan: Plan, rows: IndexerRows) -> GeneratedFile:
    """Return the module of the layout of the indexer's keys."""
    return generated(KEYS_MODULE, keys_context(plan, rows), MODULE)


def query_file(plan: Plan, rows: IndexerRows) -> GeneratedFile:
    """Return the module that quantises the indexer's query."""
    return generated(QUERY_MODULE, query_context(plan, rows))
