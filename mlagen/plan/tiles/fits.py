"""The properties that a family's tiles depend on, as one short text. Tables with equal text are interchangeable.

The text names the shape of the kernel and its memory: the blocks of a row, its dtype, the dtype of partials, the bytes
of a cache. It leaves out run-time arguments and the sizes that tables distinguish: heads, tokens, topk, the keys of a
window, and the page size of a cache with indices. It also leaves out optional tensors (sink, lengths) and the back end:
they select the kernels of a call, not their best tile.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlagen.layout import CacheLayout
from mlagen.plan.tiles.chunks import Chunk
from mlagen.spec import Spec

SPARSE_FWD = "sparse_fwd"  # sparse attention over rows
SPARSE_DECODE = "sparse_decode"  # the same over a cache
DENSE_DECODE = "dense_decode"  # dense attention over a paged cache
DENSE_FWD = "dense_fwd"  # multi-head attention
TILED = (SPARSE_FWD, SPARSE_DECODE, DENSE_DECODE, DENSE_FWD)  # families with a tile table
DIGITS = 8  # of a layout's fingerprint


def family_of(fits: str) -> str:
    """Return the family of a text."""
    return fits.split(" ", 1)[0]


def _columns(chunks: Sequence[Chunk]) -> str:
    """Return the blocks of a row by columns, for example 512+64."""
    return "+".join(str(chunk.columns) for chunk in chunks)


def _cache(layout: CacheLayout) -> str:
    """Return a layout's name, and part of its fingerprint."""
    return f"{layout.name}:{layout.fingerprint[:DIGITS]}"


def _latent(family: str, spec: Spec, chunks: Sequence[Chunk], *words: str) -> str:
    """Return the text of a family of attention over latent rows. `words` distinguish its kernels."""
    dims = spec.model
    return " ".join(
        (family, f"d{_columns(chunks)}", f"v{dims.v_head_dim}", dims.dtype, *words, "partials", spec.partials)
    )


def sparse_fwd(spec: Spec, chunks: Sequence[Chunk], page_rows: int | None) -> str:
    """Of sparse attention over rows of these blocks; in pages of `page_rows`, None: flat."""
    return _latent(SPARSE_FWD, spec, chunks, *(() if page_rows is None else ("pages", str(page_rows))))


def sparse_decode(spec: Spec, chunks: Sequence[Chunk], layout: CacheLayout, extra_layout: CacheLayout | None) -> str:
    """Return the text of sparse decode over one or two caches, with rows in these blocks."""
    beside = () if extra_layout is None else ("beside", _cache(extra_layout))
    return _latent(SPARSE_DECODE, spec, chunks, "cache", _cache(layout), *beside)


def dense_decode(
    spec: Spec, chunks: Sequence[Chunk], layout: CacheLayout, block_size: int | None, window: int | None
) -> str:
    """Of dense attention over a cache; BLOCK_N has to divide a page, and a window's bounds take registers."""
    pages = () if block_size is None else ("pages", str(block_size))
    windowed = () if window is None else ("window",)
    return _latent(DENSE_DECODE, spec, chunks, "cache", _cache(layout), *pages, *windowed)


def dense_fwd(dtype: str, k: Sequence[Chunk], v: Sequence[Chunk], *, descriptors: bool, window: bool) -> str:
    """Return the text of dense_fwd with these blocks of k and v, loaded by descriptors or pointers."""
    words = ("descriptors" if descriptors else "pointers", *(("window",) if window else ()))
    return " ".join((DENSE_FWD, f"d{_columns(k)}", f"v{_columns(v)}", dtype, *words))
