"""Numbers of the splits of a call's indices and of the kernel that merges them, for all attention families."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlagen.plan.chunks import next_power_of_2
from mlagen.plan.tiles import TileRow

SPLIT_OVERHEAD = 2
MERGE_OVERHEAD = 4
MAX_SPLITS = 128
BATCH_INVARIANT_SPLIT = 512
WORKSPACE_BYTES = 256 << 20
MERGE_BLOCK_S = 16
MERGE_BLOCK_D = 128
MERGE_NUM_WARPS = 2


@dataclass(frozen=True)
class MergePlan:
    """Numbers of the kernel that merges splits.

    Attributes:
        block_s: splits it adds at a time.
        block_d: lanes of V a program holds.
        d_blocks: programs a row.
        masked: the last of them is not full.
        num_warps: warps a program.
        expected_shared: bytes of shared memory, for the reductions over splits.
    """

    block_s: int
    block_d: int
    d_blocks: int
    masked: bool
    num_warps: int
    expected_shared: int


@dataclass(frozen=True)
class SplitsPlan:
    """Numbers of the splits.

    Attributes:
        split_overhead, merge_overhead: fixed cost of a program and of a merge, in steps of BLOCK_N indices.
        max_splits: most splits a call is cut into.
        batch_invariant_split: indices a split where bounds depend on the row alone.
        workspace_bytes: size from which a call goes through its workspace in pieces.
        merge: the merge kernel's.
        partial_alignment: bytes at which each row of the fp32 partials begins.
    """

    split_overhead: int
    merge_overhead: int
    max_splits: int
    batch_invariant_split: int
    workspace_bytes: int
    merge: MergePlan
    partial_alignment: int


def make_splits(d_v: int, rows: Iterable[TileRow]) -> SplitsPlan:
    """The numbers for V of `d_v` lanes and tile tables of these rows."""
    block_d = min(MERGE_BLOCK_D, next_power_of_2(d_v))
    merge = MergePlan(
        block_s=MERGE_BLOCK_S,
        block_d=block_d,
        d_blocks=-(-d_v // block_d),
        masked=d_v % block_d != 0,
        num_warps=MERGE_NUM_WARPS,
        expected_shared=MERGE_NUM_WARPS * block_d * 4,
    )
    return SplitsPlan(
        split_overhead=SPLIT_OVERHEAD,
        merge_overhead=MERGE_OVERHEAD,
        max_splits=MAX_SPLITS,
        batch_invariant_split=max(BATCH_INVARIANT_SPLIT, *(row.tile.block_n for row in rows)),
        workspace_bytes=WORKSPACE_BYTES,
        merge=merge,
        partial_alignment=16 if d_v % 4 == 0 else 4,
    )
