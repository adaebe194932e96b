"""The indexer's rows: keys as their cache stores them, and the query that is quantised likewise."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.layout import CacheLayout, indexer_layout_of
from mlagen.plan.chunks import Chunk
from mlagen.plan.rows import tiled_chunks
from mlagen.spec import Indexer, Spec


@dataclass(frozen=True)
class IndexerRows:
    """Rows of the indexer of a spec.

    Attributes:
        indexer: what the spec says of it.
        layout: bytes of a key.
        chunks: blocks of a key that cut no tile of scales.
        block_size: keys a page, as the spec has it; None: any number.
    """

    indexer: Indexer
    layout: CacheLayout
    chunks: tuple[Chunk, ...]
    block_size: int | None

    @property
    def packed(self) -> bool:
        """Whether two columns share a byte (MXFP4)."""
        return any(field.dtype == "e2m1" for field in self.layout.data)


def indexer_rows_of(spec: Spec) -> IndexerRows | None:
    """The rows of the spec's indexer; None without."""
    layout = indexer_layout_of(spec.model_dump(mode="json"))
    if layout is None or spec.indexer is None or spec.indexer_cache is None:
        return None
    return IndexerRows(spec.indexer, layout, tiled_chunks(layout), spec.indexer_cache.block_size)
