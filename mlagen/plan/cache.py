"""Blocks of a cached row, and the sizes of the kernels that write and gather such rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from mlagen.layout import CacheLayout
from mlagen.plan.chunks import Chunk, split_lanes

NUM_WARPS = 1
BLOCK_T = 2  # more of the small programs are under way at once, and none waits for another of its warps
FEW_TOKENS = 8
# A multiprocessor's programs of a writer or an index kernel that may begin early: with 4,096 tokens of V4 19 % were won
# on an H200, with 32,768 25 % lost.
EARLY_PROGRAMS = 16
GATHER_PROGRAMS = 32  # what a multiprocessor holds of programs of one warp of 64 registers a thread
LOOKUP_T = 32  # a warp's lanes
PART_NAMES = {"latent": "nope", "rope": "rope", "row": "row"}


@dataclass(frozen=True)
class GatherTile:
    """Launch parameters of a gather.

    Attributes:
        block_t: tokens a program copies at a time.
        num_warps: warps a program.
    """

    block_t: int
    num_warps: int


@dataclass(frozen=True)
class CachePlan:
    """Numbers of the cache kernels.

    Attributes:
        chunks: blocks of a row as it is read, the same for both caches of a spec.
        tiled: blocks of a row that cut no tile of scales, for kernels that take whole rows.
        extra_tiled: likewise of the second cache; empty where there is none.
        block_t: tokens a program of a writer.
        num_warps: its warps a program.
        gather_tile: the tile of gathers.
        few_tile: the tile of gathers of few tokens, where what counts is how long one program takes.
        few_tokens: most tokens of such a gather for each multiprocessor of the device.
        gather_programs: most programs of a gather for each multiprocessor of the device.
        lookup_t: tokens that a program of a gather looks up at once; a multiple of block_t.
    """

    chunks: tuple[Chunk, ...]
    tiled: tuple[Chunk, ...]
    extra_tiled: tuple[Chunk, ...]
    block_t: int
    num_warps: int
    gather_tile: GatherTile
    few_tile: GatherTile
    few_tokens: int
    gather_programs: int
    lookup_t: int


@dataclass(frozen=True)
class _Part:
    """Lanes [first, end) of a row, which variables called `name` hold."""

    name: str
    first: int
    end: int


@dataclass(frozen=True)
class _Tiling:
    """Lanes [first, end) of a row with one scale for each `tile` of them."""

    first: int
    end: int
    tile: int

    def cuts(self, lane: int) -> bool:
        """Whether the lane lies inside a tile."""
        return self.first <= lane < self.end and (lane - self.first) % self.tile > 0

    def tile_end(self, lane: int) -> int:
        """The lane at which the tile of `lane` ends."""
        return lane + self.tile - (lane - self.first) % self.tile


def layout_chunks(layout: CacheLayout, d_v: int, extra: CacheLayout | None = None) -> tuple[Chunk, ...]:
    """Blocks of a cached row, in lane order.

    None crosses a field of the layout or lane `d_v`, where V ends, and none cuts a tile of scales unevenly: its lanes
    lie in one tile, or it begins with a tile and its block is a multiple of tiles.

    Args:
        layout: the cache's.
        d_v: leading lanes that are V.
        extra: the second cache's, which the blocks suit as well.
    """
    layouts = [layout] if extra is None else [layout, extra]
    cuts = {d_v} | {part.first for one in layouts for part in _parts(one, d_v)}
    tilings = [
        _Tiling(field.first_lane, field.first_lane + field.count, scales.tile)
        for one in layouts
        for field in one.data
        if (scales := one.scales_of(field))
    ]
    chunks: list[Chunk] = []
    for part in _parts(layout, d_v):
        bounds = [part.first, *sorted(cut for cut in cuts if part.first < cut < part.end), part.end]
        pieces = [piece for first, end in pairwise(bounds) for piece in _pieces(first, end, tilings)]
        for number, (lane, lanes, block) in enumerate(pieces):
            name = part.name if len(pieces) == 1 else f"{part.name}_{number}"
            chunks.append(Chunk(name, lane, lanes, block, lane < d_v))
    return tuple(chunks)


def tiled_chunks(layout: CacheLayout) -> tuple[Chunk, ...]:
    """Blocks of a row that cut no tile of scales, in lane order."""
    chunks: list[Chunk] = []
    for field in layout.data:
        scales = layout.scales_of(field)
        tile = scales.tile if scales else 1
        pieces: list[tuple[int, int, int]] = []
        first = 0
        for width, block in split_lanes(-(-field.count // tile) * tile):
            pieces.append((field.first_lane + first, min(width, field.count - first), block))
            first += width
        for number, (lane, lanes, block) in enumerate(pieces):
            name = PART_NAMES[field.name]
            chunks.append(Chunk(name if len(pieces) == 1 else f"{name}_{number}", lane, lanes, block, in_v=False))
    return tuple(chunks)


def _parts(layout: CacheLayout, d_v: int) -> list[_Part]:
    """Its fields as runs of lanes; where V reaches into the RoPE lanes, fields of one dtype are one run."""
    fields = layout.data
    joined = not layout.quantised and len(fields) == 2 and fields[0].count < d_v
    if joined and fields[0].plane == fields[1].plane and fields[0].offset + fields[0].nbytes == fields[1].offset:
        return [_Part("kv", 0, layout.lanes)]
    return [_Part(PART_NAMES[field.name], field.first_lane, field.first_lane + field.count) for field in fields]


def _pieces(first: int, end: int, tilings: list[_Tiling]) -> Iterator[tuple[int, int, int]]:
    """(lane, lanes, block) of the chunks of lanes [first, end)."""
    while first < end:
        begun = [tiling.tile_end(first) for tiling in tilings if tiling.cuts(first)]
        lanes, block = split_lanes(min([end, *begun]) - first)[0]
        yield first, lanes, block
        first += lanes


def make_cache_plan(layout: CacheLayout, extra: CacheLayout | None, d_v: int) -> CachePlan:
    """Derives the numbers of the cache kernels.

    Args:
        layout: the cache's.
        extra: the second cache's.
        d_v: leading lanes that are V.
    """
    return CachePlan(
        chunks=layout_chunks(layout, d_v, extra),
        tiled=tiled_chunks(layout),
        extra_tiled=tiled_chunks(extra) if extra else (),
        block_t=BLOCK_T,
        num_warps=NUM_WARPS,
        gather_tile=GatherTile(block_t=2, num_warps=1),
        few_tile=GatherTile(block_t=1, num_warps=2),
        few_tokens=FEW_TOKENS,
        gather_programs=GATHER_PROGRAMS,
        lookup_t=LOOKUP_T,
    )
