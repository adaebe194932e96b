"""Resources of a cached row in a program that dequantises K, and the tiles that fit.

A dequantised tile of K is in registers before it is stored for the products, so fewer tiles fit than for unquantised
rows. None of these spills in its loop with any of the named layouts under Triton 3.6 and 3.7.

A program may read two layouts, in two loops. mma.sync reads q from shared memory in an order that depends on the stored
width of K's columns, so q is stored once per width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlagen.errors import LimitError
from mlagen.layout import CacheLayout
from mlagen.plan.targets import Target
from mlagen.plan.tiles.chunks import Chunk
from mlagen.plan.tiles.tile import (
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
from mlagen.plan.tiles.tile import expected_shared as unquantised_shared
from mlagen.work import INDEX_BYTES, ITEMSIZE

FEW_HEADS = 16
BARRIER_BYTES = 1024  # of tcgen05, including the scales of a tile
BITS = 8  # of a byte

# Preferred first, by heads and by the instruction of tl.dot. A packed layout skips tiles of 4 warps on NVIDIA, and so
# do two layouts with a wide V. Tiles of one stage are for two layouts that fit no other tile.
CANDIDATES: dict[tuple[int, str], tuple[Tile, ...]] = {
    (16, "mma"): (
        Tile(16, 32, 4, 2, True),
        Tile(16, 32, 8, 2, True),
        Tile(16, 16, 4, 2, True),
        Tile(16, 16, 8, 2, True),
        Tile(16, 32, 8, 1, True),
        Tile(16, 16, 8, 1, True),
    ),
    (16, "gfx942"): (Tile(16, 32, 4, 2, False), Tile(16, 16, 4, 2, False), Tile(16, 16, 4, 1, False)),
    (16, "gfx950"): (Tile(16, 32, 4, 1, False), Tile(16, 16, 4, 2, False), Tile(16, 16, 4, 1, False)),
    (32, "mfma"): (Tile(32, 16, 4, 2, False), Tile(32, 16, 4, 1, False)),
    (64, "wgmma"): (Tile(64, 64, 8, 2, False), Tile(64, 32, 8, 2, False)),
    (64, "tcgen05"): (Tile(64, 64, 8, 2, False), Tile(64, 32, 8, 2, False), Tile(64, 16, 8, 2, False)),
}
ROWS = (16, 32, 64)
# For calls with unaligned rows or indices: single-element loads need many registers, so the tile is small.
UNALIGNED = {"cuda": Tile(16, 16, 8, 2, False), "hip": Tile(16, 16, 4, 2, False)}
# 16 rows per step with two values per byte gave wrong products on sm90 (docs/performance/log.md); 32 and 64 do not.
PACKED_BLOCK_N = {"cuda": 32, "hip": 16}
MORE_WARPS = 8  # on NVIDIA, if 4 would spill
TWO_LOOPS_REGISTERS = 48  # most fp32 accumulators per thread of 4 warps with two loops
COPY_BYTES = 4  # fewest bytes per thread of cp.async
EXCHANGED_ROWS = 16  # rows of V that threads exchange at a time


@dataclass(frozen=True)
class RowBytes:
    """Bytes of a row of K in a program, by kind.

    Attributes:
        direct: columns that are multiplied without conversion.
        dequantised: the other columns, in the model's dtype.
        again: a second copy: mma.sync stores 8-bit values for each of the two products.
        stored: the other columns as stored, and their scales.
        waiting: the part of `stored` that is in shared memory before mma.sync; the rest is in registers.
        packed: two values per byte.
        widths: bits of the narrowest stored values of each multiplied block.
        narrowest: columns of the narrowest block, in the model's dtype; 0 for one block.
        scales: (bytes of one, bytes of all) of the scales of a field with values that can change threads as stored,
            8-bit ones in their own blocks; None without.
    """

    direct: int
    dequantised: int
    again: int
    stored: int
    waiting: int
    packed: bool
    widths: tuple[int, ...]
    narrowest: int
    scales: tuple[int, int] | None


def join_chunks(loaded: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """The blocks as one, where all of them are V and the first has room for the columns of the last.

    One block needs one accumulator of V: two would be a chain of products each, and more columns than there are.
    """
    if len(loaded) != 2 or not all(chunk.in_v for chunk in loaded):
        return tuple(loaded)
    first, last = loaded
    if last.masked or first.columns % last.columns or first.columns + last.columns != first.block:
        return tuple(loaded)
    return (Chunk("kv", first.start, first.block, first.block, True, first.rotated or last.rotated),)


def bytes_of_row(layout: CacheLayout, loaded: Sequence[Chunk], joined: bool) -> RowBytes:
    """Return the resources of a row in these blocks."""
    direct = dequantised = again = stored = waiting = 0
    packed = False
    widths: list[int] = []
    found: tuple[int, int] | None = None
    for chunk in loaded:
        field = next(one for one in layout.data if chunk.start < one.first_column + one.count)
        nbytes = chunk.block * ITEMSIZE
        two_a_byte = field.dtype == "e2m1"
        widths.append(BITS // 2 if two_a_byte else BITS * field.itemsize)
        if not field.quantised:
            direct += nbytes
            continue
        scales = layout.scales_of(field)
        scale_bytes = scales.itemsize * max(1, chunk.block // scales.tile) if scales else 0
        data = chunk.block // 2 if two_a_byte else chunk.block
        packed |= two_a_byte
        dequantised += nbytes
        again += nbytes if chunk.in_v and not two_a_byte else 0
        stored += data + scale_bytes
        waiting += scale_bytes if scales and scales.dtype == "fp32" else data + 2 * scale_bytes
        if scales and not two_a_byte:
            found = (scales.itemsize, scale_bytes)
    narrowest = min(chunk.block for chunk in loaded) * ITEMSIZE if len(loaded) > 1 else 0
    if joined:  # no column is multiplied as it is loaded
        return RowBytes(
            0, dequantised, again, stored + direct, waiting + direct, packed, (min(widths),), narrowest, None
        )
    return RowBytes(direct, dequantised, again, stored, waiting, packed, tuple(widths), narrowest, found)


def _moves_as_stored(tile: Tile, row: RowBytes, target: Target) -> bool:
    """Whether values change threads as they are stored, and are dequantised in the order that mma.sync takes.

    Triton does so if no scales are in shared memory: in one stage, or if a thread has too few bytes of scales to copy
    them there.
    """
    if row.scales is None or row.packed:
        return False
    one, scales = row.scales
    return tile.num_stages == 1 or max(one, tile.block_n * scales // (tile.num_warps * target.warp_size)) < COPY_BYTES


def expected_shared(tile: Tile, chunks: Sequence[Chunk], row: RowBytes, target: Target) -> int:
    """Return the expected bytes of shared memory of a program over one layout, or slightly more.

    NVIDIA targets hold q, the dequantised tile of K and the stored tile in flight. CDNA stages the larger one of q and
    K. tests/plan compares the result with the allocation of Triton 3.6 and 3.7.
    """
    if target.backend == "hip" or not row.dequantised:
        return unquantised_shared(tile, chunks, target)
    q = tile.block_h * row_bytes(chunks)
    indices = 0 if tile.indices_ahead else INDEX_BYTES * tile.block_n
    if tile.block_h < WIDE_ROWS:
        beside = tile.block_h * tile.block_n * ITEMSIZE if tile.num_stages == 1 else 2 * indices  # P, or indices
        on_the_way = (tile.num_stages - 1) * row.waiting + max(1, tile.num_stages - 1) * row.direct
        if _moves_as_stored(tile, row, target):
            return q + tile.block_n * (row.stored + row.direct) + beside
        return q + tile.block_n * (row.dequantised + row.again + on_the_way) + beside
    on_the_way = (tile.num_stages - 1) * row.stored + tile.num_stages * row.direct
    loop = q + tile.block_n * (row.dequantised + on_the_way) + indices
    if target.dot == "tcgen05":
        return loop + BARRIER_BYTES
    return max(loop, 2 * tile.block_h * v_bytes(chunks))  # the result passes through shared memory in fp32


def _remedies(target: Target) -> str:
    """Return the fix for a target without a tile."""
    return f"the spec's targets without {target.name}, or a layout of narrower rows for cache or extra_cache"


def _candidates(block_h: int, target: Target) -> tuple[Tile, ...]:
    for name in (target.name, target.dot, *(("mma",) if target.backend == "cuda" else ())):
        if (block_h, name) in CANDIDATES:
            return CANDIDATES[block_h, name]
    return ()


@dataclass(frozen=True)
class CachedRow:
    """A cached row in a program, which determines the tiles that fit.

    Attributes:
        chunks: its multiplied blocks, in column order.
        layouts: its resources in each layout that a program reads, each in its own loop.
    """

    chunks: tuple[Chunk, ...]
    layouts: tuple[RowBytes, ...]

    @property
    def packed(self) -> bool:
        """Whether a byte of either layout holds two values."""
        return any(row.packed for row in self.layouts)

    def _apart(self, tile: Tile, target: Target) -> int:
        """Return the additional bytes of a second loop, besides q and the larger loop."""
        if len(self.layouts) == 1 or target.backend == "hip":
            return 0
        if tile.block_h >= WIDE_ROWS and target.dot != "mma":
            # Narrow columns of one loop's tile in flight prevent sharing with the other loop's.
            barriers = BARRIER_BYTES if target.dot == "tcgen05" else 0
            return tile.block_n * (max(row.narrowest for row in self.layouts) + INDEX_BYTES) + barriers
        return self.q_copies(tile, target)

    def q_copies(self, tile: Tile, target: Target) -> int:
        """Return the bytes of further copies of q in shared memory for a second layout.

        The copies of both loops are counted in either loop.
        """
        if target.backend == "hip" or (tile.block_h >= WIDE_ROWS and target.dot != "mma"):
            return 0
        widths = [len(set(of_block)) for of_block in zip(*(row.widths for row in self.layouts), strict=True)]
        return tile.block_h * sum((n - 1) * row_bytes([chunk]) for n, chunk in zip(widths, self.chunks, strict=True))

    def shared(self, tile: Tile, target: Target) -> int:
        """Return the expected bytes of shared memory of a program: q, and K in the larger layout."""
        most = max(expected_shared(tile, self.chunks, row, target) for row in self.layouts)
        return most + self._apart(tile, target)

    def row(
        self, tile: Tile, target: Target, reason: str, max_heads: int | None = None, max_tokens: int | None = None
    ) -> TileRow:
        """Return a row of the tile table.

        Raises:
            LimitError: the tile needs more shared memory than the target gives a program.
        """
        shared = self.shared(tile, target)
        if shared > target.shared_limit:
            raise LimitError(f"{target.name}: {self._too_much_shared(tile, target)}", hint=_remedies(target))
        threads = tile.num_warps * target.warp_size
        by_registers = target.registers_per_sm // (target.most_registers * threads)  # if each takes the most it can
        resident = max(1, min(programs_per_sm(tile, shared, target), by_registers))
        return TileRow(max_heads, max_tokens, tile, resident, shared, reason)

    def _too_much_shared(self, tile: Tile, target: Target, *, aligned: bool = True) -> str:
        """Return the error text for a tile that needs too much shared memory, with the parts."""
        shared = self.shared(tile, target) if aligned else self._unaligned_shared(tile, target)
        q = tile.block_h * row_bytes(self.chunks)
        again = self.q_copies(tile, target)
        copies = f" and {again:,} again in the order of the second layout" if again else ""
        return (
            f"tile {tile} of attention over a cache needs {shared:,} bytes of shared memory "
            f"(q {q:,} = {tile.block_h} x {row_bytes(self.chunks):,}{copies}; K and what is on its way "
            f"{shared - q - again:,}, {tile.block_n} rows), {shared - target.shared_limit:,} more than the "
            f"{target.shared_limit:,} a program gets"
        )

    def _crowds(self, registers: float) -> bool:
        """Whether two loops leave 4 warps too few registers for this many accumulators."""
        return len(self.layouts) > 1 and registers > TWO_LOOPS_REGISTERS

    def _refusal(self, tile: Tile, target: Target) -> str | None:
        """Return the reason why a tile does not fit the target, with the arithmetic, or None."""
        registers, most = accumulator_registers(tile, self.chunks, target), ACCUMULATOR_REGISTERS[tile.block_h]
        if registers > most:
            columns = v_bytes(self.chunks) // ITEMSIZE
            return (
                f"V of {columns} columns needs {registers:.0f} accumulators per thread in tile {tile} of attention "
                f"over "
                f"a cache, more than {most}"
            )
        if target.backend == "cuda" and tile.num_warps < MORE_WARPS and (self.packed or self._crowds(registers)):
            both = f"two layouts and {registers:.0f} accumulators per thread"
            what = "a layout with two values per byte" if self.packed else both
            return f"tile {tile}: {what} in fewer than {MORE_WARPS} warps"
        if self.packed and tile.block_n < (rows := PACKED_BLOCK_N[target.backend]):
            return f"tile {tile}: a layout with two values per byte in steps of fewer than {rows} rows"
        if self.shared(tile, target) > target.shared_limit:
            return self._too_much_shared(tile, target)
        return None

    def fits(self, tile: Tile, target: Target) -> bool:
        """Whether the tile fits the target."""
        return self._refusal(tile, target) is None

    def _none_fits(self, target: Target) -> LimitError:
        """Return the error for a target without a tile, about the smallest tile."""
        tiles = _candidates(FEW_HEADS, target)
        allowed = [tile for tile in tiles if not self.packed or tile.block_n >= PACKED_BLOCK_N[target.backend]]
        least = min(
            allowed, key=lambda tile: (accumulator_registers(tile, self.chunks, target), self.shared(tile, target))
        )
        message = f"{target.name}: {self._refusal(least, target)}; this is the smallest of {len(tiles)} tiles"
        return LimitError(message, hint=_remedies(target))

    @property
    def plain(self) -> PlainRow | None:
        """Return the row as an unquantised one; None if a layout is quantised."""
        return None if any(row.dequantised for row in self.layouts) else PlainRow(self.chunks)

    def untuned(self, num_heads: int, target: Target) -> tuple[TileRow, ...]:
        """Return the rows of an untuned target: as many heads per program as fit, since each dequantises K itself.

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
            reason = f"the first of {len(candidates)} with {number} programs per multiprocessor"
            found.append(replace(chosen, reason=reason))
        if not found:
            raise self._none_fits(target)
        found[-1] = replace(found[-1], max_heads=None)
        return tuple(found)

    def unaligned_tile(self, target: Target) -> Tile:
        """Return the tile for calls with unaligned rows or indices."""
        if self.plain is not None:
            return self.plain.unaligned_tile(target)
        tile = UNALIGNED[target.backend]
        if not self.packed:
            return tile
        tile = replace(tile, block_n=PACKED_BLOCK_N[target.backend])
        if target.backend == "hip":
            return tile
        one_stage = replace(tile, num_stages=1)  # two spill with some layouts, and leave those that are not quantised
        return one_stage if self._unaligned_shared(one_stage, target) <= target.shared_limit else tile

    def _unaligned_shared(self, tile: Tile, target: Target) -> int:
        """As `shared`, where rows that are not quantised may be loaded by single elements, which no copy brings."""
        if target.backend == "hip":
            return self.shared(tile, target)
        row, v = row_bytes(self.chunks), v_bytes(self.chunks)
        loop = 0
        if any(not one.dequantised for one in self.layouts):  # V changes threads between its two products
            again = tile.block_n if tile.num_stages == 1 else min(tile.block_n, EXCHANGED_ROWS)
            loop = tile.block_h * row + tile.block_n * row + again * v + tile.block_h * tile.block_n * ITEMSIZE
        return max(self.shared(tile, target), self.q_copies(tile, target) + loop, tile.block_h * (row + 2 * v))

    def unaligned_row(self, tile: Tile, target: Target, reason: str = UNALIGNED_REASON) -> TileRow:
        """Return the row of such a tile. Raises LimitError if it does not fit."""
        if self.plain is not None:
            return self.plain.unaligned_row(tile, target, reason)
        if self._unaligned_shared(tile, target) > target.shared_limit:
            raise LimitError(
                f"{target.name}: {self._too_much_shared(tile, target, aligned=False)}", hint=_remedies(target)
            )
        row = self.row(tile, target, reason)
        return replace(row, expected_shared=self._unaligned_shared(tile, target))


def cached_row(layout: CacheLayout, extra_layout: CacheLayout | None, loaded: Sequence[Chunk]) -> CachedRow:
    """Return the row of a cache and of the second one, read in the blocks `loaded` (`Caches.chunks`)."""
    chunks = join_chunks(loaded)
    layouts = [layout] if extra_layout in (None, layout) else [layout, extra_layout]
    return CachedRow(chunks, tuple(bytes_of_row(one, loaded, len(chunks) < len(loaded)) for one in layouts))
