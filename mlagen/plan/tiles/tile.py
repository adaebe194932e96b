"""Tiles of the attention kernels: how many heads and indices a program holds, for each target and size of call.

A tile is data. Untuned targets take the first candidate that fits; `specs/tuned/<spec>/<target>.yaml` overrides it with
the result of a sweep on the device. The shared-memory model follows the allocation of Triton 3.6 and 3.7 for these
kernels, and on NVIDIA also of 3.8 and 3.9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlagen.errors import LimitError
from mlagen.plan.targets import Target
from mlagen.plan.tiles.chunks import Chunk
from mlagen.plan.tritons import TableRow
from mlagen.work import ITEMSIZE

WIDE_ROWS = 64  # wgmma and tcgen05 take tiles of at least this many rows
ACCUMULATOR_REGISTERS = {16: 80, 32: 80, 64: 128}  # fp32 accumulators a thread may hold, by heads; more of them spill


@dataclass(frozen=True)
class Tile:
    """Launch parameters of the attention kernels.

    Attributes:
        block_h: heads a program holds.
        block_n: indices a program takes a step.
        num_warps: warps a program.
        num_stages: software-pipeline depth of the loop over indices.
        indices_ahead: indices are loaded one step before they are used, so that the loads of K depend on no other load
            of their step and the pipeline holds num_stages - 1 tiles; costs registers.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    indices_ahead: bool

    def __str__(self) -> str:
        ahead = " ahead" if self.indices_ahead else ""
        return f"{self.block_h}x{self.block_n} w{self.num_warps} s{self.num_stages}{ahead}"


@dataclass(frozen=True)
class TileRow(TableRow):
    """The tile for calls of up to so many heads and tokens on one target; None stands for any number.

    Attributes:
        max_heads, max_tokens: the largest call the row holds; of dense attention, its rows a KV head and its requests.
        tile: its tile.
        programs_per_sm: programs a multiprocessor that the choice of splits plans with: as many as fit, unless tuned.
        expected_shared: bytes of shared memory a program is expected to need.
        reason: why this tile.
    """

    max_heads: int | None
    max_tokens: int | None
    tile: Tile
    programs_per_sm: int
    expected_shared: int
    reason: str


@dataclass(frozen=True)
class Sm90Row:
    """Calls with up to this many heads run the sm90 kernel from `min_tokens` tokens on; None: never.

    For dense attention, heads are rows per KV head, and tokens are requests.
    """

    max_heads: int | None
    min_tokens: int | None


def most_text(number: int | None) -> str:
    """Return the upper bound of a table row in words."""
    return "any" if number is None else f"up to {number}"


def calls_text(rows: Sequence[Sm90Row]) -> str:
    """Return the calls that run an sm90 kernel in words, by heads."""
    return "; ".join(
        f"{most_text(row.max_heads)}: {'none' if row.min_tokens is None else f'from {row.min_tokens} tokens'}"
        for row in rows
    )


@dataclass(frozen=True)
class DenseFwdTile:
    """Launch parameters.

    Attributes:
        block_m: rows of one request and head that a program holds.
        block_n: keys it takes a step.
        num_warps: warps a program.
        num_stages: software-pipeline depth of the loop over keys.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} w{self.num_warps} s{self.num_stages}"


@dataclass(frozen=True)
class DenseFwdRow(TableRow):
    """The tile of calls that fit this many rows in their longest request; None: any number.

    Attributes:
        max_queries: rows of the longest request.
        tile: the tile.
        expected_shared: bytes of shared memory a program is expected to need.
        reason: why this tile.
    """

    max_queries: int | None
    tile: DenseFwdTile
    expected_shared: int
    reason: str


AnyTile = Tile | DenseFwdTile
RowMaker = Callable[[Tile, Target, str, int | None, int | None], TileRow]  # as `PlainRow.row`

# Most wanted first, by heads and by the instruction that tl.dot becomes. None of them spills at d_qk 576, d_v 512.
CANDIDATES: dict[tuple[int, str], tuple[Tile, ...]] = {
    (16, "mma"): (Tile(16, 32, 4, 2, True), Tile(16, 16, 4, 2, True), Tile(16, 16, 8, 2, True)),
    (16, "wgmma"): (
        Tile(16, 64, 4, 2, False),
        Tile(16, 32, 4, 2, True),
        Tile(16, 16, 4, 2, True),
        Tile(16, 16, 8, 2, True),
    ),
    (16, "mfma"): (Tile(16, 32, 4, 2, False), Tile(16, 16, 4, 2, False)),
    (32, "mma"): (Tile(32, 32, 8, 2, True), Tile(32, 16, 8, 2, True)),
    (32, "mfma"): (Tile(32, 16, 4, 2, False), Tile(32, 16, 4, 1, False)),
    (64, "mma"): (Tile(64, 32, 8, 2, False),),
    (64, "wgmma"): (Tile(64, 64, 8, 2, False), Tile(64, 32, 8, 2, False)),
    (64, "tcgen05"): (Tile(64, 32, 8, 2, False), Tile(64, 16, 8, 2, False)),
}
ROWS = (16, 32, 64)
# For calls with unaligned rows or indices: loads of single elements take many registers, so the tile is small.
UNALIGNED = (Tile(16, 16, 4, 2, False), Tile(16, 16, 8, 2, False))
UNALIGNED_REASON = "small, for single-element loads"
RESIDENT = 2  # programs a multiprocessor should hold where memory bounds the work: one loads while another computes


def row_bytes(chunks: Sequence[Chunk]) -> int:
    """Bytes of one row of q or K in the blocks that hold it."""
    return sum(chunk.block for chunk in chunks) * ITEMSIZE


def v_bytes(chunks: Sequence[Chunk]) -> int:
    """Bytes of one row of V in the blocks that hold it."""
    return row_bytes([chunk for chunk in chunks if chunk.in_v])


def expected_shared(tile: Tile, chunks: Sequence[Chunk], target: Target) -> int:
    """Bytes of shared memory that a program is expected to need.

    mma.sync keeps q, P and the K tiles that are on their way; wgmma keeps q and two K tiles or more and takes P from
    registers; tcgen05 keeps K twice and V once more; CDNA stages either q or K, whichever is larger, and later the fp32
    columns of an output that is rotated back.
    """
    q, k = tile.block_h * row_bytes(chunks), tile.block_n * row_bytes(chunks)
    p = tile.block_h * tile.block_n * ITEMSIZE
    if target.backend == "hip":
        rotated = max((chunk.block for chunk in chunks if chunk.rotated), default=0)
        q = tile.block_h * max(chunk.block for chunk in chunks) * ITEMSIZE
        return max(q, k * max(1, tile.num_stages - 1), 4 * tile.block_h * rotated)
    if tile.block_h >= WIDE_ROWS and target.dot == "wgmma":
        return q + (tile.num_stages if tile.indices_ahead else 2) * k
    if tile.block_h >= WIDE_ROWS and target.dot == "tcgen05":
        return q + 2 * k + tile.block_n * v_bytes(chunks)
    if tile.num_stages == 1:  # tiles that no copy brings are stored for each product
        return q + k + tile.block_n * v_bytes(chunks) + p
    return q + (tile.num_stages - 1 if tile.indices_ahead else 1) * k + p


def programs_per_sm(tile: Tile, shared: int, target: Target) -> int:
    """Programs that a multiprocessor holds at once, by shared memory and threads."""
    by_shared = target.shared_per_sm // (shared + target.shared_reserve)
    by_threads = target.threads_per_sm // (tile.num_warps * target.warp_size)
    return max(1, min(by_shared, by_threads))


def accumulator_registers(tile: Tile, chunks: Sequence[Chunk], target: Target) -> float:
    """fp32 accumulators of V a thread holds."""
    columns = v_bytes(chunks) // ITEMSIZE
    return tile.block_h * columns / (tile.num_warps * target.warp_size)


def make_row(
    tile: Tile,
    chunks: Sequence[Chunk],
    target: Target,
    reason: str,
    max_heads: int | None = None,
    max_tokens: int | None = None,
) -> TileRow:
    """A row for the tile.

    Raises:
        LimitError: the tile needs more shared memory than the target gives a program.
    """
    shared = expected_shared(tile, chunks, target)
    if shared > target.shared_limit:
        raise LimitError(
            f"{target.name}: tile {tile} needs {shared:,} bytes of shared memory "
            f"(q {tile.block_h} x {row_bytes(chunks):,}, K {tile.block_n} x {row_bytes(chunks):,} per buffer), "
            f"{shared - target.shared_limit:,} more than the {target.shared_limit:,} a program gets"
        )
    return TileRow(max_heads, max_tokens, tile, programs_per_sm(tile, shared, target), shared, reason)


def choose_tile(block_h: int, chunks: Sequence[Chunk], target: Target) -> tuple[Tile, str] | None:
    """The tile of `block_h` heads that an untuned target takes, and why; None if no candidate fits."""
    fallback = (block_h, "mma" if target.backend == "cuda" else "mfma")
    candidates = CANDIDATES.get((block_h, target.dot)) or CANDIDATES.get(fallback, ())
    fitting = [
        tile
        for tile in candidates
        if expected_shared(tile, chunks, target) <= target.shared_limit
        and accumulator_registers(tile, chunks, target) <= ACCUMULATOR_REGISTERS[block_h]
    ]
    if not fitting:
        return None
    resident = {tile: programs_per_sm(tile, expected_shared(tile, chunks, target), target) for tile in fitting}
    crowded = [tile for tile in fitting if resident[tile] >= RESIDENT]
    if block_h == min(ROWS) and crowded:
        return crowded[0], f"the largest of {len(candidates)} with {resident[crowded[0]]} programs per multiprocessor"
    return fitting[0], f"the largest of {len(candidates)} that fits {target.shared_limit:,} bytes"


def default_rows(num_heads: int, chunks: Sequence[Chunk], target: Target) -> tuple[TileRow, ...]:
    """Rows of an untuned target: as many heads a program as fit, up to 64, since a token's heads read the same K rows.

    Raises:
        LimitError: not even the smallest tile fits.
    """
    rows: list[TileRow] = []
    for block_h in ROWS:
        choice = choose_tile(block_h, chunks, target)
        if choice is not None and (block_h == min(ROWS) or block_h < 2 * num_heads):
            rows.append(make_row(choice[0], chunks, target, choice[1], max_heads=block_h))
    if not rows:
        smallest = CANDIDATES[min(ROWS), target.dot if target.dot == "mfma" else "mma"][-1]
        make_row(smallest, chunks, target, "")
        registers = accumulator_registers(smallest, chunks, target)
        raise LimitError(
            f"{target.name}: V of {v_bytes(chunks) // ITEMSIZE} columns takes {registers:.0f} accumulators a thread "
            f"in tile {smallest}, more than {ACCUMULATOR_REGISTERS[min(ROWS)]}"
        )
    rows[-1] = replace(rows[-1], max_heads=None)
    return tuple(rows)


def unaligned_tile(chunks: Sequence[Chunk], target: Target) -> Tile:
    """Return the tile for calls with unaligned rows or indices."""
    limit = ACCUMULATOR_REGISTERS[min(ROWS)]
    return next((tile for tile in UNALIGNED if accumulator_registers(tile, chunks, target) <= limit), UNALIGNED[-1])


def unaligned_row(tile: Tile, chunks: Sequence[Chunk], target: Target, reason: str = UNALIGNED_REASON) -> TileRow:
    """Return the row of such a tile. Besides q it stages a tile of K, or the fp32 result.

    Raises:
        LimitError: it does not fit.
    """
    row = make_row(tile, chunks, target, reason)
    result = tile.block_h * (row_bytes(chunks) + 2 * v_bytes(chunks))
    return replace(row, expected_shared=max(row.expected_shared, result if target.backend == "cuda" else 0))


@dataclass(frozen=True)
class PlainRow:
    """A row that is not quantised, as a program holds it.

    Attributes:
        chunks: its blocks, in column order.
    """

    chunks: tuple[Chunk, ...]

    def row(
        self, tile: Tile, target: Target, reason: str, max_heads: int | None = None, max_tokens: int | None = None
    ) -> TileRow:
        """A row of the tile table, `make_row`."""
        return make_row(tile, self.chunks, target, reason, max_heads, max_tokens)

    def untuned(self, num_heads: int, target: Target) -> tuple[TileRow, ...]:
        """Rows of an untuned target, `default_rows`."""
        return default_rows(num_heads, self.chunks, target)

    def unaligned_tile(self, target: Target) -> Tile:
        """Return the tile for calls with unaligned rows or indices."""
        return unaligned_tile(self.chunks, target)

    def unaligned_row(self, tile: Tile, target: Target, reason: str = UNALIGNED_REASON) -> TileRow:
        """The row of such a tile, `unaligned_row`."""
        return unaligned_row(tile, self.chunks, target, reason)
