"""A cached row as a program holds it, which dequantises K before it multiplies, and the tiles that fit it.

A dequantised tile of K lies in registers before it is stored for the products, so there are fewer tiles than for
unquantised rows. None of these spills in its loop with any of the named layouts under Triton 3.6 and 3.7.

One program may read two layouts, one loop behind the other. mma.sync takes q from shared memory in an order that
depends on how narrow the columns of K are as they are stored, so q lies there once for each width that a block has.
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
BITS = 8  # of a byte
REGISTERS = {"cuda": 256, "hip": 512}  # a thread takes, up to the most that it can

# Most wanted first, by heads and by what tl.dot becomes; a packed layout skips those of 4 warps on NVIDIA, as two
# layouts with a wide V do. Those of one stage are for two layouts that no other tile holds.
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
# For calls whose rows or indices are not aligned: loads of single elements take many registers, so the tile is small.
UNALIGNED = {"cuda": Tile(16, 16, 8, 2, False), "hip": Tile(16, 16, 4, 2, False)}
# 16 rows a step of two values a byte gave wrong products on sm90 (docs/performance/log.md); 32 and 64 do not.
PACKED_BLOCK_N = {"cuda": 32, "hip": 16}
MORE_WARPS = 8  # of NVIDIA's, where those of 4 would spill
TWO_LOOPS_REGISTERS = 48  # fp32 accumulators a thread of 4 warps may hold beside what two loops take
COPY_BYTES = 4  # of a thread, the fewest that cp.async copies
EXCHANGED_ROWS = 16  # rows of V that pass between threads at a time


@dataclass(frozen=True)
class RowBytes:
    """Bytes that a row of K takes in a program, by what they are.

    Attributes:
        direct: columns that are multiplied as they are stored.
        dequantised: the other columns, in the model's dtype.
        again: the same once more: mma.sync stores 8-bit values for each of the two products.
        stored: the other columns as they are stored, and their scales.
        waiting: of `stored`, what waits in shared memory for mma.sync; the rest waits in registers.
        packed: a byte holds two values.
        widths: bits of the narrowest values, as stored, of each block that is multiplied.
        narrowest: columns of the narrowest of its blocks, in the model's dtype; 0 where there is one.
        scales: (bytes of one, bytes of all) of the scales of a field whose values can change threads as they are
            stored, 8-bit ones in blocks of their own; None without.
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
    return (Chunk("kv", first.start, first.block, first.block, True),)


def bytes_of_row(layout: CacheLayout, loaded: Sequence[Chunk], joined: bool) -> RowBytes:
    """What a row in these blocks takes."""
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

    Triton does so where nothing that dequantises them waits in shared memory: in one stage, or where a thread has too
    few bytes of scales to copy them there.
    """
    if row.scales is None or row.packed:
        return False
    one, scales = row.scales
    return tile.num_stages == 1 or max(one, tile.block_n * scales // (tile.num_warps * target.warp_size)) < COPY_BYTES


def expected_shared(tile: Tile, chunks: Sequence[Chunk], row: RowBytes, target: Target) -> int:
    """Bytes of shared memory that a program over one layout is expected to need, or a little more.

    Beside q and the dequantised tile of K, NVIDIA's targets hold the tile on its way as it is stored. CDNA stages
    either q or K, whichever is larger. tests/plan compares with what Triton 3.6 and 3.7 allocate.
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
    """What a user can do where no tile fits a target."""
    return f"the spec's targets without {target.name}, or a layout of narrower rows for cache or extra_cache"


def _candidates(block_h: int, target: Target) -> tuple[Tile, ...]:
    for name in (target.name, target.dot, *(("mma",) if target.backend == "cuda" else ())):
        if (block_h, name) in CANDIDATES:
            return CANDIDATES[block_h, name]
    return ()


@dataclass(frozen=True)
class CachedRow:
    """A cached row as a program holds it, which says what tiles fit.

    Attributes:
        chunks: its blocks as they are multiplied, in column order.
        layouts: what it takes, in each layout that one program reads in a loop of its own.
    """

    chunks: tuple[Chunk, ...]
    layouts: tuple[RowBytes, ...]

    @property
    def packed(self) -> bool:
        """Whether a byte of either layout holds two values."""
        return any(row.packed for row in self.layouts)

    def _apart(self, tile: Tile, target: Target) -> int:
        """Bytes that a second loop takes beside those of q and of the loop that takes most."""
        if len(self.layouts) == 1 or target.backend == "hip":
            return 0
        if tile.block_h >= WIDE_ROWS and target.dot != "mma":
            # What is narrow in one loop's tile on its way keeps the other's from lying side by side.
            barriers = BARRIER_BYTES if target.dot == "tcgen05" else 0
            return tile.block_n * (max(row.narrowest for row in self.layouts) + INDEX_BYTES) + barriers
        return self.q_copies(tile, target)

    def q_copies(self, tile: Tile, target: Target) -> int:
        """Bytes of q that stand in shared memory once more for a second layout.

        Both loops' are counted in either: what the first one's leaves in the second may stay empty.
        """
        if target.backend == "hip" or (tile.block_h >= WIDE_ROWS and target.dot != "mma"):
            return 0
        widths = [len(set(of_block)) for of_block in zip(*(row.widths for row in self.layouts), strict=True)]
        return tile.block_h * sum((n - 1) * row_bytes([chunk]) for n, chunk in zip(widths, self.chunks, strict=True))

    def shared(self, tile: Tile, target: Target) -> int:
        """Bytes of shared memory that a program is expected to need: q, and K in the layout that takes most."""
        most = max(expected_shared(tile, self.chunks, row, target) for row in self.layouts)
        return most + self._apart(tile, target)

    def row(
        self, tile: Tile, target: Target, reason: str, max_heads: int | None = None, max_tokens: int | None = None
    ) -> TileRow:
        """A row of the tile table.

        Raises:
            LimitError: the tile needs more shared memory than the target gives a program.
        """
        shared = self.shared(tile, target)
        if shared > target.shared_limit:
            raise LimitError(f"{target.name}: {self._too_much_shared(tile, target)}", hint=_remedies(target))
        threads = tile.num_warps * target.warp_size
        by_registers = REGISTERS_PER_SM[target.backend] // (REGISTERS[target.backend] * threads)
        resident = max(1, min(programs_per_sm(tile, shared, target), by_registers))
        return TileRow(max_heads, max_tokens, tile, resident, shared, reason)

    def _too_much_shared(self, tile: Tile, target: Target, *, aligned: bool = True) -> str:
        """What a tile takes of shared memory, by what it is for."""
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
        """Whether two loops leave 4 warps too few registers for as many accumulators."""
        return len(self.layouts) > 1 and registers > TWO_LOOPS_REGISTERS

    def _refusal(self, tile: Tile, target: Target) -> str | None:
        """Why a tile is none for the target, with the arithmetic; None if it is one."""
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
        """Whether the target gives a program what the tile takes."""
        return self._refusal(tile, target) is None

    def _none_fits(self, target: Target) -> LimitError:
        """What to say where no tile fits: of the one that asks for least, since any other asks for more."""
        tiles = _candidates(FEW_HEADS, target)
        allowed = [tile for tile in tiles if not self.packed or tile.block_n >= PACKED_BLOCK_N[target.backend]]
        least = min(
            allowed, key=lambda tile: (accumulator_registers(tile, self.chunks, target), self.shared(tile, target))
        )
        message = f"{target.name}: {self._refusal(least, target)}; this is the smallest of {len(tiles)} tiles"
        return LimitError(message, hint=_remedies(target))

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
            reason = f"the first of {len(candidates)} with {number} programs per multiprocessor"
            found.append(replace(chosen, reason=reason))
        if not found:
            raise self._none_fits(target)
        found[-1] = replace(found[-1], max_heads=None)
        return tuple(found)

    def unaligned_tile(self, target: Target) -> Tile:
        """The tile for calls whose rows or indices are not aligned."""
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
        """The row of such a tile. Raises LimitError: it does not fit."""
        if self.plain is not None:
            return self.plain.unaligned_row(tile, target, reason)
        if self._unaligned_shared(tile, target) > target.shared_limit:
            raise LimitError(
                f"{target.name}: {self._too_much_shared(tile, target, aligned=False)}", hint=_remedies(target)
            )
        row = self.row(tile, target, reason)
        return replace(row, expected_shared=self._unaligned_shared(tile, target))


def cached_row(layout: CacheLayout, extra_layout: CacheLayout | None, loaded: Sequence[Chunk]) -> CachedRow:
    """The row of a cache, and of the second one, whose blocks are read as `loaded`, `Caches.chunks`."""
    chunks = join_chunks(loaded)
    layouts = [layout] if extra_layout in (None, layout) else [layout, extra_layout]
    return CachedRow(chunks, tuple(bytes_of_row(one, loaded, len(chunks) < len(loaded)) for one in layouts))
