"""Numbers of the sm90 kernels (Gluon): their tiles and resources, and the calls that run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlagen.layout import CacheLayout
from mlagen.layout.layout import MOST_LOADED
from mlagen.plan.sm90 import row_pieces
from mlagen.plan.sm90.row_pieces import HALVES, RowPieces, cut_row
from mlagen.plan.splits import PartialRow
from mlagen.plan.targets import SM90, TARGETS
from mlagen.plan.tiles.tile import Sm90Row, Tile
from mlagen.plan.tritons import Minor
from mlagen.spec import DenseAttention, Spec
from mlagen.work import ITEMSIZE

Split = tuple[int, int]


@dataclass(frozen=True)
class Registers:
    """Registers per thread of two of a program's three warpgroups. The third has the rest of the register file.

    Attributes:
        split: the split under every Triton that `under` does not name, of WG1 and the producer, or with swap-AB of WG0
            and WG1.
        under: other splits, by minor version of Triton, if `split` spills more in loops there.
    """

    split: Split
    under: tuple[tuple[Minor, Split], ...] = ()

    def at(self, triton: Minor) -> Split:
        """Return the split under a minor version."""
        return dict(self.under).get(triton, self.split)

    def instead(self, triton: Minor, split: Split) -> Registers:
        """Return the registers with another split under a minor version."""
        others = {**dict(self.under), triton: split}
        return replace(self, under=tuple(sorted(others.items())))


BLOCK_H = 64  # rows of a warpgroup's product
BLOCK_N = 64
NARROW_BLOCK_N = 32  # for rows that leave no room in shared memory for two blocks of BLOCK_N beside Q
BARRIERS = 1024  # bytes for barriers, for values between partitions, and additionally for splits
D_V = 512  # of the rows with measured costs, and of most quantised caches
PRODUCT_DEPTH = 16  # columns that one wgmma of 16-bit operands multiplies
WARPS = 4  # warps of the first warpgroup, the num_warps of a launch
# docs/tritons.md lists spills by Triton and the tried splits.
SPARSE_FWD_REGISTERS = Registers((208, 56))
NO_TAIL_REGISTERS = Registers((208, 56), (((3, 9), (216, 64)),))
SHARED_REGISTERS = {  # by tokens per group
    2: Registers((208, 56), (((3, 9), (216, 56)),)),
    4: Registers((208, 56), (((3, 9), (208, 48)),)),
}
SHORT_REGISTERS = Registers((184, 80))  # if WG1 holds fewer than 256 columns; the producer gets the rest
OTHER_TAIL_REGISTERS = Registers((200, 64))  # with a tail that is not a whole swizzled run, or of two
DENSE_OTHER_TAIL_REGISTERS = Registers((208, 56))
DENSE_DECODE_REGISTERS = Registers((216, 48), (((3, 9), (200, 56)),))
DEQUANTISING_REGISTERS = Registers((192, 96))
NO_TAIL_DEQUANTISING_REGISTERS = Registers((192, 96), (((3, 8), (200, 104)), ((3, 9), (200, 104))))
OTHER_TAIL_DEQUANTISING_REGISTERS = Registers((192, 112), (((3, 8), (200, 96)),))
TENSOR_SCALE_REGISTERS = Registers((200, 104), (((3, 9), (192, 104)),))
SHORT_DEQUANTISING_REGISTERS = Registers((184, 112))  # the same for halves with fewer than 256 columns
V4_REGISTERS = Registers((192, 112))
V41_REGISTERS = Registers((192, 112))
# Costs of a step of all programs and of its K rows, in units of storing and loading MEASURED_ROW: fitted to 80
# timings on an H100, and to 60 of fp8_ds_mla on an H200.
COST = (2560, 40)
DEQUANTISING_COST = (3100, 23)
RESCALE_THRESHOLD_LOG2 = 7  # conditional rescaling of O; P, rounded, is at most 2^8
SWIZZLED_COLUMNS = 64  # 16-bit columns of a swizzled row of shared memory for wgmma
# Columns of a product, and the costs. Splits from these costs are the fastest measured ones, for 8 to 128 tokens.
SWAP_AB_COSTS = {16: (1800, 20), 32: (2400, 20)}
SWAP_AB_K_L_STAGES = 3  # left halves of K blocks, with two right ones; the kernel's text needs this number
SWAP_AB_REGISTERS = Registers((232, 232), (((3, 9), (240, 232)),))
DENSE_FWD_BLOCK_N = (128, 64)  # most wanted first
DENSE_FWD_STAGES = 2
# By columns of V, and by addressing of K and V.
DENSE_FWD_REGISTERS = {
    (64, "pointers"): Registers((216, 72)),
    (64, "descriptors"): Registers((216, 72)),
    (128, "pointers"): Registers((216, 72)),
    (128, "descriptors"): Registers((216, 72), (((3, 7), (224, 64)), ((3, 8), (216, 80)))),
    (256, "pointers"): Registers((232, 56), (((3, 9), (224, 56)),)),
    (256, "descriptors"): Registers((224, 56)),
}
DENSE_FWD_ACCUMULATORS = 192  # registers per thread for accumulators, scores and P; the rest has room then
# The last Triton without spills of the softmax next to its own PV, if that was faster.
DENSE_FWD_HOLDS_WAIT_UP_TO: dict[tuple[int, str], Minor] = {(128, "descriptors"): (3, 7), (256, "pointers"): (3, 7)}
# Q fetched a tile ahead, if that was faster.
DENSE_FWD_Q_AHEAD = frozenset({(128, "descriptors")})
DENSE_FWD_CACHED_BYTES = 48 << 20  # part of L2's 50 MB for K and V of heads that run at the same time
DENSE_FWD_QUERIES = 1
LINE_BYTES = 128  # of L2
DENSE_FWD_BARRIERS = 1024  # bytes for barriers and for values between partitions
SCALE_TILE = 128  # columns of an fp32 scale
V4_SCALE_TILE = 64  # columns of a ue8m0 scale
# Exponents that fit fp16 tiles. Of a token's largest scale: the least, and the largest (times e4m3's 448 it is below
# 65504). Of the largest element of half a head of Q: the least, and the first that is too large.
FP16_SCALES = (-13, 7)
FP16_Q = (-10, 16)
V4_SCALES = 8  # bytes of a token in the second plane: seven scales and a pad
V41_RUNS = (("e4m3", D_V, "ue8m0", 32), ("e2m1", D_V, "e4m3", 16))  # columns and scales of a row, for either cache


def register_columns(columns: int) -> tuple[int, ...]:
    """Return powers of two from 16 on, below this many columns: column strides of a thread's accumulator registers."""
    return tuple(1 << bit for bit in range(4, (columns - 1).bit_length()))


# Defaults: sizes at which dsv32 over rows, dsv4_pro over its caches and dsv3's dense attention begin to gain on an
# H200. Few heads leave most of a tile over a cache empty; few tokens need many splits.
DEFAULT_ROWS = (Sm90Row(16, 16), Sm90Row(32, 16), Sm90Row(None, 3))
OTHER_DIMS_ROWS = (Sm90Row(32, 16), Sm90Row(None, 1))  # as four of other columns than 512, and 0 or 64 behind, gain
DEQUANTISING_ROWS = (Sm90Row(16, 33), Sm90Row(32, 4), Sm90Row(64, 2), Sm90Row(None, 1))
# Over caches without planes, of other columns than D_V and 0 or 64 behind or of one scale a tensor: as five gain.
OTHER_DEQUANTISING_ROWS = (Sm90Row(16, 32), Sm90Row(32, 16), Sm90Row(None, 1))
# The same of rows that do not begin at 16 bytes; the portable kernel that was measured loaded single elements of them.
UNALIGNED_DEQUANTISING_ROWS = (Sm90Row(16, 2), Sm90Row(None, 1))
DENSE_DECODE_ROWS = (Sm90Row(16, 1), Sm90Row(32, 5), Sm90Row(None, 1))
DENSE_DECODE_NARROW_ROWS = (Sm90Row(32, 5), Sm90Row(None, 1))  # without swap-AB


@dataclass(frozen=True)
class Sm90Plan:
    """Numbers of an sm90 kernel.

    Attributes:
        block_h: heads per program.
        block_n: indices per block; a step has two blocks.
        pieces: the columns of a row.
        registers: registers per thread, by warpgroup.
        scale_columns: fp16 scales per key in shared memory; 0: keys have none.
        cost: costs of a step and of its K rows, for the choice of splits.
        rows: calls that run it, by heads, in ascending order.
        expected_shared: expected bytes of shared memory per program.
        split_shared: additional bytes if it stores splits.
        expected_products: wgmma instructions in its code.
        k_l_stages: number of left halves of K blocks in shared memory.
        k_itemsize: bytes of a column of K in shared memory.
    """

    block_h: int
    block_n: int
    pieces: RowPieces
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
        """Indices per step."""
        return 2 * self.block_n

    @property
    def d_k(self) -> int:
        """Columns of K."""
        return self.pieces.d_k

    @property
    def d_half(self) -> int:
        """Columns of V that WG0 holds; WG1 also holds as many if halves are equal."""
        return self.pieces.left

    @property
    def d_tail(self) -> int:
        """Columns of K after both halves."""
        return self.pieces.tail

    @property
    def p0_in_tail(self) -> bool:
        """Whether WG0's P has the size of block 0's tail and uses its memory."""
        return self.d_tail == self.block_n == BLOCK_N

    @property
    def most_page(self) -> int:
        """Most keys of a page with 32-bit offsets."""
        return (1 << 31) // self.d_k

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of K."""
        return self.block_n * self.d_k * self.k_itemsize

    @property
    def tile(self) -> Tile:
        """The kernel's tile for the choice of splits: one program per multiprocessor, with its own pipeline."""
        return Tile(self.block_h, self.step, WARPS, 1, True)


def make_swap_ab(
    sm90: Sm90Plan, partials: PartialRow, registers: Registers = SWAP_AB_REGISTERS, *, true_maxima: bool
) -> tuple[Sm90Plan, ...]:
    """Return the plans of a family's swap-AB kernel, fewest heads first.

    Args:
        sm90: plan of the kernel that it replaces.
        partials: a row of partials.
        registers: registers per thread of WG0 and WG1.
        true_maxima: its consumers also exchange true maxima, with the lagged ones and row sums.
    """
    pieces = sm90.pieces
    of_v = pieces.of_v // BLOCK_H * (BLOCK_N // PRODUCT_DEPTH)
    plans = []
    for heads, cost in SWAP_AB_COSTS.items():
        extra = (SWAP_AB_K_L_STAGES - 2) * BLOCK_N * pieces.left
        tiles = ((heads + 2 * BLOCK_N) * pieces.columns + extra + 2 * BLOCK_N * heads) * ITEMSIZE
        statistics = 2 * (WARPS + 2 + true_maxima) * heads * 4  # largest scores by warps; maxima and sums of rows
        exponents = 2 * (WARPS + 1) * heads * 4  # by warps, and of rows
        if tiles + statistics + BARRIERS > TARGETS[SM90].shared_limit:
            continue
        plans.append(
            replace(
                sm90,
                block_h=heads,
                block_n=BLOCK_N,
                registers=registers,
                cost=_cost(cost, pieces, partials),
                k_l_stages=SWAP_AB_K_L_STAGES,
                expected_shared=tiles + statistics,
                split_shared=exponents if partials.scaled else 0,
                expected_products=2 * (pieces.columns // PRODUCT_DEPTH + of_v),
            )
        )
    return tuple(plans)


@dataclass(frozen=True)
class DenseFwdSm90Plan:
    """Numbers of the sm90 kernel of multi-head attention.

    Attributes:
        block_m: rows per warpgroup.
        block_n: keys per step.
        stages: steps with K and V in shared memory at once.
        registers: registers per thread, by warpgroup.
        num_warps: warps of the first warpgroup.
        min_queries: fewest rows of the longest request of calls that run it.
        cached_bytes: bytes of K and V of heads that run at the same time.
        q_ahead: whether Q's memory is freed after the last scores and L2 prefetches the next tile's Q.
        holds_wait_up_to: the last minor version of Triton that overlaps the softmax with its own PV; None: none.
        expected_shared: expected bytes of shared memory per program.
        expected_products: wgmma instructions in its code.
    """

    block_m: int
    block_n: int
    stages: int
    registers: Registers
    num_warps: int
    min_queries: int
    cached_bytes: int
    q_ahead: bool
    holds_wait_up_to: Minor | None
    expected_shared: int
    expected_products: int

    @property
    def rows(self) -> int:
        """Rows of a program: two warpgroups multiply."""
        return 2 * self.block_m

    @property
    def line(self) -> int:
        """Elements of a line of L2."""
        return LINE_BYTES // ITEMSIZE


def make_dense_fwd_sm90(spec: Spec, shared_limit: int) -> DenseFwdSm90Plan | None:
    """Return the plan of the sm90 kernel of dense_fwd; None if the back end, the dims or a window exclude it.

    Columns come in shared memory's swizzled runs of 64, and V's as one accumulator.
    """
    heads = spec.multi_head
    if heads is None or heads.window is not None or spec.backend == "triton" or SM90 not in spec.targets:
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
            kind = (d_v, heads.addressing)
            return DenseFwdSm90Plan(
                BLOCK_H,
                block_n,
                DENSE_FWD_STAGES,
                DENSE_FWD_REGISTERS[kind],
                WARPS,
                DENSE_FWD_QUERIES,
                DENSE_FWD_CACHED_BYTES,
                kind in DENSE_FWD_Q_AHEAD,
                DENSE_FWD_HOLDS_WAIT_UP_TO.get(kind),
                shared,
                products,
            )
    return None


def refusal(spec: Spec) -> str | None:
    """Return the reason why a spec has no sm90 kernels, or None."""
    if spec.attention is None:
        return "the spec has no attention over latent rows"
    if isinstance(spec.attention, DenseAttention) and spec.attention.window is not None:
        return "attention.window is set, and it supports dense attention only without a window"
    if SM90 not in spec.targets:
        return f"targets lack {SM90}, the only target that runs it"
    dims = spec.model
    return row_pieces.refuses(dims.v_head_dim, dims.kv_lora_rank + dims.qk_rope_head_dim)


def make_sm90(
    spec: Spec,
    rows: Sequence[Sm90Row] | None = None,
    layout: CacheLayout | None = None,
    extra_layout: CacheLayout | None = None,
) -> Sm90Plan | None:
    """Return the plan of an sm90 kernel of a spec; None if the back end or the dims exclude it.

    Args:
        spec: the spec.
        rows: calls that run it, from tuning; None: the default.
        layout, extra_layout: layouts of the quantised caches that it reads, `sm90_caches.reads_cache`; None: no
            dequantisation, no second cache.
    """
    if spec.backend == "triton" or refusal(spec) is not None:
        return None
    dims = spec.model
    pieces = cut_row(dims.v_head_dim, dims.kv_lora_rank + dims.qk_rope_head_dim)
    if spec.backend == "gluon":
        rows = (Sm90Row(None, 1),)
    partials = PartialRow(spec.partials, dims.v_head_dim)
    dense = isinstance(spec.attention, DenseAttention)
    tables = (4 if dense else 6) * BLOCK_H * 4  # maxima and sums of two warpgroups, over rows maxima of two kinds
    scale_columns, registers, cost = 0, _registers(pieces, dense), COST
    if layout is not None:
        tables = 3 * BLOCK_H * 4  # maxima or sums of two warpgroups, and sums of all tiles
        scale_columns = 0 if layout.tensor_scale else pieces.d_v // SCALE_TILE
        registers, cost = _dequantising_registers(pieces, layout), DEQUANTISING_COST
        if layout.planar:
            scale_columns, registers = V4_SCALES, V4_REGISTERS
            tables += BLOCK_N * dims.qk_rope_head_dim * ITEMSIZE  # a block's RoPE, before it is fp16
            tables += BLOCK_N * V4_SCALE_TILE  # another one's last tile, as it is stored
        elif extra_layout is not None:
            scale_columns, registers = D_V // V41_RUNS[1][3], V41_REGISTERS
        tables += 2 * BLOCK_N * (4 + scale_columns * ITEMSIZE)  # an offset and the scales of each key
    fits = _tile_bytes(pieces, BLOCK_N) + tables + BARRIERS <= TARGETS[SM90].shared_limit
    block_n = BLOCK_N if layout is not None or fits else NARROW_BLOCK_N
    # Scores: before the loop, at its end, and on WG1; P with V: two blocks in the loop and after it.
    products = 3 * pieces.columns // PRODUCT_DEPTH + 3 * 2 * block_n // PRODUCT_DEPTH
    return Sm90Plan(
        block_h=BLOCK_H,
        block_n=block_n,
        pieces=pieces,
        registers=registers,
        scale_columns=scale_columns,
        cost=_cost(cost, pieces, partials),
        rows=tuple(rows or _default_rows(pieces, layout, dense, narrow=block_n < BLOCK_N)),
        expected_shared=_tile_bytes(pieces, block_n) + tables,
        split_shared=2 * BLOCK_H * (1 if pieces.tail else 4) if partials.scaled else 0,  # of each row's halves
        expected_products=products,
    )


def _default_rows(pieces: RowPieces, layout: CacheLayout | None, dense: bool, *, narrow: bool) -> tuple[Sm90Row, ...]:
    """Return the calls of an untuned spec that run the seesaw kernel."""
    if dense:
        return DENSE_DECODE_NARROW_ROWS if narrow else DENSE_DECODE_ROWS
    measured = pieces.d_v == D_V and pieces.tail in (0, SWIZZLED_COLUMNS)
    if layout is None:
        return DEFAULT_ROWS if measured else OTHER_DIMS_ROWS
    if layout.planar or (measured and not layout.tensor_scale):
        return DEQUANTISING_ROWS
    return UNALIGNED_DEQUANTISING_ROWS if layout.loads_at < MOST_LOADED else OTHER_DEQUANTISING_ROWS


def _dequantising_registers(pieces: RowPieces, layout: CacheLayout) -> Registers:
    """Return the register split of the seesaw kernel over e4m3 rows."""
    if pieces.right < HALVES[-1]:
        return SHORT_DEQUANTISING_REGISTERS
    if layout.tensor_scale:
        return TENSOR_SCALE_REGISTERS
    if pieces.tail not in (0, SWIZZLED_COLUMNS):
        return OTHER_TAIL_DEQUANTISING_REGISTERS
    return DEQUANTISING_REGISTERS if pieces.tail else NO_TAIL_DEQUANTISING_REGISTERS


def _registers(pieces: RowPieces, dense: bool) -> Registers:
    """Return the register split of the seesaw kernel over unquantised rows."""
    if pieces.right < HALVES[-1]:
        return SHORT_REGISTERS
    if pieces.tail not in (0, SWIZZLED_COLUMNS):
        return DENSE_OTHER_TAIL_REGISTERS if dense else OTHER_TAIL_REGISTERS
    if dense:
        return DENSE_DECODE_REGISTERS
    return SPARSE_FWD_REGISTERS if pieces.tail else NO_TAIL_REGISTERS


def _tile_bytes(pieces: RowPieces, block_n: int) -> int:
    """Return the bytes of Q, two blocks of K, and P of both warpgroups, unless WG0's P uses the memory of a tail."""
    probs = BLOCK_H * block_n * (1 if pieces.tail == block_n == BLOCK_N else 2)
    return ((BLOCK_H + 2 * block_n) * pieces.columns + probs) * ITEMSIZE


def _cost(measured: tuple[int, int], pieces: RowPieces, partials: PartialRow) -> tuple[int, int]:
    """Return the costs of a step and of its rows, measured with D_V columns of V, in rows of these partials."""
    step, fetch = (cost * pieces.of_v // D_V for cost in measured)
    return partials.weighs(step), partials.weighs(fetch)
