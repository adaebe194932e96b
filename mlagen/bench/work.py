"""The fewest bytes that a writer, a gather or an index kernel must move, counted as `mlagen.work` counts them."""

from __future__ import annotations

from mlagen.layout import CacheLayout
from mlagen.work import INDEX_BYTES, ITEMSIZE

SLOT_BYTES = 8


def write_bytes(layout: CacheLayout, tokens: int) -> int:
    """Bytes of writing tokens to the cache: their rows as the model computes them, their slots, the rows as stored."""
    return tokens * (layout.lanes * ITEMSIZE + SLOT_BYTES + layout.row_bytes)


def gather_bytes(layout: CacheLayout, tokens: int, pages: int, *, integers: int) -> int:
    """Bytes of gathering tokens from the cache: rows as stored and as read, the table of `pages`, other integers."""
    return tokens * (layout.row_bytes + layout.lanes * ITEMSIZE) + (pages + integers) * INDEX_BYTES


def map_bytes(tokens: int, topk: int, pages: int, *, counts: bool) -> int:
    """Bytes of mapping indices to slots: both of them, each token's request, the table of `pages`; valid ones counted.

    Args:
        tokens, topk: sizes of the call.
        pages: entries of the block table that its indices name, at most.
        counts: each token's flag is read, a byte, and its count written.
    """
    return (2 * tokens * topk + tokens + min(pages, tokens * topk)) * INDEX_BYTES + counts * tokens * (1 + INDEX_BYTES)


def combine_bytes(tokens: int, topk: int, width: int, requests: int) -> int:
    """Bytes of combining full rows of `topk` indices with a window to rows of `width`; three integers a request."""
    return (tokens * (topk + width + 1) + 3 * requests + 1) * INDEX_BYTES
