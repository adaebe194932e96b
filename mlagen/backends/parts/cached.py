"""Template contexts of attention over a cache: the cache, and the blocks of its rows."""

from __future__ import annotations

from typing import Any

from mlagen.backends.parts import layout
from mlagen.backends.parts.common import chunk_of, imported
from mlagen.backends.parts.splits import accumulators
from mlagen.plan import CachedFamily, Caches, Plan, StoredCache


def type_of(prefix: str) -> str:
    """Return the class for a cache of the first or second layout and its indices."""
    return "ExtraIndexedCache" if prefix else "IndexedCache"


def cache_context(plan: Plan, caches: Caches, cache: StoredCache) -> dict[str, Any]:
    """Template context of a cache."""
    one, prefix = cache.layout, "extra_" if cache is caches.other else ""
    shared = caches.extra is not None and caches.other is None  # one kernel reads both caches
    row = one.row_bytes if one.quantised else one.columns
    module = layout.EXTRA_MODULE if prefix else layout.MODULE
    alignment = max(field.itemsize for field in one.fields)
    dtype = "uint8, int8 or float8_e4m3fn" if one.quantised else plan.spec.model.dtype
    strides = "any page and row stride"
    if one.planar:
        strides = f"rows end to end; a page's bytes are rounded up to a multiple of {one.page_multiple}"
    return {
        "prefix": prefix,
        "layout": one,
        "helper": f"_attend_{prefix}cache",
        "module": module,
        "type": type_of(prefix),
        "tokens": "the second cache" if prefix else "either cache" if shared else "the cache",
        "needs_e4m3": layout.needs_e4m3(one),
        "rows": layout.rows_text(one),
        "load": layout.load_text(one, "scale" if shared else "tensor_scale", "config.ALIGNMENT", "config."),
        "row": row,
        "row_constant": f"{module}.ROW_BYTES" if one.quantised else "D_QK",
        "unit_name": "bytes" if one.quantised else "columns",
        "torch_dtype": "torch.uint8" if one.quantised else "DTYPE",
        "alignment": alignment,
        "late": f"{alignment} * late" if one.quantised and alignment > 1 else "late",
        "dtypes": dtype,
        "strides": strides,
    }


def rows_context(family: CachedFamily) -> dict[str, Any]:
    """Template context of a row's blocks."""
    chunks, v_chunks = [chunk_of(chunk) for chunk in family.chunks], accumulators(family.chunks)
    joined = None
    constants = [f"{kind}_{chunk['name'].upper()}" for chunk in chunks for kind in ("D", "START")]
    constants += [f"COLUMNS_{chunk['name'].upper()}" for chunk in chunks if chunk["masked"]]
    if family.joined:
        first, last = (chunk.name for chunk in family.caches.chunks)
        joined = {"name": chunks[0]["name"], "first": first, "last": last}
        constants = [f"{kind}_{last.upper()}" for kind in ("D", "START")]
    return {
        "loaded": family.caches.chunks,
        "joined": joined,
        "chunks": chunks,
        "v_chunks": v_chunks,
        "acc_text": "the accumulator" if len(v_chunks) == 1 else "the accumulators",
        "accs": ", ".join(chunk["acc"] for chunk in v_chunks),
        "chunk_names": imported("_layout", sorted(constants)),
    }
