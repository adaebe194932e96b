"""A cached row as a program holds it, which dequantises K before it multiplies, and the tiles that fit it.

A dequantised tile of K lies in registers before it is stored for the products, so there are fewer tiles than for
unquantised rows. None of these spills in its loop with any of the named layouts under Triton 3.6 and 3.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlagen.errors import LimitError
from mlagen.layout import CacheLayout
from mlagen.plan.chunks import Chunk
from mlagen.plan.targets import Target
from mlagen.plan.tiles import (
    ACCUMULATOR_REGISTERS,
    RESIDENT,
    UNALIGNED_REASON,
    WIDE_ROWS,
    PlainRow,
    Tile,
    TileRow,
    accumulator_registers,
    programs_per_sm,
    row_bytes,
    v_bytes,
)
from mlagen.plan.tiles import expected_shared as unquantised_shared
from mlagen.work import INDEX_BYTES, ITEMSIZE

FEW_HEADS = 16
BARRIER_BYTES = 1024  # tcgen05's, with the scales that wait beside a tile
REGISTERS_PER_SM = {"cuda": 1 << 16, "hip": 1 << 17}
REGISTERS = {"cuda": 256, "hip": 512}  # a thread takes, up to the most that it can

# Most wanted first, by heads and by what tl.dot becomes; a packed layout skips those of 4 warps on NVIDIA.
CANDIDATES: dict[tuple[int, str], tuple[Tile, ...]] = {
    (16, "mma"): (
        Tile(16, 32, 4, 2, True),
        Tile(16, 32, 8, 2, True),
        Tile(16, 16, 4, 2, True),
        Tile(16, 16, 8, 2, True),
    ),
    (16, "gfx942"): (Tile(16, 32, 4, 2, False), Tile(16, 16, 4, 2, False), Tile(16, 16, 4, 1, False)),
    (16, "gfx950"): (Tile(16, 32, 4, 1, False), Tile(16, 16, 4, 2, False), Tile(16, 16, 4, 1, False)),
    (32, "mfma"): (Tile(32, 16, 4, 2, False), Tile(32, 16, 4, 1, False)),
    (64, "wgmma"): (Tile(64, 64, 8, 2, False), Tile(64, 32, 8, 2, False)),
    (64, "tcgen05"): (Tile(64, 64, 8, 2, False), Tile(64, 32, 8, 2, False), Tile(64, 16, 8, 2, False)),
}
ROWS = (16, 32, 64)
# For calls whose rows or indices are not aligned: loads of single elements take many registers, so the tile is small.
UNALIGNED = {"cuda": Tile(16, 16, 8, 2, False), "hip": Tile(16, 16, 4, 2, False)}
# 16 rows a step of two lanes a byte gave wrong products on sm90 (docs/performance/log.md); 32 and 64 do not.
PACKED_BLOCK_N = {"cuda": 32, "hip": 16}


@dataclass(frozen=True)
class RowBytes:
    """Bytes that a row of K takes in a program, by what they are.

    Attributes:
        direct: lanes that are multiplied as they are stored.
        dequantised: the other lanes, in the model's dtype.
        again: the same once more: mma.sync stores 8-bit lanes for each of the two products.
        stored: the other lanes as they are stored, and their scales.
        waiting: of `stored`, what waits in shared memory for mma.sync; the rest waits in registers.
        packed: a byte holds two lanes.
    """

    direct: int
    dequantised: int
    again: int
    stored: int
    waiting: int
    packed: bool


def join_chunks(loaded: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """The blocks as one, where all of them are V and the first has room for the lanes of the last.

    One block needs one accumulator of V: two would be a chain of products each, and more lanes than there are.
    """
    if len(loaded) != 2 or not all(chunk.in_v for chunk in loaded):
        return tuple(loaded)
    first, last = loaded
    if last.masked or first.lanes % last.lanes or first.lanes + last.lanes != first.block:
        return tuple(loaded)
    return (Chunk("kv", first.start, first.block, first.block, True),)


def bytes_of_row(layout: CacheLayout, loaded: Sequence[Chunk], joined: bool) -> RowBytes:
    """What a row in these blocks takes."""
    direct = dequantised = again = stored = waiting = 0
    packed = False
    for chunk in loaded:
        field = next(one for one in layout.data if chunk.start < one.first_lane + one.count)
        lanes = chunk.block * ITEMSIZE
        if not field.quantised:
            direct += lanes
            continue
        scales = layout.scales_of(field)
        scale_bytes = scales.itemsize * max(1, chunk.block // scales.tile) if scales else 0
        two_a_byte = field.dtype == "e2m1"
        data = chunk.block // 2 if two_a_byte else chunk.block
        packed |= two_a_byte
        dequantised += lanes
        again += 0 if two_a_byte else lanes
        stored += data + scale_bytes
        waiting += scale_bytes if scales and scales.dtype == "fp32" else data + 2 * scale_bytes
    if joined:  # no lane is multiplied as it is loaded
        return RowBytes(0, dequantised, again, stored + direct, waiting + direct, packed)
    return RowBytes(direct, dequantised, again, stored, waiting, packed)


def expected_shared(tile: Tile, chunks: Sequence[Chunk], row: RowBytes, target: Target) -> int:
    """Bytes of shared memory that a program is expected to need, or a little more.

    Beside q and the dequantised tile of K, NVIDIA's targets hold the tile on its way as it is stored. CDNA stages
    either q or K, whichever is larger. tests/plan compares with what Triton 3.6 and 3.7 allocate.
    """
    if target.backend == "hip" or not row.dequantised:
        return unquantised_shared(tile, chunks, target)
    q = tile.block_h * row_bytes(chunks)
    indices = 0 if tile.indices_ahead else INDEX_BYTES * tile.block_n
    if tile.block_h < WIDE_ROWS:
        on_the_way = (tile.num_stages - 1) * row.waiting + max(1, tile.num_stages - 1) * row.direct
        return q + tile.block_n * (row.dequantised + row.again + on_the_way) + 2 * indices
    on_the_way = (tile.num_stages - 1) * row.stored + tile.num_stages * row.direct
    loop = q + tile.block_n * (row.dequantised + on_the_way) + indices
    if target.dot == "tcgen05":
        return loop + BARRIER_BYTES
    return max(loop, 2 * tile.block_h * v_bytes(chunks))  # the result passes through shared memory in fp32


def _candidates(block_h: int, target: Target) -> tuple[Tile, ...]:
    for name in (target.name, target.dot, *(("mma",) if target.backend == "cuda" else ())):
        if (block_h, name) in CANDIDATES:
            return CANDIDATES[block_h, name]
    return ()


@dataclass(frozen=True)
class CachedRow:
    """A cached row as a program holds it, which says what tiles fit.

    Attributes:
        chunks: its blocks as they are multiplied, in lane order.
        layouts: what it takes, in each layout that one program may read.
    """

    chunks: tuple[Chunk, ...]
    layouts: tuple[RowBytes, ...]

    @property
    def packed(self) -> bool:
        """Whether a byte of either layout holds two lanes."""
        return any(row.packed for row in self.layouts)

    def shared(self, tile: Tile, target: Target) -> int:
        """Bytes of shared memory that a program is expected to need, in the layout that takes most."""
        return max(expected_shared(tile, self.chunks, row, target) for row in self.layouts)

    def row(
        self, tile: Tile, target: Target, reason: str, max_heads: int | None = None, max_tokens: int | None = None
    ) -> TileRow:
        """A row of the tile table.

        Raises:
            LimitError: the tile needs more shared memory than the target gives a program.
        """
        shared = self.shared(tile, target)
        if shared > target.shared_limit:
            most = max(self.layouts, key=lambda row: expected_shared(tile, self.chunks, row, target))
            raise LimitError(
                f"{target.name}: tile {tile} of attention over a cache needs {shared:,} bytes of shared memory "
                f"(q {tile.block_h} x {row_bytes(self.chunks):,}, K {tile.block_n} x {row_bytes(self.chunks):,} and "
                f"{most.stored:,} as stored), {shared - target.shared_limit:,} more than the "
                f"{target.shared_limit:,} a program gets"
            )
        threads = tile.num_warps * target.warp_size
        by_registers = REGISTERS_PER_SM[target.backend] // (REGISTERS[target.backend] * threads)
        resident = max(1, min(programs_per_sm(tile, shared, target), by_registers))
        return TileRow(max_heads, max_tokens, tile, resident, shared, reason)

    def fits(self, tile: Tile, target: Target) -> bool:
        """Whether the target gives a program what the tile takes."""
        if self.packed and (
            tile.block_n < PACKED_BLOCK_N[target.backend] or (target.backend == "cuda" and tile.num_warps < 8)
        ):
            return False
        registers = accumulator_registers(tile, self.chunks, target)
        return self.shared(tile, target) <= target.shared_limit and registers <= ACCUMULATOR_REGISTERS[tile.block_h]

    @property
    def plain(self) -> PlainRow | None:
        """The row as one that is not quantised; None where a layout is."""
        return None if any(row.dequantised for row in self.layouts) else PlainRow(self.chunks)

    def untuned(self, num_heads: int, target: Target) -> tuple[TileRow, ...]:
        """Rows of an untuned target: as many heads a program as fit, since each program dequantises K for itself.

        Raises:
            LimitError: not even the smallest tile fits.
        """
        if self.plain is not None:
            return self.plain.untuned(num_heads, target)
        found: list[TileRow] = []
        for block_h in ROWS:
            candidates = _candidates(block_h, target)
            fitting = [self.row(tile, target, "", block_h) for tile in candidates if self.fits(tile, target)]
            if not fitting or (found and num_heads <= FEW_HEADS):
                continue
            crowded = [row for row in fitting if row.programs_per_sm >= RESIDENT]
            chosen = crowded[0] if block_h == FEW_HEADS and crowded else fitting[0]
            number = "one fits" if chosen.programs_per_sm == 1 else f"{chosen.programs_per_sm} fit"
            reason = f"the first of {len(candidates)} of which {number} a multiprocessor"
            found.append(replace(chosen, reason=reason))
        if not found:
            smallest = _candidates(FEW_HEADS, target)[-1]
            self.row(smallest, target, "")
            registers = accumulator_registers(smallest, self.chunks, target)
            raise LimitError(
                f"{target.name}: V of {v_bytes(self.chunks) // ITEMSIZE} lanes takes {registers:.0f} accumulators a "
                f"thread in tile {smallest} of attention over a cache, more than {ACCUMULATOR_REGISTERS[FEW_HEADS]}"
            )
        found[-1] = replace(found[-1], max_heads=None)
        return tuple(found)

    def unaligned_tile(self, target: Target) -> Tile:
        """The tile for calls whose rows or indices are not aligned."""
        if self.plain is not None:
            return self.plain.unaligned_tile(target)
        tile = UNALIGNED[target.backend]
        if self.packed:
            stages = 1 if target.backend == "cuda" else tile.num_stages  # two spill
            tile = replace(tile, block_n=PACKED_BLOCK_N[target.backend], num_stages=stages)
        return tile

    def unaligned_row(self, tile: Tile, target: Target, reason: str = UNALIGNED_REASON) -> TileRow:
        """The row of such a tile. Raises LimitError: it does not fit."""
        if self.plain is not None:
            return self.plain.unaligned_row(tile, target, reason)
        row = self.row(tile, target, reason)
        result = row.tile.block_h * (row_bytes(self.chunks) + 2 * v_bytes(self.chunks))
        return replace(row, expected_shared=max(row.expected_shared, result if target.backend == "cuda" else 0))


def cached_row(layout: CacheLayout, extra_layout: CacheLayout | None, loaded: Sequence[Chunk]) -> CachedRow:
    """The row of a cache, and of the second one, whose blocks are read as `loaded`, `Caches.chunks`."""
    chunks = join_chunks(loaded)
    layouts = [layout] if extra_layout is None else [layout, extra_layout]
    return CachedRow(chunks, tuple(bytes_of_row(one, loaded, len(chunks) < len(loaded)) for one in layouts))
