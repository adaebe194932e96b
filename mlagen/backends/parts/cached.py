"""Template contexts of attention over a cache: the cache, and the blocks of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.backends.parts import layout
from mlagen.backends.parts.common import Block, blocks_of, imported
from mlagen.backends.parts.layout_module import Arguments
from mlagen.layout import CacheLayout
from mlagen.plan import CachedFamily, Caches, Chunk, Plan, StoredCache


@dataclass(frozen=True)
class Cache:
    """Template context of a cache that attention reads.

    Attributes:
        prefix: prefix of its arguments.
        layout: its layout.
        helper: function that attends to its rows.
        module: generated module of its layout.
        type: class of the cache and its indices.
        tokens: its name in docstrings.
        needs_e4m3: whether kernels depend on the device's e4m3 support.
        rows: results of row_pointers, as text.
        load: arguments of each load_..., as text.
        args: text for argument lists of the layout's helpers.
        row: elements of a row.
        row_constant: the constant with that number, as text.
        unit_name: "bytes" or "columns", the elements of the cache tensor.
        torch_dtype: dtype of the cache tensor, as text.
        alignment: alignment of rows, in bytes.
        late: offset in elements of the caches in calls for compilation, as text.
        dtypes, strides: accepted dtypes and strides, for docstrings.
    """

    prefix: str
    layout: CacheLayout
    helper: str
    module: str
    type: str
    tokens: str
    needs_e4m3: bool
    rows: str
    load: str
    args: Arguments
    row: int
    row_constant: str
    unit_name: str
    torch_dtype: str
    alignment: int
    late: str
    dtypes: str
    strides: str


@dataclass(frozen=True)
class Joined:
    """Names of a block that joins two blocks of the cache.

    Attributes:
        name: suffix of its variables.
        first, last: those of the two blocks.
    """

    name: str
    first: str
    last: str


@dataclass(frozen=True)
class Rows:
    """Template context of a row's blocks.

    Attributes:
        loaded: blocks of the cache's rows.
        joined: the block that joins them; None: attention takes them as they are.
        chunks, v_chunks: blocks of K and of V.
        acc_text: the accumulators, in docstrings.
        accs: their names.
        chunk_names: names that are imported from the layout's module.
    """

    loaded: Sequence[Chunk]
    joined: Joined | None
    chunks: Sequence[Block]
    v_chunks: Sequence[Block]
    acc_text: str
    accs: str
    chunk_names: str


def type_of(prefix: str) -> str:
    """Return the class for a cache of the first or second layout and its indices."""
    return "ExtraIndexedCache" if prefix else "IndexedCache"


def cache_context(plan: Plan, caches: Caches, cache: StoredCache) -> Cache:
    """Template context of a cache."""
    one, prefix = cache.layout, "extra_" if cache is caches.other else ""
    shared = caches.extra is not None and caches.other is None  # one kernel reads both caches
    main = one.parts[0]
    row = main.row_bytes if one.quantised else main.columns
    module = layout.EXTRA_MODULE if prefix else layout.MODULE
    alignment = max(field.itemsize for field in main.fields)
    row_constant = "D_QK" if main is one else f"{module}.ROW_COLUMNS"
    dtype = "uint8, int8 or float8_e4m3fn" if one.quantised else plan.spec.model.dtype
    strides = "any page and row stride"
    if one.planar:
        strides = f"rows end to end; a page's bytes are rounded up to a multiple of {one.page_multiple}"
    return Cache(
        prefix=prefix,
        layout=one,
        helper=f"_attend_{prefix}cache",
        module=module,
        type=type_of(prefix),
        tokens="the second cache" if prefix else "either cache" if shared else "the cache",
        needs_e4m3=layout.needs_e4m3(one),
        rows=layout.rows_text(one),
        load=layout.load_text(one, "scale" if shared else "tensor_scale", "config.ALIGNMENT", "config."),
        args=layout.arguments(one),
        row=row,
        row_constant=f"{module}.ROW_BYTES" if one.quantised else row_constant,
        unit_name="bytes" if one.quantised else "columns",
        torch_dtype="torch.uint8" if one.quantised else "DTYPE",
        alignment=alignment,
        late=f"{alignment} * late" if one.quantised and alignment > 1 else "late",
        dtypes=dtype,
        strides=strides,
    )


def rows_context(family: CachedFamily) -> Rows:
    """Template context of a row's blocks."""
    chunks = blocks_of(family.chunks)
    v_chunks = [chunk for chunk in chunks if chunk.acc]
    joined = None
    constants = [f"{kind}_{chunk.name.upper()}" for chunk in chunks for kind in ("D", "START")]
    constants += [f"COLUMNS_{chunk.name.upper()}" for chunk in chunks if chunk.masked]
    if family.joined:
        first, last = (chunk.name for chunk in family.caches.chunks)
        joined = Joined(chunks[0].name, first, last)
        constants = [f"{kind}_{last.upper()}" for kind in ("D", "START")]
    return Rows(
        loaded=family.caches.chunks,
        joined=joined,
        chunks=chunks,
        v_chunks=v_chunks,
        acc_text="the accumulator" if len(v_chunks) == 1 else "the accumulators",
        accs=", ".join(chunk.acc for chunk in v_chunks),
        chunk_names=imported("_layout", sorted(constants)),
    )
