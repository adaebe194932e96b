"""What the tiles of a family depend on, as one short text: tables of equal text hold for each other's kernels.

It names what shapes the kernel and how its memory is read: the blocks of a row, its dtype, what its partials are, the
bytes of a cache. It leaves out what a kernel takes at run time, and what tables tell apart by themselves: heads and
tokens, topk, how many keys a window leaves, and the page size of a cache that indices name. Nor does it name optional
tensors (a sink, lengths) or the back end: they settle which kernels a call runs, not which tile is best for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlagen.layout import CacheLayout
from mlagen.plan.chunks import Chunk
from mlagen.spec import Spec

SPARSE_FWD = "sparse_fwd"  # sparse attention over rows
SPARSE_DECODE = "sparse_decode"  # the same over a cache
DENSE_DECODE = "dense_decode"  # dense attention over a paged cache
DENSE_FWD = "dense_fwd"  # multi-head attention
TILED = (SPARSE_FWD, SPARSE_DECODE, DENSE_DECODE, DENSE_FWD)  # whose kernels take their tile from a table
DIGITS = 8  # of a layout's fingerprint


def family_of(fits: str) -> str:
    """The family that a text is of."""
    return fits.split(" ", 1)[0]


def _columns(chunks: Sequence[Chunk]) -> str:
    """The blocks of a row by their columns, such as 512+64."""
    return "+".join(str(chunk.columns) for chunk in chunks)


def _cache(layout: CacheLayout) -> str:
    """A layout's name, and how its bytes are read."""
    return f"{layout.name}:{layout.fingerprint[:DIGITS]}"


def _latent(family: str, spec: Spec, chunks: Sequence[Chunk], *words: str) -> str:
    """Of attention over latent rows; `words` are what tells the family's own kernels apart."""
    dims = spec.model
    return " ".join(
        (family, f"d{_columns(chunks)}", f"v{dims.v_head_dim}", dims.dtype, *words, "partials", spec.partials)
    )


def sparse_fwd(spec: Spec, chunks: Sequence[Chunk], page_rows: int | None) -> str:
    """Of sparse attention over rows of these blocks; in pages of `page_rows`, None: flat."""
    return _latent(SPARSE_FWD, spec, chunks, *(() if page_rows is None else ("pages", str(page_rows))))


def sparse_decode(spec: Spec, chunks: Sequence[Chunk], layout: CacheLayout, extra_layout: CacheLayout | None) -> str:
    """Of sparse attention over a cache, and over a second one, whose rows are multiplied in these blocks."""
    beside = () if extra_layout is None else ("beside", _cache(extra_layout))
    return _latent(SPARSE_DECODE, spec, chunks, "cache", _cache(layout), *beside)


def dense_decode(
    spec: Spec, chunks: Sequence[Chunk], layout: CacheLayout, block_size: int | None, window: int | None
) -> str:
    """Of dense attention over a cache; BLOCK_N has to divide a page, and a window's bounds take registers."""
    pages = () if block_size is None else ("pages", str(block_size))
    windowed = () if window is None else ("window",)
    return _latent(DENSE_DECODE, spec, chunks, "cache", _cache(layout), *pages, *windowed)


def dense_fwd(dtype: str, k: Sequence[Chunk], v: Sequence[Chunk], *, descriptors: bool) -> str:
    """Of multi-head attention whose rows of k and of v are cut into these blocks, loaded by descriptors or pointers."""
    return f"{DENSE_FWD} d{_columns(k)} v{_columns(v)} {dtype} {'descriptors' if descriptors else 'pointers'}"
