"""Blocks of a KV row: as the model computes it, and as a cache stores it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from mlagen.layout import CacheLayout, layouts_of
from mlagen.plan.tiles.chunks import Chunk, make_chunks, split_columns
from mlagen.spec import OutQuant, SparseAttention, Spec

PART_NAMES = {"latent": "nope", "rope": "rope", "row": "row"}


@dataclass(frozen=True)
class StoredCache:
    """A cache.

    Attributes:
        layout: bytes of a token.
        tiled: blocks of a row that cut no tile of scales, for kernels that take whole rows.
        block_size: tokens a page, as the spec has it; None: any number.
    """

    layout: CacheLayout
    tiled: tuple[Chunk, ...]
    block_size: int | None


@dataclass(frozen=True)
class Caches:
    """The caches of a spec.

    Attributes:
        main: the cache.
        extra: the second one; None without.
        chunks: blocks of a row as it is read, which suit both.
    """

    main: StoredCache
    extra: StoredCache | None
    chunks: tuple[Chunk, ...]

    @property
    def other(self) -> StoredCache | None:
        """The second cache, if its layout is another, or its writers find other scales."""
        return None if self.extra is None or self.extra.layout == self.main.layout else self.extra

    @property
    def both(self) -> tuple[StoredCache, ...]:
        """The cache, and the second one if there is one."""
        return (self.main,) if self.extra is None else (self.main, self.extra)


def caches_of(spec: Spec) -> Caches | None:
    """The caches of a spec; None without."""
    layout, extra_layout = layouts_of(spec.model_dump(mode="json"))
    if layout is None or spec.cache is None:
        return None
    extra = None
    if extra_layout is not None and spec.extra_cache is not None:
        extra = StoredCache(extra_layout, tiled_chunks(extra_layout), spec.extra_cache.block_size)
    main = StoredCache(layout, tiled_chunks(layout), spec.cache.block_size)
    return Caches(main, extra, _rotated(layout_chunks(layout, spec.model.v_head_dim, extra_layout), spec))


def rows_block_size(caches: Caches | None) -> int | None:
    """Tokens a page of the unquantised rows that attention reads; None: flat rows."""
    return None if caches is None or caches.main.layout.quantised else caches.main.block_size


def out_rope_columns(spec: Spec) -> int:
    """RoPE columns of the output, the last ones, that attention rotates back; 0: none."""
    attention = spec.attention
    rotates = isinstance(attention, SparseAttention) and attention.out_rope is not None
    return spec.model.qk_rope_head_dim if rotates else 0


def out_quant_of(spec: Spec) -> OutQuant | None:
    """Quantisation of attention's output; None without."""
    return spec.attention.out_quant if isinstance(spec.attention, SparseAttention) else None


def row_chunks(spec: Spec) -> tuple[Chunk, ...]:
    """Blocks of a KV row as attention over rows reads it.

    Where V reaches into the RoPE columns, the field boundary cuts nothing: the row is one run of columns of one dtype.
    """
    dims = spec.model
    if dims.v_head_dim > dims.kv_lora_rank:
        return _rotated(make_chunks([("kv", dims.d_qk)], dims.v_head_dim), spec)
    rope = [("rope", dims.qk_rope_head_dim)] if dims.qk_rope_head_dim else []
    return make_chunks([("nope", dims.kv_lora_rank), *rope], dims.v_head_dim)


def _rotated(chunks: tuple[Chunk, ...], spec: Spec) -> tuple[Chunk, ...]:
    """The blocks, those that reach into output columns that attention rotates back marked."""
    start = spec.model.v_head_dim - out_rope_columns(spec)
    return tuple(replace(chunk, rotated=chunk.in_v and chunk.start + chunk.columns > start) for chunk in chunks)


@dataclass(frozen=True)
class _Part:
    """Columns [first, end) of a row, which variables called `name` hold."""

    name: str
    first: int
    end: int


@dataclass(frozen=True)
class _Tiling:
    """Columns [first, end) of a row with one scale for each `tile` of them."""

    first: int
    end: int
    tile: int

    def cuts(self, column: int) -> bool:
        """Whether the column lies inside a tile."""
        return self.first <= column < self.end and (column - self.first) % self.tile > 0

    def tile_end(self, column: int) -> int:
        """The column at which the tile of `column` ends."""
        return column + self.tile - (column - self.first) % self.tile


def layout_chunks(layout: CacheLayout, d_v: int, extra: CacheLayout | None = None) -> tuple[Chunk, ...]:
    """Blocks of a cached row, in column order.

    None crosses a field of the layout or column `d_v`, where V ends, and none cuts a tile of scales unevenly: its
    columns lie in one tile, or it begins with a tile and its block is a multiple of tiles.

    Args:
        layout: the cache's.
        d_v: leading columns that are V.
        extra: the second cache's, which the blocks suit as well.
    """
    layouts = [layout] if extra is None else [layout, extra]
    cuts = {d_v} | {part.first for one in layouts for part in _parts(one, d_v)}
    tilings = [
        _Tiling(field.first_column, field.first_column + field.count, scales.tile)
        for one in layouts
        for field in one.data
        if (scales := one.scales_of(field))
    ]
    chunks: list[Chunk] = []
    for part in _parts(layout, d_v):
        bounds = [part.first, *sorted(cut for cut in cuts if part.first < cut < part.end), part.end]
        pieces = [piece for first, end in pairwise(bounds) for piece in _pieces(first, end, tilings)]
        for number, (column, width, block) in enumerate(pieces):
            name = part.name if len(pieces) == 1 else f"{part.name}_{number}"
            chunks.append(Chunk(name, column, width, block, column < d_v))
    return tuple(chunks)


def tiled_chunks(layout: CacheLayout) -> tuple[Chunk, ...]:
    """Blocks of a row that cut no tile of scales, in column order."""
    chunks: list[Chunk] = []
    for field in layout.data:
        scales = layout.scales_of(field)
        tile = scales.tile if scales else 1
        pieces: list[tuple[int, int, int]] = []
        first = 0
        for width, block in split_columns(-(-field.count // tile) * tile):
            pieces.append((field.first_column + first, min(width, field.count - first), block))
            first += width
        for number, (column, width, block) in enumerate(pieces):
            name = PART_NAMES[field.name]
            chunks.append(Chunk(name if len(pieces) == 1 else f"{name}_{number}", column, width, block, in_v=False))
    return tuple(chunks)


def _parts(layout: CacheLayout, d_v: int) -> list[_Part]:
    """Its fields as runs of columns; where V reaches into the RoPE columns, fields of one dtype are one run."""
    fields = layout.data
    joined = not layout.quantised and len(fields) == 2 and fields[0].count < d_v
    if joined and fields[0].plane == fields[1].plane and fields[0].offset + fields[0].nbytes == fields[1].offset:
        return [_Part("kv", 0, layout.columns)]
    return [_Part(PART_NAMES[field.name], field.first_column, field.first_column + field.count) for field in fields]


def _pieces(first: int, end: int, tilings: list[_Tiling]) -> Iterator[tuple[int, int, int]]:
    """(column, columns, block) of the chunks of columns [first, end)."""
    while first < end:
        begun = [tiling.tile_end(first) for tiling in tilings if tiling.cuts(first)]
        columns, block = split_columns(min([end, *begun]) - first)[0]
        yield first, columns, block
        first += columns
