"""Numbers that several sm90 kernels (Gluon) share, and the plan of one over latent rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mlagen.plan.sm90 import row_pieces
from mlagen.plan.sm90.row_pieces import RowPieces
from mlagen.plan.splits import PartialRow
from mlagen.plan.targets import SM90
from mlagen.plan.tiles.tile import Sm90Row, Tile, calls_text
from mlagen.plan.tritons import Minor, minor_text
from mlagen.spec import DenseAttention, SparseAttention, Spec
from mlagen.work import ITEMSIZE

BLOCK_H = 64  # rows of a warpgroup's product
BLOCK_N = 64
BARRIERS = 1024  # bytes for barriers, for values between partitions, and additionally for splits
D_V = 512  # of the rows with measured costs, and of most quantised caches
PRODUCT_BYTES = 32  # of a row of either operand, which one wgmma multiplies
PRODUCT_DEPTH, E4M3_PRODUCT_DEPTH = PRODUCT_BYTES // ITEMSIZE, PRODUCT_BYTES  # columns of 16 bits, and of e4m3
WARPS = 4  # warps of the first warpgroup, the num_warps of a launch
RESCALE_THRESHOLD_LOG2 = 7  # conditional rescaling of O; P, rounded, is at most 2^8
SWIZZLED_COLUMNS = 64  # 16-bit columns of a swizzled row of shared memory for wgmma

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

    @property
    def text(self) -> str:
        """The split and the splits under other Tritons in words."""
        others = (f", under Triton {minor_text(triton)} {one} and {two}" for triton, (one, two) in self.under)
        return " and ".join(map(str, self.split)) + "".join(others)

    def instead(self, triton: Minor, split: Split) -> Registers:
        """Return the registers with another split under a minor version."""
        others = {**dict(self.under), triton: split}
        return replace(self, under=tuple(sorted(others.items())))


def register_columns(columns: int) -> tuple[int, ...]:
    """Return powers of two from 16 on, below this many columns: column strides of a thread's accumulator registers."""
    return tuple(1 << bit for bit in range(4, (columns - 1).bit_length()))


def p0_fits_tail(pieces: RowPieces, block_n: int) -> bool:
    """Whether WG0's P fits the tail of block 0 exactly, and is stored there."""
    return pieces.tail == block_n == BLOCK_N


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
        v_ahead: chunks of a block's V, 32 keys each, that are in registers before their P in e4m3; 0: P is of 16 bits.
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
    v_ahead: int = 0

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
        """Whether WG0's P uses the memory of block 0's tail."""
        return p0_fits_tail(self.pieces, self.block_n)

    @property
    def most_page(self) -> int:
        """Most keys of a page with 32-bit offsets."""
        return (1 << 31) // self.d_k

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of K."""
        return self.block_n * self.d_k * self.k_itemsize

    @property
    def resources(self) -> str:
        """Its registers, shared memory and products in words."""
        return f"{self.registers.text}; {self.expected_shared:,} bytes of shared memory; {self.expected_products} wgmma"

    def describe(self) -> Iterator[str]:
        """Yield lines about the kernel and the calls that run it."""
        sizes = f"{self.block_h} heads and {self.step} indices per step"
        yield f"\nsm90 kernel: {sizes}; registers per thread of WG1 and the producer: {self.resources}"
        yield f"calls that run it, by heads: {calls_text(self.rows)}"

    @property
    def tile(self) -> Tile:
        """The kernel's tile for the choice of splits: one program per multiprocessor, with its own pipeline."""
        return Tile(self.block_h, self.step, WARPS, 1, True)


def refusal(spec: Spec) -> str | None:
    """Return the reason why a spec has no sm90 kernels, or None."""
    if spec.attention is None:
        return "the spec has no attention over latent rows"
    if isinstance(spec.attention, DenseAttention) and spec.attention.window is not None:
        return "attention.window is set, and it supports dense attention only without a window"
    if SM90 not in spec.targets:
        return f"targets lack {SM90}, the only target that runs it"
    if spec.cache is not None and spec.cache.layout.tensors:
        return (
            f"cache.layout has fields in {' and '.join(spec.cache.layout.tensors)}, and it reads caches of one tensor"
        )
    dims = spec.model
    reason = row_pieces.refuses(dims.v_head_dim, dims.d_qk)
    if reason is None and isinstance(spec.attention, SparseAttention) and spec.attention.out_rope is not None:
        return _rotation_refusal(dims.v_head_dim, dims.qk_rope_head_dim)
    return reason


def _rotation_refusal(d_v: int, d_rope: int) -> str | None:
    """Return the reason why the kernels do not rotate so many RoPE columns of an output, or None."""
    halves = [half for half in row_pieces.HALVES if 2 * half == d_v]
    if halves and d_rope in row_pieces.HALVES and d_rope <= halves[0]:
        return None
    takes = ", ".join(str(2 * half) for half in row_pieces.HALVES)
    return (
        f"attention.out_rope is set for {d_rope} RoPE columns of {d_v}, and it supports 64, 128 or 256 of {takes} in "
        "the right half"
    )


def weighed(measured: tuple[int, int], pieces: RowPieces, partials: PartialRow) -> tuple[int, int]:
    """Return the costs of a step and of its rows, measured with D_V columns of V, in rows of these partials."""
    step, fetch = (cost * pieces.of_v // D_V for cost in measured)
    return partials.weighs(step), partials.weighs(fetch)
