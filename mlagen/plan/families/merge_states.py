"""Numbers of the kernels that merge normalised partial results, which memory bounds; with few rows, latency."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from mlagen.plan.family import Family
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.targets import SLOW_MEMORY
from mlagen.plan.tiles.chunks import next_power_of_2
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import Spec
from mlagen.work import ITEMSIZE

FEW_UP_TO = 8192  # (token, head) pairs; up to this many, a program's are heads of one token, so that all have rows
ELEMENTS = 1024  # of one part that a program takes at a time: 16 bytes a thread in bf16
LSE_TOKENS = 8  # tokens of a head; their LSE fill a sector of memory, 32 bytes
PARTS = 4  # parts that a program takes at a time where there are any number
NUM_WARPS = 4
# Of two parts that L2 does not hold, over faster memory: half of the warps, so that a thread has twice the bytes under
# way, and fewer tokens, so that a program reads longer runs of memory.
CACHED_BYTES = 48 << 20  # of both parts and the result, in an L2 of 50 MB
FAST_TOKENS, FAST_WARPS = 2, 2


@dataclass(frozen=True)
class PartsTile:
    """Launch parameters of a merge: a program holds block_t tokens of block_h heads, block_p parts at a time."""

    block_t: int
    block_h: int
    block_p: int
    num_warps: int


@dataclass(frozen=True)
class MergeStatesRow:
    """Tiles of one length of values.

    Attributes:
        d_v: columns of a value.
        block_d: width of the block that holds them, a power of two.
        few, many, fast: tiles of the merge of two parts, for calls of at most FEW_UP_TO rows, of more, and of more than
            cached_rows over memory of more than SLOW_MEMORY.
        parts: tile of the merge of any number of parts.
    """

    d_v: int
    block_d: int
    few: PartsTile
    many: PartsTile
    fast: PartsTile
    parts: PartsTile

    @property
    def cached_rows(self) -> int:
        """(token, head) pairs of a call that L2 holds."""
        return CACHED_BYTES // (3 * ITEMSIZE * self.d_v)

    @property
    def masked(self) -> bool:
        """Whether the block is wider than its columns."""
        return self.block_d > self.d_v


@dataclass(frozen=True, kw_only=True)
class MergeStatesPlan(Family):
    """Numbers of the merge kernels.

    Attributes:
        rows: by length of a value, ascending.
        few_up_to: (token, head) pairs of the largest call that takes the tile for few.
        slow_memory: GB/s of the fastest memory that takes the tile for many.
    """

    NAME: ClassVar = "merge_states"
    WRAPPERS: ClassVar = {
        "merge_attn_states": Op(("output", "output_lse")),
        "merge_attn_parts": Op((), {"out": "out", "output_lse": "output_lse"}),
    }

    rows: tuple[MergeStatesRow, ...]
    few_up_to: int
    slow_memory: int

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> MergeStatesPlan | None:
        """Derives the numbers; parts may be of multi-head attention or over latent rows: of either that it knows."""
        if not cls.wanted(spec):
            return None
        dims = (spec.multi_head.v_head_dim if spec.multi_head else 0, spec.model.v_head_dim)
        return make_merge_states_plan(columns for columns in dims if columns)

    @property
    def masked(self) -> bool:
        """Whether the block of any length is wider than its columns."""
        return any(row.masked for row in self.rows)


def _tile(block_d: int, tokens: int, parts: int, num_warps: int = NUM_WARPS) -> PartsTile:
    """The tile of ELEMENTS of each part at a time, of at most `tokens` tokens."""
    rows = max(1, ELEMENTS // block_d)
    block_t = min(tokens, rows)
    return PartsTile(block_t, rows // block_t, parts, num_warps)


def make_merge_states_plan(value_dims: Iterable[int]) -> MergeStatesPlan:
    """The numbers for values of these lengths; a program holds whole values, so that it needs their LSE once."""
    rows = []
    for d_v in sorted(set(value_dims)):
        block_d = next_power_of_2(d_v)
        rows.append(
            MergeStatesRow(
                d_v,
                block_d,
                few=_tile(block_d, 1, 1),
                many=_tile(block_d, LSE_TOKENS, 1),
                fast=_tile(block_d, FAST_TOKENS, 1, FAST_WARPS),
                parts=_tile(block_d, LSE_TOKENS, PARTS),
            )
        )
    return MergeStatesPlan(rows=tuple(rows), few_up_to=FEW_UP_TO, slow_memory=SLOW_MEMORY)
