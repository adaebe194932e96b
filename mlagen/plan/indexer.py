"""The indexer's rows: keys as their cache stores them, and the query that is quantised likewise."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlagen.errors import LimitError
from mlagen.layout import CacheLayout, DataField, ScalesField, indexer_layout_of, indexer_query_layout_of
from mlagen.plan.rows import tiled_chunks
from mlagen.plan.tiles.chunks import Chunk
from mlagen.spec import Indexer, Spec

LEAST_SLICE, MOST_SLICE = 16, 32  # columns
MOST_SLICES = 8  # of a row


@dataclass(frozen=True)
class IndexerRows:
    """Rows of the indexer of a spec.

    Attributes:
        indexer: the spec's indexer.
        layout: bytes of a key.
        query: how a head of the query is quantised: values, and scales in a second plane.
        chunks: blocks of a key that cut no tile of scales.
        block_size: keys a page, as the spec has it; None: any number.
    """

    indexer: Indexer
    layout: CacheLayout
    query: CacheLayout
    chunks: tuple[Chunk, ...]
    block_size: int | None

    @property
    def values(self) -> DataField:
        """The columns of a key."""
        return self.layout.data[0]

    @property
    def scales(self) -> ScalesField | None:
        """The scales of a key; None without a scale a tile."""
        return self.layout.scales_of(self.values)

    @property
    def packed(self) -> bool:
        """Whether two columns share a byte (MXFP4)."""
        return self.values.dtype == "e2m1"

    @property
    def rope_start(self) -> int:
        """The first column that RoPE rotates."""
        return self.indexer.head_dim - self.indexer.rope_head_dim if self.indexer.rope_at == "last" else 0

    @property
    def slice_columns(self) -> int | None:
        """Columns of the slices that rows which RoPE rotates are taken in; None: such rows are taken whole.

        RoPE rotates a slice within itself or with another, or not at all, and no slice is in two tiles of scales.
        """
        columns, width = self.indexer.head_dim, self.indexer.rope_head_dim
        scales = [layout.scales_of(layout.data[0]) for layout in (self.layout, self.query)]
        if width == 0 or None in scales or columns & (columns - 1):
            return None
        span = width // 2 if self.indexer.rope == "neox" else width
        known = math.gcd(columns, self.rope_start, span, *(one.tile for one in scales if one))
        width = min(known & -known, MOST_SLICE)
        return width if width >= LEAST_SLICE and columns // width <= MOST_SLICES else None


def indexer_rows_of(spec: Spec) -> IndexerRows | None:
    """The rows of the spec's indexer; None without."""
    parts = spec.model_dump(mode="json")
    layout, query = indexer_layout_of(parts), indexer_query_layout_of(parts)
    if layout is None or query is None or spec.indexer is None or spec.indexer_cache is None:
        return None
    return IndexerRows(spec.indexer, layout, query, tiled_chunks(layout), spec.indexer_cache.block_size)


def check_scales(rows: IndexerRows) -> None:
    """Raise LimitError if a key has no scales of its own: the indexer's functions pass on no others."""
    if rows.scales is None:
        message = f"indexer_cache.layout: got {rows.layout.name}, a layout without tile scales"
        raise LimitError(f"{message}; takes a layout with a field of kind scales")


def check_one_scale(rows: IndexerRows, wrapper: str) -> None:
    """Raise LimitError if 8-bit keys have other scales than one of fp32 each. It multiplies a sum over all columns.

    Args:
        rows: the indexer's rows.
        wrapper: the wrapper that needs such a scale.
    """
    check_scales(rows)
    scales = rows.scales
    if scales is None or rows.packed or (scales.dtype, scales.count) == ("fp32", 1):
        return
    found = f"{rows.values.dtype} keys with {scales.count} x {scales.dtype}"
    message = f"indexer_cache.layout: got {rows.layout.name}, {found}; takes one fp32 scale per key with {wrapper}"
    raise LimitError(message)
