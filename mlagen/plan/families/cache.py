"""Numbers of the kernels that write and gather cached rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlagen.plan.family import Family
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import Spec

NUM_WARPS = 1
BLOCK_T = 2  # more of the small programs are under way at once, and none waits for another of its warps
FEW_TOKENS = 8
# A multiprocessor's programs of a writer or an index kernel that may begin early: with 4,096 tokens of V4 19 % were won
# on an H200, with 32,768 25 % lost.
PDL_MAX_PROGRAMS = 16
GATHER_PROGRAMS = 32  # programs of one warp, of 64 registers a thread, that fit a multiprocessor
LOOKUP_T = 32  # a warp's lanes


@dataclass(frozen=True)
class GatherTile:
    """Launch parameters of a gather.

    Attributes:
        block_t: tokens a program copies at a time.
        num_warps: warps a program.
    """

    block_t: int
    num_warps: int


@dataclass(frozen=True, kw_only=True)
class CachePlan(Family):
    """Numbers of the cache kernels.

    Attributes:
        caches: the caches that they write and read.
        block_t: tokens a program of a writer.
        num_warps: its warps a program.
        gather_tile: the tile of gathers.
        few_tile: the tile of gathers of few tokens, where the time of one program counts.
        few_tokens: most tokens of such a gather for each multiprocessor of the device.
        gather_programs: most programs of a gather for each multiprocessor of the device.
        lookup_t: tokens that a program of a gather looks up at once; a multiple of block_t.
    """

    NAME: ClassVar = "cache"
    WRAPPERS: ClassVar = {
        "concat_and_cache_mla": Op(("kv_cache",)),
        "quantize_and_insert_k_cache": Op(("k_cache",)),
        "dequantize_and_gather_k_cache": Op(("out",)),
        "gather_and_maybe_dequant_cache": Op(("dst",)),
    }

    caches: Caches
    block_t: int
    num_warps: int
    gather_tile: GatherTile
    few_tile: GatherTile
    few_tokens: int
    gather_programs: int
    lookup_t: int

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> CachePlan | None:
        """Derives the numbers, the same for every layout."""
        if caches is None or not cls.wanted(spec):
            return None
        return cls(
            caches=caches,
            block_t=BLOCK_T,
            num_warps=NUM_WARPS,
            gather_tile=GatherTile(block_t=2, num_warps=1),
            few_tile=GatherTile(block_t=1, num_warps=2),
            few_tokens=FEW_TOKENS,
            gather_programs=GATHER_PROGRAMS,
            lookup_t=LOOKUP_T,
        )

    def describe(self) -> Iterator[str]:
        """Yield lines about its numbers; see `Family`."""
        yield f"cache writer: {self.block_t} tokens per program"
