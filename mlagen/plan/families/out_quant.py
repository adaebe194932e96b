"""Numbers of the kernel that rotates attention's output back and quantises it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlagen.plan.family import Family
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import QUANT_BLOCK, Spec

OUT_QUANT = "fused_inv_rope_fp8_quant"
WORD = 4  # scales of a packed word


@dataclass(frozen=True)
class OutQuantTile:
    """Launch parameters: a program takes block_t tokens of block_h heads.

    Attributes:
        most: most rows, pairs of a token and a head, of calls that take the tile; None: all others.
        block_t: tokens, a power of two.
        block_h: heads, a power of two.
        num_warps: warps a program.
    """

    most: int | None
    block_t: int
    block_h: int
    num_warps: int


# A warp with two rows reaches the rate of memory. A call of few rows has a program for each.
TILES = (OutQuantTile(2048, 1, 1, 1), OutQuantTile(None, 2, 1, 1))


@dataclass(frozen=True, kw_only=True)
class OutQuantPlan(Family):
    """Numbers of the kernel.

    Attributes:
        columns: of a head.
        rope: the last of them, which RoPE rotated.
        tiles: by number of rows, ascending.
    """

    NAME: ClassVar = "out_quant"
    WRAPPERS: ClassVar = {OUT_QUANT: Op((), {"out": None, "scales": None})}

    columns: int
    rope: int
    tiles: tuple[OutQuantTile, ...]

    @property
    def packs(self) -> bool:
        """Whether the scales of a head fill words."""
        return self.columns % (WORD * QUANT_BLOCK) == 0

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> OutQuantPlan | None:
        """Derives the numbers; see `Family`."""
        if not cls.wanted(spec):
            return None
        return cls(columns=spec.model.v_head_dim, rope=spec.model.qk_rope_head_dim, tiles=TILES)
