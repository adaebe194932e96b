"""Numbers of the index kernels, which memory bounds; with few tokens, latency. Measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlagen.plan.family import Family
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import Spec

ROW_MULTIPLE = 128  # sparse prefill kernels require a multiple of this many indices
FEW_TOKENS = 2048
SPLIT_TOKENS = 16  # with this many or fewer, a multiprocessor waits for a single program's loads
COMBINE_BLOCK_T = 16
COMBINE_NUM_WARPS = 4
COMBINE_COMPACT_BLOCK_T = 4  # a row a warp: of 16 tokens, sm90 kernels hold 242 registers


@dataclass(frozen=True)
class IndicesTile:
    """Launch parameters of the kernel that maps a token's indices.

    Attributes:
        block_n: indices that a program takes at a time.
        num_warps: warps a program.
    """

    block_n: int
    num_warps: int

    @property
    def expected_shared(self) -> int:
        """Bytes of shared memory, through which the warps add their counts; one alone needs none."""
        return 4 * self.num_warps if self.num_warps > 1 else 0


@dataclass(frozen=True)
class IndicesTileRow:
    """A row of the tile table: the tile of calls of at most so many tokens and indices a token; None: any number."""

    max_tokens: int | None
    max_indices: int | None
    tile: IndicesTile


@dataclass(frozen=True, kw_only=True)
class IndicesPlan(Family):
    """Numbers of the index kernels.

    Attributes:
        tiles: the tile table, which holds any call by its last row.
        unaligned: the tile of calls with rows that do not begin at 16 bytes.
        options: the tile of calls that put slots in front, and of those for pages apart or for one of several ranks.
        split: the tile of calls of few tokens that ask for no counts, where many programs share a token's indices.
        split_tokens: most tokens of such a call.
        combine_block_t: tokens a program of the kernel that combines top-k and window indices.
        combine_num_warps: its warps a program.
        combine_compact_block_t: tokens a program of the kernel that combines without holes, which walks whole rows.
        combine_expected_shared: bytes of shared memory that it needs to pass each token's findings from thread to row.
        row_multiple: a combined row's length is rounded up to a multiple of this; columns a program takes.
    """

    NAME: ClassVar = "indices"
    WRAPPERS: ClassVar = {
        "compute_global_topk_indices_and_lens": Op((), {"slots": None, "lens": None}),
        "combine_topk_swa_indices": Op((), {"indices": "out", "lens": "out"}),
        "triton_convert_req_index_to_global_index": Op(
            ("valid_counts_out",), {"slots": "out"}, ("return_valid_counts",)
        ),
    }

    tiles: tuple[IndicesTileRow, ...]
    unaligned: IndicesTile
    options: IndicesTile
    split: IndicesTile
    split_tokens: int
    combine_block_t: int
    combine_num_warps: int
    combine_compact_block_t: int
    combine_expected_shared: int
    row_multiple: int

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> IndicesPlan | None:
        """Derives the numbers; see `Family`."""
        return make_index_plan() if cls.wanted(spec) else None


def make_index_plan() -> IndicesPlan:
    """The numbers, the same for every model.

    A program maps one token, or a part of it where it need not count. With few tokens it takes the row in one step, so
    that all loads are under way together; with many it has few warps of 8 indices a thread, so that other programs run
    while it waits.
    """
    return IndicesPlan(
        tiles=(
            IndicesTileRow(FEW_TOKENS, 512, IndicesTile(512, 4)),
            IndicesTileRow(FEW_TOKENS, 1024, IndicesTile(1024, 4)),
            IndicesTileRow(FEW_TOKENS // 2, None, IndicesTile(2048, 8)),
            IndicesTileRow(None, 1024, IndicesTile(512, 2)),
            IndicesTileRow(None, None, IndicesTile(1024, 4)),
        ),
        unaligned=IndicesTile(512, 4),
        options=IndicesTile(512, 4),
        split=IndicesTile(128, 1),
        split_tokens=SPLIT_TOKENS,
        combine_block_t=COMBINE_BLOCK_T,
        combine_num_warps=COMBINE_NUM_WARPS,
        combine_compact_block_t=COMBINE_COMPACT_BLOCK_T,
        combine_expected_shared=4 * COMBINE_BLOCK_T,
        row_multiple=ROW_MULTIPLE,
    )
