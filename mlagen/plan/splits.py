"""Numbers of the splits of a call's indices and of the kernel that merges them, for all attention families."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.layout.layout import MOST_LOADED
from mlagen.plan.targets import WARP_SIZE
from mlagen.plan.tiles.chunks import next_power_of_2

SPLIT_OVERHEAD = 2
COMBINE_OVERHEAD = 4
SM90_COMBINE = 1024  # time of one combine, in rows like MEASURED_ROW written and read, 1.3 ns each on an H100
MAX_SPLITS = 128
BATCH_INVARIANT_SPLIT = 512  # a multiple of every block_n
WORKSPACE_BYTES = 256 << 20
COMBINE_SPLITS = (2, 4, 8, 16, 32)
COMBINE_FLOATS = 2048  # of partials that a program of the merge holds at a time


@dataclass(frozen=True)
class PartialRow:
    """A row of partials: the accumulator of V of one head and one split.

    Attributes:
        dtype: "fp32", "bf16" or "fp16".
        d_v: columns of V.
    """

    dtype: str
    d_v: int

    @property
    def rounds(self) -> bool:
        """Whether an accumulator loses bits on its way to the merge."""
        return self.dtype != "fp32"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return {"fp32": 4, "bf16": 2, "fp16": 2}[self.dtype]

    @property
    def scaled(self) -> bool:
        """Whether a row is stored divided by a power of two of its own: fp16 has too few exponents for all rows."""
        return self.dtype == "fp16"

    @property
    def stats(self) -> int:
        """Floats of a row besides its accumulator: its maximum, its sum and, if it is scaled, its power of two."""
        return 3 if self.scaled else 2

    @property
    def columns(self) -> int:
        """Columns from a row to the next: rounded rows are padded: all begin at 16 bytes, and statistics at 4."""
        group = MOST_LOADED // self.itemsize if self.rounds else 1
        return -(-self.d_v // group) * group

    @property
    def floats(self) -> int:
        """Floats of the workspace that a row takes without its statistics."""
        return self.columns * self.itemsize // 4

    @property
    def alignment(self) -> int:
        """Bytes at which every row begins."""
        return MOST_LOADED if self.floats % 4 == 0 else 4

    @property
    def thread_columns(self) -> int:
        """Columns that a thread loads at a time."""
        return MOST_LOADED // self.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of a row with its statistics."""
        return 4 * (self.floats + self.stats)

    def weighs(self, cost: int) -> int:
        """Convert a cost from rows like MEASURED_ROW to rows like this one. A row costs the bytes that it moves."""
        return cost * MEASURED_ROW.bytes // self.bytes


MEASURED_ROW = PartialRow("fp32", 512)  # of the kernels that were timed for the costs, which are counted in rows


@dataclass(frozen=True)
class CombineTile:
    """Launch parameters of the kernel that merges splits.

    Attributes:
        block_s: splits it adds at a time.
        block_d: columns of V a program holds.
        d_blocks: programs a row.
        num_warps: warps a program.
    """

    block_s: int
    block_d: int
    d_blocks: int
    num_warps: int


@dataclass(frozen=True)
class SplitsPlan:
    """Numbers of the splits.

    Attributes:
        split_overhead, combine_overhead: fixed cost of a program and of a merge, in steps of BLOCK_N indices.
        partials: a row of partials.
        sm90_combine: cost of a merge of the sm90 kernels' splits, in rows of partials.
        max_splits: most splits a call is cut into.
        batch_invariant_split: indices of a split in batch-invariant mode.
        workspace_bytes: largest workspace. A call that needs more runs in batches.
        combine: tiles of the combine kernel; a call takes the first that holds all its splits, or the last.
        combine_masked: a row's last program of some tile is not full.
    """

    partials: PartialRow
    split_overhead: int
    combine_overhead: int
    sm90_combine: int
    max_splits: int
    batch_invariant_split: int
    workspace_bytes: int
    combine: tuple[CombineTile, ...]
    combine_masked: bool


def make_combine_tile(partials: PartialRow, block_s: int) -> CombineTile:
    """The merge's tile for `block_s` splits at a time: fewer columns of V for more of them."""
    block_d = min(COMBINE_FLOATS // block_s, next_power_of_2(partials.d_v))
    return CombineTile(
        block_s=block_s,
        block_d=block_d,
        d_blocks=-(-partials.d_v // block_d),
        # Each of these warps has all splits of its columns, so that no sum crosses warps.
        num_warps=max(1, block_d // (partials.thread_columns * WARP_SIZE)),
    )


def make_splits(partials: PartialRow, fewest_columns: int = 1) -> SplitsPlan:
    """The numbers for such rows of partials. A program of the merge holds at least `fewest_columns`."""
    every = (make_combine_tile(partials, block_s) for block_s in COMBINE_SPLITS)
    combine = tuple(tile for tile in every if tile.block_d >= fewest_columns)
    return SplitsPlan(
        partials=partials,
        split_overhead=SPLIT_OVERHEAD,
        combine_overhead=COMBINE_OVERHEAD,
        sm90_combine=partials.weighs(SM90_COMBINE),
        max_splits=MAX_SPLITS,
        batch_invariant_split=BATCH_INVARIANT_SPLIT,
        workspace_bytes=WORKSPACE_BYTES,
        combine=combine,
        combine_masked=any(partials.d_v % tile.block_d for tile in combine),
    )
