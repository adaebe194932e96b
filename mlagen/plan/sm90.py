"""Numbers of the sm90 kernels, which the Gluon back end emits: what they hold, and which calls run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlagen.layout import CacheLayout
from mlagen.layout.layout import MOST_LOADED
from mlagen.plan import row_pieces
from mlagen.plan.row_pieces import HALVES, RowPieces, cut_row
from mlagen.plan.splits import PartialRow
from mlagen.plan.targets import TARGETS
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

    def at(self, triton: Minor) -> Split:
        """The split under a minor version."""
        return dict(self.under).get(triton, self.split)

    def instead(self, triton: Minor, split: Split) -> Registers:
        """The same but for the split under a minor version."""
        others = {**dict(self.under), triton: split}
        return replace(self, under=tuple(sorted(others.items())))


SM90 = "sm90"
BLOCK_H = 64  # rows of a warpgroup's product
BLOCK_N = 64
NARROW_BLOCK_N = 32  # of rows of which shared memory has no room for two blocks of BLOCK_N beside Q
BARRIERS = 1024  # bytes for barriers, for what partitions pass, and for what splits take beside
D_V = 512  # of the rows by which costs were measured, and of most caches that are dequantised
PRODUCT_DEPTH = 16  # columns that one wgmma of 16-bit operands multiplies
WARPS = 4  # of the program's first warpgroup, which is what a launch asks for
# What spills under which Triton, and which splits were tried: docs/tritons.md.
SPARSE_FWD_REGISTERS = Registers((208, 56))
NO_TAIL_REGISTERS = Registers((208, 56), (((3, 9), (216, 64)),))
SHARED_REGISTERS = {  # by tokens a group
    2: Registers((208, 56), (((3, 9), (216, 56)),)),
    4: Registers((208, 56), (((3, 9), (208, 48)),)),
}
SHORT_REGISTERS = Registers((184, 80))  # where WG1 holds fewer columns than 256: the producer has what it spares
OTHER_TAIL_REGISTERS = Registers((200, 64))  # beside a tail of no whole swizzled run, or of two
DENSE_OTHER_TAIL_REGISTERS = Registers((208, 56))
DENSE_DECODE_REGISTERS = Registers((216, 48), (((3, 9), (200, 56)),))
DEQUANTISING_REGISTERS = Registers((192, 96))
NO_TAIL_DEQUANTISING_REGISTERS = Registers((192, 96), (((3, 8), (200, 104)), ((3, 9), (200, 104))))
OTHER_TAIL_DEQUANTISING_REGISTERS = Registers((192, 112), (((3, 8), (200, 96)),))
TENSOR_SCALE_REGISTERS = Registers((200, 104), (((3, 9), (192, 104)),))
SHORT_DEQUANTISING_REGISTERS = Registers((184, 112))  # likewise where halves have fewer columns than 256
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
    (128, "descriptors"): Registers((216, 72), (((3, 7), (224, 64)), ((3, 8), (216, 80)))),
    (256, "pointers"): Registers((232, 56), (((3, 9), (224, 56)),)),
    (256, "descriptors"): Registers((224, 56)),
}
DENSE_FWD_ACCUMULATORS = 192  # registers a thread for accumulators, scores and P, beside which the rest has room
# Likewise, where the softmax beside the own product with V was faster: the last Triton under which that does not spill.
DENSE_FWD_HOLDS_WAIT_UP_TO: dict[tuple[int, str], Minor] = {(128, "descriptors"): (3, 7), (256, "pointers"): (3, 7)}
# Where it was faster: Q fetched a tile ahead.
DENSE_FWD_Q_AHEAD = frozenset({(128, "descriptors")})
DENSE_FWD_CACHED_BYTES = 48 << 20  # of L2's 50 MB, for K and V of the heads that run side by side
DENSE_FWD_QUERIES = 1
LINE_BYTES = 128  # of L2
DENSE_FWD_BARRIERS = 1024  # bytes for barriers and for what partitions pass
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
        block_h: heads a program holds.
        block_n: indices a block; a step takes two.
        pieces: the columns of a row.
        registers: of a thread, by warpgroup.
        scale_columns: fp16 scales a key in shared memory; 0: keys have none.
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
        """Indices a step."""
        return 2 * self.block_n

    @property
    def d_k(self) -> int:
        """Columns of K."""
        return self.pieces.d_k

    @property
    def d_half(self) -> int:
        """Columns of V that WG0 holds, and WG1 too where halves are equal."""
        return self.pieces.left

    @property
    def d_tail(self) -> int:
        """Columns of K behind both halves."""
        return self.pieces.tail

    @property
    def p0_in_tail(self) -> bool:
        """Whether WG0's P has the size of block 0's tail, whose place it then takes."""
        return self.d_tail == self.block_n == BLOCK_N

    @property
    def most_page(self) -> int:
        """Keys of a page whose elements 32 bits count."""
        return (1 << 31) // self.d_k

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of K."""
        return self.block_n * self.d_k * self.k_itemsize

    @property
    def tile(self) -> Tile:
        """The kernel as the choice of splits sees it: a program a multiprocessor, which pipelines by itself."""
        return Tile(self.block_h, self.step, WARPS, 1, True)


def make_swap_ab(
    sm90: Sm90Plan, partials: PartialRow, registers: Registers = SWAP_AB_REGISTERS, *, true_maxima: bool
) -> tuple[Sm90Plan, ...]:
    """The plans of a family's sm90 kernel of few heads, which stand in the columns of its products; fewest first.

    Args:
        sm90: of the one in whose place it runs.
        partials: a row of partials.
        registers: of a thread of WG0 and of WG1.
        true_maxima: its consumers exchange those beside the lagged ones and row sums.
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
        block_m: rows that a warpgroup holds.
        block_n: keys a step.
        stages: steps of which K and V are in shared memory at once.
        registers: of a thread, by warpgroup.
        num_warps: of the program's first warpgroup.
        min_queries: from how many rows of its longest request on a call runs it.
        cached_bytes: bytes of K and V of the heads that run side by side.
        q_ahead: whether Q's place is freed behind the last scores, and L2 fetches the next tile's rows of Q before.
        holds_wait_up_to: the last minor version of Triton under which the softmax runs beside the own product with V;
            None if it does under none.
        expected_shared: bytes of shared memory a program is expected to need.
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
    """Why the sm90 kernels cannot be emitted for a spec; None if they can."""
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
    """The plan of an sm90 kernel of a spec; None where its back end or its dims leave it out.

    Args:
        spec: the spec.
        rows: which calls run it, as a sweep found; None: the default.
        layout, extra_layout: of the quantised caches that it reads, `sm90_caches.reads_cache`; None: it dequantises
            nothing, and reads no second one.
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
    """Which calls of an untuned spec run the seesaw."""
    if dense:
        return DENSE_DECODE_NARROW_ROWS if narrow else DENSE_DECODE_ROWS
    measured = pieces.d_v == D_V and pieces.tail in (0, SWIZZLED_COLUMNS)
    if layout is None:
        return DEFAULT_ROWS if measured else OTHER_DIMS_ROWS
    if layout.planar or (measured and not layout.tensor_scale):
        return DEQUANTISING_ROWS
    return UNALIGNED_DEQUANTISING_ROWS if layout.loads_at < MOST_LOADED else OTHER_DEQUANTISING_ROWS


def _dequantising_registers(pieces: RowPieces, layout: CacheLayout) -> Registers:
    """The split of registers of the seesaw over rows of e4m3."""
    if pieces.right < HALVES[-1]:
        return SHORT_DEQUANTISING_REGISTERS
    if layout.tensor_scale:
        return TENSOR_SCALE_REGISTERS
    if pieces.tail not in (0, SWIZZLED_COLUMNS):
        return OTHER_TAIL_DEQUANTISING_REGISTERS
    return DEQUANTISING_REGISTERS if pieces.tail else NO_TAIL_DEQUANTISING_REGISTERS


def _registers(pieces: RowPieces, dense: bool) -> Registers:
    """The split of registers of the seesaw over unquantised rows."""
    if pieces.right < HALVES[-1]:
        return SHORT_REGISTERS
    if pieces.tail not in (0, SWIZZLED_COLUMNS):
        return DENSE_OTHER_TAIL_REGISTERS if dense else OTHER_TAIL_REGISTERS
    if dense:
        return DENSE_DECODE_REGISTERS
    return SPARSE_FWD_REGISTERS if pieces.tail else NO_TAIL_REGISTERS


def _tile_bytes(pieces: RowPieces, block_n: int) -> int:
    """Bytes of Q, of two blocks of K, and of P: of both warpgroups, unless WG0's takes the place of a tail."""
    probs = BLOCK_H * block_n * (1 if pieces.tail == block_n == BLOCK_N else 2)
    return ((BLOCK_H + 2 * block_n) * pieces.columns + probs) * ITEMSIZE


def _cost(measured: tuple[int, int], pieces: RowPieces, partials: PartialRow) -> tuple[int, int]:
    """Costs that were measured with D_V columns of V, of a step and of its rows, in rows of such partials."""
    step, fetch = (cost * pieces.of_v // D_V for cost in measured)
    return partials.weighs(step), partials.weighs(fetch)
