"""The modules that know the bytes of the indexer's keys and of its query, as their templates ask for them.

Writers take rows whole, or in pieces where RoPE rotates them (`IndexerRows.piece`).
"""

from __future__ import annotations

from typing import Any

from mlagen.backends.base import GeneratedFile, generated
from mlagen.backends.triton.layout import MODULE, bytes_context, needs_e4m3, store_text, typed
from mlagen.layout import CacheLayout
from mlagen.plan import IndexerRows, Plan
from mlagen.plan.rows import tiled_chunks

KEYS_MODULE, QUERY_MODULE = "_indexer_layout", "_indexer_query"
WRITE, NORMALISE = "indexer_k_quant_and_cache", "indexer_k_norm_rope_store"
# That a line of 120 columns names beside other arguments, and that it joins.
PIECES_A_LINE, SCALES_A_LINE = 6, 4


def keys_context(plan: Plan, rows: IndexerRows) -> dict[str, Any]:
    """What the layout's template asks for of keys, which no kernel reads as rows of the model's dtype."""
    writes = WRITE in plan.spec.wrappers or NORMALISE in plan.spec.wrappers
    found = bytes_context(plan, rows.layout, rows.chunks, reads=False, writes=writes)
    pieces = _pieces(rows, rows.layout) if NORMALISE in plan.spec.wrappers else None
    return {
        **found,
        "stores": "a cached key of the indexer",
        "attends": False,
        "chunks": [],
        "loaded": [],
        "pieces": pieces,
        "whole": pieces is None or WRITE in plan.spec.wrappers,
        "pieces_parameters": typed(store_text(rows.layout, "pieces")),
    }


def query_context(plan: Plan, rows: IndexerRows) -> dict[str, Any]:
    """What the template of the query's quantisation asks for."""
    query = rows.query
    found = bytes_context(plan, query, tiled_chunks(query), reads=False, writes=True)
    return {
        **found,
        "dtype_name": query.data[0].dtype,
        "query_scales": query.scales_of(query.data[0]),
        "returns_scales": not rows.packed,
        "pieces": _pieces(rows, query),
        "store_parameters": typed(query_store_text(rows, "pieces" if rows.piece else "x")),
    }


def query_store_text(rows: IndexerRows, columns: str = "x", valid: str = "valid") -> str:
    """What each store_... of the query takes, with the columns and those that there are by these names."""
    pointers = "rows, plane_rows" if rows.packed else "rows"
    return f"{pointers}, {columns}, {valid}{_constants(rows.query)}"


def pieces_of(rows: IndexerRows, name: str) -> list[str]:
    """Names of the pieces that a row is taken in, after what a whole one is called."""
    return [f"{name}_{number}" for number in range(rows.indexer.head_dim // rows.piece)] if rows.piece else []


def binds_pieces(rows: IndexerRows, name: str) -> bool:
    """Whether these are too many for a line that passes them, and so get a name together."""
    return len(pieces_of(rows, name)) > PIECES_A_LINE if rows.piece else False


def pieces_text(rows: IndexerRows, name: str) -> str:
    """These as one argument; the name alone where rows are taken whole."""
    if binds_pieces(rows, name):
        return "pieces"
    return tuple_text(pieces_of(rows, name)) if rows.piece else name


def tuple_text(names: list[str]) -> str:
    """A tuple of these names."""
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _constants(layout: CacheLayout) -> str:
    """Constexprs that helpers which store end with."""
    return f"{', ROUNDS_E4M3' if needs_e4m3(layout) else ''}, ALIGNMENT"


def _joined(names: list[str]) -> str:
    """Blocks side by side in new last dimensions of 2, so that together these count as the names do."""
    return names[0] if len(names) == 1 else f"tl.join({_joined(names[::2])}, {_joined(names[1::2])})"


def _pieces(rows: IndexerRows, layout: CacheLayout) -> dict[str, Any] | None:
    """How a row of the layout is quantised from its pieces; None: from the whole."""
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
    """The module that knows the bytes of a key of the indexer."""
    return generated(KEYS_MODULE, keys_context(plan, rows), MODULE)


def query_file(plan: Plan, rows: IndexerRows) -> GeneratedFile:
    """The module that quantises the indexer's query."""
    return generated(QUERY_MODULE, query_context(plan, rows))
