"""Numbers of the Hopper kernels, which the Gluon back end emits: what they hold, and which calls run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.plan.tiles import Tile
from mlagen.spec import Spec
from mlagen.work import ITEMSIZE

HOPPER_TARGET = "sm90"
BLOCK_H = 64  # rows of a warpgroup's product
BLOCK_N = 64
D_V = 512  # two warpgroups' accumulators of 256 lanes fill their registers
D_TAILS = (0, 64)  # lanes of K behind V for which shared memory has room
PRODUCT_DEPTH = 16  # lanes that one wgmma of 16-bit operands multiplies
WARPS = 4  # of the program's first warpgroup, which is what a launch asks for
# A thread of the right and of the copying warpgroup; the left one has the rest. No spill in a loop, Triton 3.6 to 3.9.
REGISTERS = (216, 56)


@dataclass(frozen=True)
class HopperRow:
    """Which calls of up to so many heads run the Hopper kernel: those of `min_tokens` tokens and more; None: none."""

    max_heads: int | None
    min_tokens: int | None


# Untuned: from where dsv32 gains on an H100. A few heads leave most of a tile empty; few tokens need many splits.
DEFAULT_ROWS = (HopperRow(16, None), HopperRow(32, 16), HopperRow(64, 4), HopperRow(None, 2))


@dataclass(frozen=True)
class HopperPlan:
    """Numbers of a Hopper kernel.

    Attributes:
        block_h: heads a program holds.
        block_n: indices a block; a step takes two.
        d_half: lanes of V that a warpgroup holds.
        d_tail: lanes of K behind V.
        registers: of a thread of the right and of the copying warpgroup.
        rows: which calls run it, by heads, most last.
        expected_shared: bytes of shared memory a program is expected to need.
        expected_products: wgmma instructions in its code.
    """

    block_h: int
    block_n: int
    d_half: int
    d_tail: int
    registers: tuple[int, int]
    rows: tuple[HopperRow, ...]
    expected_shared: int
    expected_products: int

    @property
    def step(self) -> int:
        """Indices a step."""
        return 2 * self.block_n

    @property
    def tile(self) -> Tile:
        """The kernel as the choice of splits sees it: a program a multiprocessor, which pipelines by itself."""
        return Tile(self.block_h, self.step, WARPS, 1, True)


def refusal(spec: Spec) -> str | None:
    """Why the Hopper kernels cannot be emitted for a spec; None if they can."""
    dims = spec.model
    tail = dims.kv_lora_rank + dims.qk_rope_head_dim - dims.v_head_dim
    if HOPPER_TARGET not in spec.targets:
        return f"targets lack {HOPPER_TARGET}, on which alone it runs"
    if dims.v_head_dim != D_V:
        return f"model.v_head_dim is {dims.v_head_dim}, and it takes {D_V}"
    if tail not in D_TAILS:
        return f"a row has {tail} lanes behind V's, and it takes {' or '.join(map(str, D_TAILS))}"
    return None


def make_hopper(spec: Spec, rows: Sequence[HopperRow] | None = None) -> HopperPlan | None:
    """The plan of the Hopper kernels of a spec; None where its back end or its dims leave them out.

    Args:
        spec: the spec.
        rows: which calls run them, as a sweep found; None: the default.
    """
    if spec.backend == "triton" or refusal(spec) is not None:
        return None
    dims = spec.model
    d_tail = dims.kv_lora_rank + dims.qk_rope_head_dim - D_V
    if spec.backend == "gluon":
        rows = (HopperRow(None, 1),)
    lanes = D_V + d_tail
    weights = BLOCK_H * BLOCK_N * (1 if d_tail else 2)
    tiles = (BLOCK_H + 2 * BLOCK_N) * lanes + weights
    # Scores: before the loop, at its end, and on the right; weights with V: two blocks in the loop and after it.
    products = 3 * lanes // PRODUCT_DEPTH + 3 * 2 * BLOCK_N // PRODUCT_DEPTH
    return HopperPlan(
        block_h=BLOCK_H,
        block_n=BLOCK_N,
        d_half=D_V // 2,
        d_tail=d_tail,
        registers=REGISTERS,
        rows=tuple(rows or DEFAULT_ROWS),
        expected_shared=tiles * ITEMSIZE + 4 * BLOCK_H * 4,
        expected_products=products,
    )
