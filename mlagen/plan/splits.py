"""Numbers of the splits of a call's indices and of the kernel that merges them, for all attention families."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlagen.plan.chunks import next_power_of_2
from mlagen.plan.tiles import TileRow

SPLIT_OVERHEAD = 2
MERGE_OVERHEAD = 4
HOPPER_MERGE = 1024  # in what a row of the Hopper kernels' partials costs on its way out and in, 1.3 ns on an H100
MAX_SPLITS = 128
BATCH_INVARIANT_SPLIT = 512
WORKSPACE_BYTES = 256 << 20
MERGE_SPLITS = (2, 4, 8, 16, 32)
MERGE_FLOATS = 2048  # of partials that a program of the merge holds at a time
MERGE_THREAD_LANES = 4  # 16 bytes
MERGE_WARP_SIZE = 32  # of the warps that it is cut for: each has all splits of its lanes, so that no sum crosses warps


@dataclass(frozen=True)
class MergeTile:
    """Launch parameters of the kernel that merges splits.

    Attributes:
        block_s: splits it adds at a time.
        block_d: lanes of V a program holds.
        d_blocks: programs a row.
        num_warps: warps a program.
    """

    block_s: int
    block_d: int
    d_blocks: int
    num_warps: int

    def expected_shared(self, warp_size: int) -> int:
        """Bytes of shared memory, for sums over splits where more than one warp has the same lanes."""
        sharing = self.num_warps // max(1, self.block_d // (MERGE_THREAD_LANES * warp_size))
        return 4 * sharing * self.block_d if sharing > 1 else 0


@dataclass(frozen=True)
class SplitsPlan:
    """Numbers of the splits.

    Attributes:
        split_overhead, merge_overhead: fixed cost of a program and of a merge, in steps of BLOCK_N indices.
        hopper_merge: cost of a merge of the Hopper kernels' splits, in rows of partials.
        max_splits: most splits a call is cut into.
        batch_invariant_split: indices a split where bounds depend on the row alone.
        workspace_bytes: size from which a call goes through its workspace in pieces.
        merge: tiles of the merge kernel; a call takes the first that holds all its splits, or the last.
        merge_masked: a row's last program of some tile is not full.
        partial_alignment: bytes at which each row of the fp32 partials begins.
    """

    split_overhead: int
    merge_overhead: int
    hopper_merge: int
    max_splits: int
    batch_invariant_split: int
    workspace_bytes: int
    merge: tuple[MergeTile, ...]
    merge_masked: bool
    partial_alignment: int


def make_merge_tile(d_v: int, block_s: int) -> MergeTile:
    """The merge's tile for `block_s` splits at a time: fewer lanes of V for more of them."""
    block_d = min(MERGE_FLOATS // block_s, next_power_of_2(d_v))
    return MergeTile(
        block_s=block_s,
        block_d=block_d,
        d_blocks=-(-d_v // block_d),
        num_warps=max(1, block_d // (MERGE_THREAD_LANES * MERGE_WARP_SIZE)),
    )


def make_splits(d_v: int, rows: Iterable[TileRow]) -> SplitsPlan:
    """The numbers for V of `d_v` lanes and tile tables of these rows."""
    merge = tuple(make_merge_tile(d_v, block_s) for block_s in MERGE_SPLITS)
    return SplitsPlan(
        split_overhead=SPLIT_OVERHEAD,
        merge_overhead=MERGE_OVERHEAD,
        hopper_merge=HOPPER_MERGE,
        max_splits=MAX_SPLITS,
        batch_invariant_split=max(BATCH_INVARIANT_SPLIT, *(row.tile.block_n for row in rows)),
        workspace_bytes=WORKSPACE_BYTES,
        merge=merge,
        merge_masked=any(d_v % tile.block_d for tile in merge),
        partial_alignment=16 if d_v % 4 == 0 else 4,
    )
