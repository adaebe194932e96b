"""Numbers of the Hopper kernels, which the Gluon back end emits: what they hold, and which calls run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.layout import CacheLayout
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
# A thread of the right and of the copying warpgroup; the left one has the rest. No spill in a loop, Triton 3.6 and 3.7.
REGISTERS = (216, 56)
DEQUANTISING_REGISTERS = (192, 104)
LOAD_BYTES = 16  # of a load, at which rows, scales and tails begin
SCALE_TILE = 128


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


def reads_cache(layout: CacheLayout, extra_layout: CacheLayout | None) -> bool:
    """Whether the kernel that dequantises K reads such a cache: one of e4m3 with an fp32 scale for 128 lanes."""
    latent, *tail = layout.data
    scales = layout.scales_of(latent)
    return (
        extra_layout is None
        and not layout.planar
        and (latent.dtype, latent.count) == ("e4m3", D_V)
        and len(tail) == 1  # without a tail ptxas spills in the loop of the warpgroup that dequantises
        and (tail[0].dtype, tail[0].offset % LOAD_BYTES) == ("bf16", 0)
        and scales is not None
        and (scales.dtype, scales.tile, scales.interleave) == ("fp32", SCALE_TILE, 1)
        and (latent.offset, scales.offset % LOAD_BYTES, layout.row_bytes % LOAD_BYTES) == (0, 0, 0)
    )


def make_hopper(spec: Spec, rows: Sequence[HopperRow] | None = None, *, dequantises: bool = False) -> HopperPlan | None:
    """The plan of a Hopper kernel of a spec; None where its back end or its dims leave it out.

    Args:
        spec: the spec.
        rows: which calls run it, as a sweep found; None: the default.
        dequantises: it reads a quantised cache, `reads_cache`.
    """
    if spec.backend == "triton" or refusal(spec) is not None:
        return None
    dims = spec.model
    d_tail = dims.kv_lora_rank + dims.qk_rope_head_dim - D_V
    if spec.backend == "gluon":
        rows = (HopperRow(None, 1),)
    lanes = D_V + d_tail
    weights = BLOCK_H * BLOCK_N * (1 if d_tail else 2)
    tiles = ((BLOCK_H + 2 * BLOCK_N) * lanes + weights) * ITEMSIZE
    # Maxima and sums of two warpgroups; or maxima alone, and an offset and four scales of three bytes a key.
    tables = 2 * BLOCK_H * 4 + 2 * BLOCK_N * (4 + 3 * D_V // SCALE_TILE) if dequantises else 4 * BLOCK_H * 4
    # Scores: before the loop, at its end, and on the right; weights with V: two blocks in the loop and after it.
    products = 3 * lanes // PRODUCT_DEPTH + 3 * 2 * BLOCK_N // PRODUCT_DEPTH
    return HopperPlan(
        block_h=BLOCK_H,
        block_n=BLOCK_N,
        d_half=D_V // 2,
        d_tail=d_tail,
        registers=DEQUANTISING_REGISTERS if dequantises else REGISTERS,
        rows=tuple(rows or DEFAULT_ROWS),
        expected_shared=tiles + tables,
        expected_products=products,
    )
