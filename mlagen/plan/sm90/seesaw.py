"""Numbers of the seesaw kernels, one frozen row for each, and the plan of one for a spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from mlagen.layout import CacheLayout
from mlagen.layout.layout import MOST_LOADED
from mlagen.plan.sm90.kernel import (
    BARRIERS,
    BLOCK_H,
    BLOCK_N,
    D_V,
    PRODUCT_DEPTH,
    SWIZZLED_COLUMNS,
    Registers,
    Sm90Plan,
    p0_fits_tail,
    refusal,
    weighed,
)
from mlagen.plan.sm90.row_pieces import HALVES, RowPieces, cut_row
from mlagen.plan.splits import PartialRow
from mlagen.plan.targets import SM90, TARGETS
from mlagen.plan.tiles.tile import Sm90Row
from mlagen.spec import Spec
from mlagen.work import ITEMSIZE

NARROW_BLOCK_N = 32  # for rows that leave no room in shared memory for two blocks of BLOCK_N beside Q
SCALE_TILE = 128  # columns of an fp32 scale
V4_SCALE_TILE = 64  # columns of a ue8m0 scale
V41_SCALE_TILE = 16  # columns of a scale of the second cache, which has more of them
# Exponents that fit fp16 tiles. Of a token's largest scale: the least, and the largest (times e4m3's 448 it is below
# 65504). Of the largest element of half a head of Q: the least, and the first that is too large.
FP16_SCALES = (-13, 7)
FP16_Q = (-10, 16)


class Form(Enum):
    """Form of a row, which decides how many registers its halves and its tail need."""

    TAIL = "a tail of one swizzled run"
    NO_TAIL = "no tail"
    OTHER_TAIL = "a tail of less than a swizzled run, or of two"
    SHORT = "WG1 holds fewer than 256 columns, and the producer gets the rest"


def form_of(pieces: RowPieces) -> Form:
    """Return the form of a row."""
    if pieces.right < HALVES[-1]:
        return Form.SHORT
    return {0: Form.NO_TAIL, SWIZZLED_COLUMNS: Form.TAIL}.get(pieces.tail, Form.OTHER_TAIL)


@dataclass(frozen=True, kw_only=True)
class Seesaw:
    """Numbers of a seesaw kernel. docs/tritons.md lists spills by Triton and the tried register splits.

    Attributes:
        registers: registers per thread, by warpgroup.
        by_form: other ones, by the form of a row.
        cost: costs of a step of all programs and of its K rows, in units of storing and loading MEASURED_ROW.
        calls: calls that run it by default, with rows of measured dims; None: no dims were measured.
        other_calls: the same of other rows; of dense attention, of rows with narrow blocks.
        unaligned_calls: the same of cached rows that do not begin at 16 bytes, if they are not those of `calls`.
        vectors: fp32 vectors of a tile's heads in shared memory.
        dequantises: reads a quantised cache, with an offset for each key in shared memory.
        scale_tile: columns of a scale of a cached row; None: a row has no scales.
        stages_last: a block's RoPE and its last scale's columns are in shared memory before they are fp16.
    """

    registers: Registers
    by_form: Mapping[Form, Registers] = field(default_factory=dict)
    cost: tuple[int, int]
    calls: tuple[Sm90Row, ...] | None
    other_calls: tuple[Sm90Row, ...]
    unaligned_calls: tuple[Sm90Row, ...] = ()
    vectors: int
    dequantises: bool = False
    scale_tile: int | None = None
    stages_last: bool = False


# Costs are fitted to 80 timings on an H100, and to 60 of fp8_ds_mla on an H200. Calls begin at sizes at which dsv32
# over rows, dsv4_pro over its caches and dsv3's dense attention begin to gain on an H200. Few heads leave most of a
# tile over a cache empty; few tokens need many splits.
SPARSE_FWD = Seesaw(
    registers=Registers((208, 56)),
    by_form={
        Form.NO_TAIL: Registers((208, 56), (((3, 9), (216, 64)),)),
        Form.OTHER_TAIL: Registers((200, 64)),
        Form.SHORT: Registers((184, 80)),
    },
    cost=(2560, 40),
    calls=(Sm90Row(16, 16), Sm90Row(32, 16), Sm90Row(None, 3)),
    other_calls=(Sm90Row(32, 16), Sm90Row(None, 1)),  # as four of other columns than 512, and 0 or 64 behind, gain
    vectors=6,  # maxima of two kinds, and sums, of two warpgroups
)
DENSE_DECODE = Seesaw(
    registers=Registers((216, 48), (((3, 9), (200, 56)),)),
    by_form={Form.OTHER_TAIL: Registers((208, 56)), Form.SHORT: Registers((184, 80))},
    cost=(2560, 40),
    calls=(Sm90Row(16, 1), Sm90Row(32, 5), Sm90Row(None, 1)),
    other_calls=(Sm90Row(32, 5), Sm90Row(None, 1)),  # without swap-AB
    vectors=4,  # maxima and sums of two warpgroups
)
SPARSE_DECODE = Seesaw(  # e4m3 with an fp32 scale for 128 columns
    registers=Registers((192, 96)),
    by_form={
        Form.NO_TAIL: Registers((192, 96), (((3, 8), (200, 104)), ((3, 9), (200, 104)))),
        Form.OTHER_TAIL: Registers((192, 112), (((3, 8), (200, 96)),)),
        Form.SHORT: Registers((184, 112)),
    },
    cost=(3100, 23),
    calls=(Sm90Row(16, 33), Sm90Row(32, 4), Sm90Row(64, 2), Sm90Row(None, 1)),
    other_calls=(Sm90Row(16, 32), Sm90Row(32, 16), Sm90Row(None, 1)),  # as five others gain
    unaligned_calls=(Sm90Row(16, 2), Sm90Row(None, 1)),  # the portable kernel loads single elements of such rows
    vectors=3,  # maxima or sums of two warpgroups, and sums of all tiles
    dequantises=True,
    scale_tile=SCALE_TILE,
)
TENSOR_SCALE = replace(
    SPARSE_DECODE,
    registers=Registers((200, 104), (((3, 9), (192, 104)),)),
    by_form={Form.SHORT: Registers((184, 112))},
    calls=None,
    scale_tile=None,
)
TWO_PLANES = replace(  # V4's caches
    SPARSE_DECODE, registers=Registers((192, 112)), by_form={}, scale_tile=V4_SCALE_TILE, stages_last=True
)
TWO_LAYOUTS = replace(  # V4.1's two caches
    SPARSE_DECODE, registers=Registers((192, 112)), by_form={}, scale_tile=V41_SCALE_TILE
)


def cached_kernel(layout: CacheLayout, extra_layout: CacheLayout | None) -> Seesaw:
    """Return the kernel of sparse attention over quantised caches, see `caches.reads_cache`."""
    if layout.planar:
        return TWO_PLANES
    if extra_layout is not None:
        return TWO_LAYOUTS
    return TENSOR_SCALE if layout.tensor_scale else SPARSE_DECODE


def make_sm90(
    spec: Spec, kernel: Seesaw, rows: Sequence[Sm90Row] | None = None, layout: CacheLayout | None = None
) -> Sm90Plan | None:
    """Return the plan of a seesaw kernel of a spec; None if the back end or the dims exclude it.

    Args:
        spec: the spec.
        kernel: the kernel.
        rows: calls that run it, from tuning; None: the default.
        layout: layout of the quantised cache that it reads; None: no dequantisation.
    """
    if spec.backend == "triton" or refusal(spec) is not None:
        return None
    dims = spec.model
    pieces = cut_row(dims.v_head_dim, dims.d_qk)
    if spec.backend == "gluon":
        rows = (Sm90Row(None, 1),)
    partials = PartialRow(spec.partials, dims.v_head_dim)
    scale_columns = pieces.d_v // kernel.scale_tile if kernel.scale_tile else 0
    tables = kernel.vectors * BLOCK_H * 4
    if kernel.stages_last:
        tables += BLOCK_N * (dims.qk_rope_head_dim * ITEMSIZE + V4_SCALE_TILE)
    if kernel.dequantises:
        tables += 2 * BLOCK_N * (4 + scale_columns * ITEMSIZE)  # an offset and the scales of each key
    fits = _tile_bytes(pieces, BLOCK_N) + tables + BARRIERS <= TARGETS[SM90].shared_limit
    block_n = BLOCK_N if kernel.dequantises or fits else NARROW_BLOCK_N
    # Scores: before the loop, at its end, and on WG1; P with V: two blocks in the loop and after it.
    products = 3 * pieces.columns // PRODUCT_DEPTH + 3 * 2 * block_n // PRODUCT_DEPTH
    return Sm90Plan(
        block_h=BLOCK_H,
        block_n=block_n,
        pieces=pieces,
        registers=kernel.by_form.get(form_of(pieces), kernel.registers),
        scale_columns=scale_columns,
        cost=weighed(kernel.cost, pieces, partials),
        rows=tuple(rows or _default_calls(kernel, pieces, layout, narrow=block_n < BLOCK_N)),
        expected_shared=_tile_bytes(pieces, block_n) + tables,
        split_shared=2 * BLOCK_H * (1 if pieces.tail else 4) if partials.scaled else 0,  # of each row's halves
        expected_products=products,
    )


def _default_calls(
    kernel: Seesaw, pieces: RowPieces, layout: CacheLayout | None, *, narrow: bool
) -> tuple[Sm90Row, ...]:
    """Return the calls of an untuned spec that run a kernel."""
    measured = not narrow if kernel is DENSE_DECODE else pieces.d_v == D_V and pieces.tail in (0, SWIZZLED_COLUMNS)
    if measured and kernel.calls is not None:
        return kernel.calls
    unaligned = layout is not None and layout.loads_at < MOST_LOADED
    return kernel.unaligned_calls if unaligned else kernel.other_calls


def _tile_bytes(pieces: RowPieces, block_n: int) -> int:
    """Return the bytes of Q, two blocks of K, and P of both warpgroups, unless WG0's P uses the memory of a tail."""
    probs = BLOCK_H * block_n * (1 if p0_fits_tail(pieces, block_n) else 2)
    return ((BLOCK_H + 2 * block_n) * pieces.columns + probs) * ITEMSIZE
