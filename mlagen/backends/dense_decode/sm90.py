"""The sm90 kernels of dense decode: for caches of the model's dtype and of e4m3, and for few rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from mlagen.backends.parts.columns import PaddedSeesaw
from mlagen.backends.parts.common import Signature
from mlagen.backends.parts.gluon import (
    Sm90Kernel,
    Sm90Kernels,
    Sm90Module,
    SwapAbKernel,
    SwapAbModule,
    dividers,
    names_d_v,
    of_rope,
    p0_place,
    required,
    seesaw_shared,
    sm90_of,
    swap_ab_details,
)
from mlagen.backends.parts.grouped import shared
from mlagen.plan import DenseDecodePlan, Plan, Sm90Plan
from mlagen.plan.sm90.e4m3 import P_LOG2, P_MOST_LOG2
from mlagen.plan.sm90.kernel import E4M3_PRODUCT_DEPTH, PRODUCT_DEPTH, WARPS
from mlagen.plan.sm90.row_pieces import RowPieces
from mlagen.plan.splits import PartialRow
from mlagen.plan.targets import WARP_SIZE

WARPGROUP = WARPS * WARP_SIZE  # threads
SPLIT_ROWS = 8  # rows of Q that a warpgroup splits at a time, to limit spills


@dataclass(frozen=True)
class Partitioned(Sm90Kernel):
    """Facts that the templates of the kernels with whole rows take.

    Attributes:
        takes_pair: whether Q's RoPE columns are in another tensor.
        partials, row_floats: a row of a range's results, and the constant with its floats.
    """

    takes_pair: bool
    partials: PartialRow
    row_floats: str


@dataclass(frozen=True)
class Lengths:
    """The scheduler's reads of lengths.

    Attributes:
        block_b: lengths of a block.
        thread_lengths: lengths of a thread.
    """

    block_b: int
    thread_lengths: int


@dataclass(frozen=True)
class Kernel(Partitioned, PaddedSeesaw, Lengths):
    """Context of the template of the kernel over a cache of the model's dtype."""


@dataclass(frozen=True)
class OverE4m3(Partitioned):
    """Facts that the templates of the kernels over an e4m3 cache take.

    Attributes:
        pieces: widths of the row's parts.
        acc_columns, half_columns, result, v_end: see PaddedSeesaw.
        product_keys: keys of a product of P and V.
        chunks: products of a block.
        half_words: words of a half of a row.
        p_dtype, p_type, p_bits: dtype of P in words and in Gluon, and its size.
        p_most_log2, p_log2: bounds of P in e4m3: at most, and of a row's maximum when O is rescaled.
        v_said: how much of a block's V is in registers before its P in e4m3.
    """

    pieces: RowPieces
    acc_columns: str
    half_columns: str
    result: str
    v_end: str
    product_keys: int
    chunks: int
    half_words: int
    p_dtype: str
    p_type: str
    p_bits: int
    p_most_log2: float
    p_log2: int
    v_said: str


@dataclass(frozen=True)
class E4m3Kernel(OverE4m3, Lengths):
    """Context of the template of the kernel for 64 rows of an e4m3 Q."""


@dataclass(frozen=True)
class Rows32Kernel(OverE4m3):
    """Context of the template of the 32-row kernel. `dtype` is the model's."""

    dtype: str


@dataclass(frozen=True)
class QHalvesKernel(Rows32Kernel):
    """Context of the template of the kernel for a Q in two e4m3 halves. `split_rows` is SPLIT_ROWS."""

    split_rows: int


def _dense_decode_arguments(plan: Plan) -> Signature:
    """Return the arguments of the portable kernel without a window, with the divider of the page size."""
    element = f"*{plan.spec.model.dtype}"
    sizes = ("num_requests", "s_q", "num_heads", "num_kv_heads", "num_pages", "page_size")
    scheduler = ("unit_keys", "overhead", "combine_units", "num_programs", "later_slots", "num_rows")
    q_strides = tuple((f"{name}_stride", "i64") for name in ("q_request", "q_token", "q_head"))
    strides = ("page", "row", "k_head", "block_table", "out_token", "out_head", "lse_token")
    q = (("q_ptr", element),)
    cache = required(plan.layout)
    k_cache = (("k_cache_ptr", "*u8" if cache.quantised else element),)
    scales = (("q_scale_ptr", "*fp32"), ("k_scale_ptr", "*fp32")) if cache.tensor_scale else ()
    return (
        *(*q, *of_rope(plan, q), *k_cache, ("block_table_ptr", "*i32"), ("cache_seqlens_ptr", "*i32"), *scales),
        *(("out_ptr", element), ("lse_ptr", "*fp32"), ("partial_ptr", "*fp32")),
        *((name, "i32") for name in sizes),
        *dividers("page"),
        *((name, "i32") for name in ("max_keys", "causal", *scheduler)),
        *((name, "fp32") for name in ("sm_scale_log2", "empty_lse")),
        *(*q_strides, *of_rope(plan, q_strides)),
        *((f"{name}_stride", "i64") for name in strides),
    )


def _lengths(plan: Plan) -> Lengths:
    """Return the context of the scheduler's reads of lengths."""
    block_b = plan.of(DenseDecodePlan).block_b
    return Lengths(block_b, block_b // WARPGROUP)


def _splits_constants(plan: Plan, sm90: Sm90Plan) -> str:
    """Return the constants of `_splits` that a kernel's text names."""
    rounds = plan.splits.partials.rounds
    d_v = "D_V, " if names_d_v(sm90) or not rounds else ""
    return f"{d_v}NEG_LARGE{', PARTIAL_FLOATS' if rounds else ''}"


def _dense_decode_details(plan: Plan) -> dict[str, Any]:
    dense_decode, partials = plan.of(DenseDecodePlan), plan.splits.partials
    sm90 = required(dense_decode.sm90)
    return {
        "splits_constants": _splits_constants(plan, sm90),
        **vars(_lengths(plan)),
        "p0": p0_place(sm90),
        **vars(shared(*seesaw_shared(sm90, scaled=partials.scaled), ("q_ready", "k_ready"))),
    }


def _dense_e4m3_details(plan: Plan, sm90: Sm90Plan | None, *units: str) -> dict[str, Any]:
    """Further context of a kernel over e4m3; `units` names shared memory for the units of rows of Q."""
    sm90 = required(sm90)
    depth = E4M3_PRODUCT_DEPTH if sm90.v_ahead else PRODUCT_DEPTH
    chunks = sm90.block_n // depth
    p_dtype, p_type, p_bits = ("e4m3", "float8e4nv", 8) if sm90.v_ahead else ("fp16", "float16", 16)
    tails = ("q_tail", "k_tail") if sm90.d_tail else ()
    statistics = ("p0", "p1", "m0", "m1", "alpha0", "alpha1", "l0", "l1", *units)
    return {
        "splits_constants": _splits_constants(plan, sm90),
        "product_keys": depth,
        "chunks": chunks,
        "half_words": sm90.d_half // 4,
        "p_dtype": p_dtype,
        "p_type": p_type,
        "p_bits": p_bits,
        "p_most_log2": P_MOST_LOG2,
        "p_log2": P_LOG2,
        "v_said": "all of a block" if sm90.v_ahead == chunks else "half of a block",
        **vars(shared(("q_l", "q_r", "k_l", "k_r", *tails), statistics, ("k_ready",))),
    }


def _swap_ab(plan: Plan) -> tuple[Sm90Plan, ...]:
    family = plan.find(DenseDecodePlan)
    return family.sm90_swap_ab if family else ()


def _swap_ab_details(plan: Plan) -> dict[str, Any]:
    plans = _swap_ab(plan)
    return {
        "splits_constants": "D_V, NEG_LARGE" if names_d_v(plans[0]) else "NEG_LARGE",
        **swap_ab_details(plans, ("m0", "l0", "m1", "l1"), scaled=plan.splits.partials.scaled),
    }


def _dense_plan(plan: Plan, *, quantised: bool) -> Sm90Plan | None:
    layout = plan.layout
    return sm90_of(plan, DenseDecodePlan) if layout is not None and layout.quantised == quantised else None


def _rows32_plan(plan: Plan) -> Sm90Plan | None:
    return found.sm90_rows32 if (found := plan.find(DenseDecodePlan)) else None


def _q_halves_plan(plan: Plan) -> Sm90Plan | None:
    return found.sm90_q_halves if (found := plan.find(DenseDecodePlan)) else None


DENSE_DECODE = Sm90Module(
    module=DenseDecodePlan.SM90_KERNELS["sm90"],
    template="sm90/dense_decode",
    plan_of=functools.partial(_dense_plan, quantised=False),
    arguments=_dense_decode_arguments,
    details=_dense_decode_details,
    kind=Kernel,
)

DENSE_DECODE_E4M3 = Sm90Module(
    module=DenseDecodePlan.SM90_KERNELS["sm90"],
    template="sm90/dense_decode_e4m3",
    plan_of=functools.partial(_dense_plan, quantised=True),
    arguments=_dense_decode_arguments,
    details=lambda plan: {**_dense_e4m3_details(plan, _dense_plan(plan, quantised=True)), **vars(_lengths(plan))},
    kind=E4m3Kernel,
)

DENSE_DECODE_ROWS32 = Sm90Module(
    module=DenseDecodePlan.SM90_KERNELS["sm90_rows32"],
    template="sm90/dense_decode_e4m3_rows32",
    plan_of=_rows32_plan,
    arguments=_dense_decode_arguments,
    details=lambda plan: _dense_e4m3_details(plan, _rows32_plan(plan), "q_row_scale"),
    kind=Rows32Kernel,
)

DENSE_DECODE_Q_HALVES = Sm90Module(
    module=DenseDecodePlan.SM90_KERNELS["sm90_q_halves"],
    template="sm90/dense_decode_e4m3_q_halves",
    plan_of=_q_halves_plan,
    arguments=_dense_decode_arguments,
    details=lambda plan: {**_dense_e4m3_details(plan, _q_halves_plan(plan), "q_row_scale"), "split_rows": SPLIT_ROWS},
    kind=QHalvesKernel,
)

DENSE_DECODE_SWAP_AB = SwapAbModule(
    module=DenseDecodePlan.SM90_KERNELS["sm90_swap_ab"],
    template="sm90/dense_decode_swap_ab",
    plan_of=lambda plan: next(iter(_swap_ab(plan)), None),
    plans_of=_swap_ab,
    arguments=_dense_decode_arguments,
    details=_swap_ab_details,
    kind=SwapAbKernel,
    constexprs=("BLOCK_H",),
)

KERNELS: tuple[Sm90Kernels, ...] = (
    DENSE_DECODE,
    DENSE_DECODE_SWAP_AB,
    DENSE_DECODE_E4M3,
    DENSE_DECODE_ROWS32,
    DENSE_DECODE_Q_HALVES,
)
