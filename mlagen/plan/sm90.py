"""Numbers of the sm90 kernels, which the Gluon back end emits: what they hold, and which calls run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlagen.layout import CacheLayout
from mlagen.plan.splits import PartialRow
from mlagen.plan.tiles import Tile
from mlagen.plan.tritons import Minor
from mlagen.spec import DenseAttention, Spec
from mlagen.work import ITEMSIZE

Split = tuple[int, int]


@dataclass(frozen=True)
class Registers:
    """Registers a thread of two of a program's three warpgroups; the third has the rest of the register file.

    Attributes:
        split: under every Triton that `under` does not name; of WG1 and the producer, or with swap-AB of WG0 and WG1.
        under: other splits under minor versions of Triton with which `split` spills more in loops.
    """

    split: Split
    under: tuple[tuple[Minor, Split], ...] = ()


SM90 = "sm90"
BLOCK_H = 64  # rows of a warpgroup's product
BLOCK_N = 64
D_V = 512  # two warpgroups' accumulators of 256 columns fill their registers
D_TAILS = (0, 64)  # columns of K behind V for which shared memory has room
PRODUCT_DEPTH = 16  # columns that one wgmma of 16-bit operands multiplies
WARPS = 4  # of the program's first warpgroup, which is what a launch asks for
# What spills under which Triton, and which splits were tried: docs/tritons.md.
SPARSE_FWD_REGISTERS = {64: Registers((208, 56)), 0: Registers((208, 56), (((3, 9), (216, 64)),))}  # by D_TAILS
SHARED_REGISTERS = {  # by tokens a group
    2: Registers((208, 56), (((3, 9), (216, 56)),)),
    4: Registers((208, 56), (((3, 9), (208, 48)),)),
}
DENSE_DECODE_REGISTERS = Registers((216, 48), (((3, 9), (224, 48)),))
DEQUANTISING_REGISTERS = {
    64: Registers((192, 96)),
    0: Registers((192, 96), (((3, 8), (192, 88)), ((3, 9), (200, 104)))),
}
V4_REGISTERS = Registers((192, 112))
V41_REGISTERS = Registers((192, 112))
# A step of all programs at once, and its rows of K from memory, in what MEASURED_ROW costs on its way out and in:
# fitted to 80 timings on an H100, and to 60 of fp8_ds_mla on an H200.
COST = (2560, 40)
DEQUANTISING_COST = (3100, 23)
RESCALE_THRESHOLD_LOG2 = 7  # a row maximum may rise by so much before O is rescaled; P, rounded, is at most 2^8
SWIZZLED_COLUMNS = 64  # of 16 bits, a row of shared memory that wgmma reads
# Columns of a product, and the costs; splits that follow from these are the fastest of those measured, 8 to 128 tokens.
SWAP_AB_COSTS = {16: (1800, 20), 32: (2400, 20)}
SWAP_AB_K_L_STAGES = 3  # left halves of blocks of K beside two right ones; the kernel's text is written for as many
SWAP_AB_REGISTERS = Registers((232, 232), (((3, 9), (240, 232)),))
DENSE_FWD_BLOCK_N = (128, 64)  # most wanted first
DENSE_FWD_STAGES = 2
# By columns of V, and how K and V are addressed.
DENSE_FWD_REGISTERS = {
    (64, "pointers"): Registers((216, 72)),
    (64, "descriptors"): Registers((216, 72)),
    (128, "pointers"): Registers((216, 72)),
    (128, "descriptors"): Registers((216, 72), (((3, 8), (216, 80)),)),
    (256, "pointers"): Registers((224, 56), (((3, 8), (232, 56)),)),
    (256, "descriptors"): Registers((224, 56)),
}
DENSE_FWD_ACCUMULATORS = 192  # registers a thread for accumulators, scores and P, beside which the rest has room
DENSE_FWD_QUERIES = 1
DENSE_FWD_BARRIERS = 1024  # bytes for barriers and for what partitions pass
LOAD_BYTES = 16  # of a load, at which rows, scales and tails begin
SCALE_TILE = 128  # columns of an fp32 scale
V4_SCALE_TILE = 64  # columns of a ue8m0 scale
# Exponents of what fp16 tiles hold. Of a token's largest scale: the least, and the most, which times e4m3's 448 is less
# than 65504. Of the largest element of half a head of Q: the least, and the first too large.
FP16_SCALES = (-13, 7)
FP16_Q = (-10, 16)
V4_SCALES = 8  # bytes of a token in the second plane: seven scales and a pad
V41_RUNS = (("e4m3", D_V, "ue8m0", 32), ("e2m1", D_V, "e4m3", 16))  # a row's columns and scales, of either cache


def register_columns(columns: int) -> tuple[int, ...]:
    """Powers of two from 16 on below so many columns: a thread's registers of an accumulator that differ by so many."""
    return tuple(1 << bit for bit in range(4, (columns - 1).bit_length()))


@dataclass(frozen=True)
class Sm90Row:
    """Which calls of up to so many heads run the sm90 kernel: those of `min_tokens` tokens and more; None: none.

    Of dense attention heads are rows a KV head, and tokens are requests.
    """

    max_heads: int | None
    min_tokens: int | None


# Untuned: from where dsv32 gains on an H200 over rows, dsv4_pro over its caches, and dsv3's dense attention. A few
# heads leave most of a tile over a cache empty; few tokens need many splits.
DEFAULT_ROWS = (Sm90Row(16, 16), Sm90Row(32, 16), Sm90Row(None, 3))
DEQUANTISING_ROWS = (Sm90Row(16, 33), Sm90Row(32, 4), Sm90Row(64, 2), Sm90Row(None, 1))
DENSE_DECODE_ROWS = (Sm90Row(32, 5), Sm90Row(None, 1))


@dataclass(frozen=True)
class Sm90Plan:
    """Numbers of an sm90 kernel.

    Attributes:
        block_h: heads a program holds.
        block_n: indices a block; a step takes two.
        d_half: columns of V that a warpgroup holds.
        d_tail: columns of K behind V.
        registers: of a thread, by warpgroup.
        scale_columns: fp16 scales a key in shared memory; 0: it dequantises nothing.
        cost: of a step, and of its rows of K, as the choice of splits weighs them.
        rows: which calls run it, by heads, most last.
        expected_shared: bytes of shared memory a program is expected to need.
        split_shared: as many more where it stores splits.
        expected_products: wgmma instructions in its code.
        k_l_stages: left halves of blocks of K of which there is room.
        k_itemsize: bytes of a column of K in shared memory.
    """

    block_h: int
    block_n: int
    d_half: int
    d_tail: int
    registers: Registers
    scale_columns: int
    cost: tuple[int, int]
    rows: tuple[Sm90Row, ...]
    expected_shared: int
    split_shared: int
    expected_products: int
    k_l_stages: int = 2
    k_itemsize: int = ITEMSIZE

    @property
    def step(self) -> int:
        """Indices a step."""
        return 2 * self.block_n

    @property
    def d_k(self) -> int:
        """Columns of K."""
        return 2 * self.d_half + self.d_tail

    @property
    def most_page(self) -> int:
        """Keys of a page whose elements 32 bits count."""
        return (1 << 31) // self.d_k

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of K."""
        return self.block_n * self.d_k * self.k_itemsize

    @property
    def result_columns(self) -> tuple[int, ...]:
        """Columns by which a thread's registers of a warpgroup's accumulator differ, as it is stored: from 16 on."""
        return register_columns(self.d_half)

    @property
    def tile(self) -> Tile:
        """The kernel as the choice of splits sees it: a program a multiprocessor, which pipelines by itself."""
        return Tile(self.block_h, self.step, WARPS, 1, True)


def make_swap_ab(sm90: Sm90Plan, partials: PartialRow) -> tuple[Sm90Plan, ...]:
    """The plans of the sm90 kernel of few heads over rows, which stand in the columns of its products; fewest first.

    Args:
        sm90: of the one in whose place it runs.
        partials: a row of partials.
    """
    columns = 2 * sm90.d_half + sm90.d_tail
    of_v = 2 * sm90.d_half // BLOCK_H * (sm90.block_n // PRODUCT_DEPTH)
    plans = []
    for heads, cost in SWAP_AB_COSTS.items():
        extra = (SWAP_AB_K_L_STAGES - 2) * sm90.block_n * sm90.d_half
        tiles = ((heads + sm90.step) * columns + extra + 2 * sm90.block_n * heads) * ITEMSIZE
        statistics = (2 * WARPS + 6) * heads * 4  # largest scores by warps; maxima and sums of rows
        exponents = 2 * (WARPS + 1) * heads * 4  # by warps, and of rows
        plans.append(
            replace(
                sm90,
                block_h=heads,
                registers=SWAP_AB_REGISTERS,
                cost=(partials.weighs(cost[0]), partials.weighs(cost[1])),
                k_l_stages=SWAP_AB_K_L_STAGES,
                expected_shared=tiles + statistics,
                split_shared=exponents if partials.scaled else 0,
                expected_products=2 * (columns // PRODUCT_DEPTH + of_v),
            )
        )
    return tuple(plans)


@dataclass(frozen=True)
class DenseFwdSm90Plan:
    """Numbers of the sm90 kernel of multi-head attention.

    Attributes:
        block_m: rows that a warpgroup holds.
        block_n: keys a step.
        stages: steps of which K and V are in shared memory at once.
        registers: of a thread, by warpgroup.
        num_warps: of the program's first warpgroup.
        min_queries: from how many rows of its longest request on a call runs it.
        expected_shared: bytes of shared memory a program is expected to need.
        expected_products: wgmma instructions in its code.
    """

    block_m: int
    block_n: int
    stages: int
    registers: Registers
    num_warps: int
    min_queries: int
    expected_shared: int
    expected_products: int

    @property
    def rows(self) -> int:
        """Rows of a program: two warpgroups multiply."""
        return 2 * self.block_m


def make_dense_fwd_sm90(spec: Spec, shared_limit: int) -> DenseFwdSm90Plan | None:
    """The plan of the sm90 kernel of a spec's multi-head attention; None where its back end or its dims leave it out.

    Columns come in shared memory's swizzled runs of 64, and V's as one accumulator.
    """
    heads = spec.multi_head
    if heads is None or spec.backend == "triton" or SM90 not in spec.targets:
        return None
    d_qk, d_v = heads.qk_head_dim, heads.v_head_dim
    if d_qk % SWIZZLED_COLUMNS or (d_v, heads.addressing) not in DENSE_FWD_REGISTERS:
        return None
    for block_n in DENSE_FWD_BLOCK_N:
        keys = DENSE_FWD_STAGES * block_n * (d_qk + d_v)
        shared = (2 * BLOCK_H * d_qk + keys) * ITEMSIZE
        accumulators = (d_v + 1.5 * block_n) * BLOCK_H / 128  # and scores, with half as many for P
        if shared + DENSE_FWD_BARRIERS <= shared_limit and accumulators <= DENSE_FWD_ACCUMULATORS:
            # Scores: before the loop and in it; V: in it and behind it; of both warpgroups.
            products = 2 * 2 * (d_qk // PRODUCT_DEPTH + block_n // PRODUCT_DEPTH)
            registers = DENSE_FWD_REGISTERS[d_v, heads.addressing]
            return DenseFwdSm90Plan(
                BLOCK_H, block_n, DENSE_FWD_STAGES, registers, WARPS, DENSE_FWD_QUERIES, shared, products
            )
    return None


def refusal(spec: Spec) -> str | None:
    """Why the sm90 kernels cannot be emitted for a spec; None if they can."""
    dims = spec.model
    tail = dims.kv_lora_rank + dims.qk_rope_head_dim - dims.v_head_dim
    if spec.attention is None:
        return "it computes attention over latent rows, and the spec has no attention"
    if isinstance(spec.attention, DenseAttention) and spec.attention.window is not None:
        return "it computes dense attention without a window alone, and the spec has one"
    if SM90 not in spec.targets:
        return f"targets lack {SM90}, on which alone it runs"
    if dims.v_head_dim != D_V:
        return f"model.v_head_dim is {dims.v_head_dim}, and it takes {D_V}"
    if tail not in D_TAILS:
        return f"a row has {tail} columns behind V's, and it takes {' or '.join(map(str, D_TAILS))}"
    return None


def reads_cache(layout: CacheLayout, extra_layout: CacheLayout | None) -> bool:
    """Whether the kernel that dequantises K reads such caches: e4m3, an fp32 scale for 128 columns, V4's, or V4.1's.

    fp32 scales stand in the row, and RoPE lies behind V or nowhere; ue8m0 ones, for 64 columns, in a second plane, and
    RoPE in V. V4.1's two caches have all columns as one run, e4m3 and e2m1, with their scales behind.
    """
    if extra_layout not in (None, layout):
        return (_run(layout), _run(extra_layout)) == V41_RUNS
    latent, *tail = layout.data
    scales = layout.scales_of(latent)
    if scales is None or latent.dtype != "e4m3" or latent.offset != 0:
        return False
    if [field.dtype for field in tail] not in ([], ["bf16"]) or scales.interleave != 1:
        return False
    if tail and tail[0].offset % LOAD_BYTES:
        return False
    if layout.planar:
        return (
            [field.count for field in layout.data] == [7 * V4_SCALE_TILE, V4_SCALE_TILE]
            and (scales.dtype, scales.tile, scales.plane, scales.offset) == ("ue8m0", V4_SCALE_TILE, 1, 0)
            and (tail[0].offset, tail[0].plane) == (latent.count, 0)
            and layout.plane_bytes == (latent.count + 2 * tail[0].count, V4_SCALES)
        )
    return (
        extra_layout is None
        and latent.count == D_V
        and (scales.dtype, scales.tile) == ("fp32", SCALE_TILE)
        and (scales.offset % LOAD_BYTES, layout.row_bytes % LOAD_BYTES) == (0, 0)
    )


def _run(layout: CacheLayout) -> tuple[str, int, str, int] | None:
    """Dtype and columns of a row of one run, dtype of its scales in order and columns a scale; None: it is another."""
    row, *others = layout.data
    scales = layout.scales_of(row)
    if others or scales is None or layout.planar or scales.interleave != 1:
        return None
    if row.offset != 0 or scales.offset % LOAD_BYTES or layout.row_bytes % LOAD_BYTES:
        return None
    return row.dtype, row.count, scales.dtype, scales.tile


def make_sm90(
    spec: Spec,
    rows: Sequence[Sm90Row] | None = None,
    layout: CacheLayout | None = None,
    extra_layout: CacheLayout | None = None,
) -> Sm90Plan | None:
    """The plan of an sm90 kernel of a spec; None where its back end or its dims leave it out.

    Args:
        spec: the spec.
        rows: which calls run it, as a sweep found; None: the default.
        layout, extra_layout: of the quantised caches that it reads, `reads_cache`; None: it dequantises nothing, and
            reads no second one.
    """
    if spec.backend == "triton" or refusal(spec) is not None:
        return None
    dims = spec.model
    d_tail = dims.kv_lora_rank + dims.qk_rope_head_dim - D_V
    if spec.backend == "gluon":
        rows = (Sm90Row(None, 1),)
    partials = PartialRow(spec.partials, D_V)
    columns = D_V + d_tail
    probs = BLOCK_H * BLOCK_N * (1 if d_tail else 2)
    tiles = ((BLOCK_H + 2 * BLOCK_N) * columns + probs) * ITEMSIZE
    dense = isinstance(spec.attention, DenseAttention)
    tables = (4 if dense else 6) * BLOCK_H * 4  # maxima and sums of two warpgroups, over rows maxima of two kinds
    scale_columns, registers, cost = 0, DENSE_DECODE_REGISTERS if dense else SPARSE_FWD_REGISTERS[d_tail], COST
    default_rows: Sequence[Sm90Row] = DENSE_DECODE_ROWS if dense else DEFAULT_ROWS
    if layout is not None:
        default_rows = DEQUANTISING_ROWS
        tables = 3 * BLOCK_H * 4  # maxima or sums of two warpgroups, and sums of all tiles
        scale_columns, registers = D_V // SCALE_TILE, DEQUANTISING_REGISTERS[d_tail]
        cost = DEQUANTISING_COST
        if layout.planar:
            scale_columns, registers = V4_SCALES, V4_REGISTERS
            tables += BLOCK_N * dims.qk_rope_head_dim * ITEMSIZE  # a block's RoPE, before it is fp16
            tables += BLOCK_N * V4_SCALE_TILE  # another one's last tile, as it is stored
        elif extra_layout is not None:
            scale_columns, registers = D_V // V41_RUNS[1][3], V41_REGISTERS
        tables += 2 * BLOCK_N * (4 + scale_columns * ITEMSIZE)  # an offset and the scales of each key
    # Scores: before the loop, at its end, and on WG1; P with V: two blocks in the loop and after it.
    products = 3 * columns // PRODUCT_DEPTH + 3 * 2 * BLOCK_N // PRODUCT_DEPTH
    return Sm90Plan(
        block_h=BLOCK_H,
        block_n=BLOCK_N,
        d_half=D_V // 2,
        d_tail=d_tail,
        registers=registers,
        scale_columns=scale_columns,
        cost=(partials.weighs(cost[0]), partials.weighs(cost[1])),
        rows=tuple(rows or default_rows),
        expected_shared=tiles + tables,
        split_shared=2 * BLOCK_H * (1 if d_tail else 4) if partials.scaled else 0,  # of each row's halves
        expected_products=products,
    )
