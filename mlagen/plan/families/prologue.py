"""Numbers of the kernels in front of attention: norms, RoPE and the insertion of rows, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlagen.plan.family import Family
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.tiles.chunks import Chunk, make_chunks, next_power_of_2
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import Spec
from mlagen.work import ITEMSIZE

OVER_HEADS = ("fused_deepseek_v4_qnorm_rope_kv_insert", "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert")
OVER_ROPE = "concat_and_cache_mla_rope_fused"
ROPE_BLOCK_T = 2  # rows of the cache that a program takes beside programs of RoPE columns
HEADS_BYTES = 4096  # of Q that a program of one warp takes
MOST_HEADS = 16
FEW_TOKENS = 16  # most tokens of a call that is bound by the latency of a program


@dataclass(frozen=True)
class PrologueTile:
    """Launch parameters of a prologue. A program is one warp.

    Attributes:
        block_t: rows of the cache that a program takes.
        block_h: heads of a token that another takes.
    """

    block_t: int
    block_h: int


@dataclass(frozen=True, kw_only=True)
class ProloguePlan(Family):
    """Numbers of the kernels in front of attention.

    Attributes:
        caches: the caches; rows go to the first.
        latent: blocks of Q's columns that RoPE leaves as they are.
        heads_tiles: the tiles of calls that take whole heads, few tokens and then many; None without a wrapper of them.
        rope_tile: the tile of calls that take Q's RoPE columns only; None likewise.
        few_tokens: most tokens of a call that has few.
    """

    NAME: ClassVar = "prologue"
    WRAPPERS: ClassVar = {
        OVER_HEADS[0]: Op(("q", "k_cache")),
        OVER_HEADS[1]: Op(("k_cache",), {"q": "out"}),
        OVER_ROPE: Op(("q_pe", "k_pe", "kv_c", "kv_cache")),
    }

    caches: Caches
    latent: tuple[Chunk, ...]
    heads_tiles: tuple[PrologueTile, PrologueTile] | None
    rope_tile: PrologueTile | None
    few_tokens: int

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> ProloguePlan | None:
        """Derives the numbers; see `Family`."""
        if caches is None or not cls.wanted(spec):
            return None
        dims, columns = spec.model, spec.model.d_qk

        def tile(columns: int, block_t: int) -> PrologueTile:
            fitting = max(1, HEADS_BYTES // ITEMSIZE // next_power_of_2(columns))
            return PrologueTile(block_t, min(fitting, MOST_HEADS, next_power_of_2(dims.num_heads)))

        return cls(
            caches=caches,
            latent=make_chunks([("nope", dims.kv_lora_rank)], 0),
            heads_tiles=(PrologueTile(1, 1), tile(columns, 1)) if {*OVER_HEADS} & {*spec.wrappers} else None,
            rope_tile=tile(dims.qk_rope_head_dim, ROPE_BLOCK_T) if OVER_ROPE in spec.wrappers else None,
            few_tokens=FEW_TOKENS,
        )
