"""The sm90 kernels of sparse decode: one for each kind of row, and one for e4m3 Q over an e4m3 cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlagen.backends.parts.columns import Seesaw
from mlagen.backends.parts.common import Signature
from mlagen.backends.parts.gluon import (
    Rotation,
    Sm90Kernel,
    Sm90Kernels,
    Sm90Module,
    constants_of_splits,
    dividers,
    of_rope,
    out_arguments,
    required,
    rotation_arguments,
    rotation_of,
    seesaw_shared,
    sm90_of,
    topk_lengths,
)
from mlagen.backends.parts.grouped import shared
from mlagen.backends.parts.splits import QuantisedOut
from mlagen.layout import CacheLayout
from mlagen.plan import Plan, Sm90Plan, SparseDecodePlan
from mlagen.plan.sm90.kernel import PRODUCT_DEPTH
from mlagen.plan.sm90.seesaw import FP16_Q, FP16_SCALES
from mlagen.plan.sm90.stored import StoredRows
from mlagen.plan.splits import PartialRow

EXPONENT_BIAS, BF16_MANTISSA, FP32_MANTISSA = 127, 7, 23  # one exponent bias for fp32, bf16 and ue8m0


@dataclass(frozen=True)
class Power:
    """A power of two.

    Attributes:
        exponent: its exponent.
        bits: its bits in a format with 8 exponent bits, as text.
    """

    exponent: int
    bits: str


@dataclass(frozen=True)
class OverCache(Sm90Kernel):
    """Facts that the templates of all kernels take.

    Attributes:
        d_v: columns of V.
        layout: the cache's layout.
        partials: a row of a split's results.
        has_sink: whether attention may take a sink.
        has_topk_length, length_required: whether it may take lengths of index lists, and whether it must.
        shapes: shapes of the arguments, for docstrings.
    """

    d_v: int
    layout: CacheLayout
    partials: PartialRow
    has_sink: bool
    has_topk_length: bool
    length_required: bool
    shapes: Sequence[str]


@dataclass(frozen=True)
class Kernel(OverCache, Seesaw):
    """Context of the template of a kernel for a Q of the model's dtype.

    Attributes:
        takes_pair: whether Q's RoPE columns are in another tensor.
        q_ready: barrier of Q, as text.
        dual_cache: whether there is a second cache.
        stored: the cache's rows.
        scale_form: form of a token's largest scale, in comments.
        scale_limits, q_limits: the least and the largest scale and value of Q for products in fp16.
        rotation, out_quant: the rotation and the quantisation of the output; None without.
    """

    takes_pair: bool
    q_ready: str
    dual_cache: bool
    stored: StoredRows
    scale_form: str
    scale_limits: Sequence[Power]
    q_limits: Sequence[Power]
    rotation: Rotation | None
    out_quant: QuantisedOut | None


@dataclass(frozen=True)
class TwoLayoutsKernel(Kernel):
    """Context of the template of the kernel over two layouts. `extra_layout` is that of the second cache."""

    extra_layout: CacheLayout


@dataclass(frozen=True)
class E4m3Kernel(OverCache):
    """Context of the template of the kernel for an e4m3 Q.

    Attributes:
        product_keys: keys of a product of P and V.
        chunks: products of a block.
        half_words: words of a half of a row.
    """

    product_keys: int
    chunks: int
    half_words: int


def _power(exponent: int, mantissa: int) -> Power:
    """Return a power of two and its bits in a format with 8 exponent bits, in hex if there is a mantissa."""
    bits = exponent + EXPONENT_BIAS << mantissa
    return Power(exponent, f"0x{bits:04X}" if mantissa else str(bits))


# Shapes of the arguments of attention over a cache, except q and out.
REST_OF_SHAPES = (
    "requests * s_q. indices i32 [requests, s_q, topk], lengths i32 [requests], lse f32 [tokens, num_heads]."
)


def _arguments(plan: Plan) -> Signature:
    """Return the arguments of the sm90 kernel of sparse decode."""
    attention = plan.sparse_attention
    element = f"*{plan.spec.model.dtype}"
    sink = (("attn_sink_ptr", "*fp32"),) if attention.attn_sink != "none" else ()
    q = (("q_ptr", element),)
    q_strides = (("q_request_stride", "i64"), ("q_token_stride", "i64"), ("q_head_stride", "i32"))
    inputs: list[tuple[str, str]] = [*q, *of_rope(plan, q)]
    sizes: list[tuple[str, str]] = []
    strides = [*q_strides, *of_rope(plan, q_strides)]
    second = [] if plan.extra_layout is None else [("extra_", plan.extra_layout)]
    for prefix, one in (("", required(plan.layout)), *second):
        inputs += [(f"{prefix}k_cache_ptr", "*u8"), (f"{prefix}indices_ptr", "*i32")]
        inputs += [(f"{prefix}{name}", kind) for name, kind in topk_lengths(plan)]
        inputs += [(f"{prefix}k_scale_ptr", "*fp32")] if one.tensor_scale else []
        sizes += [(f"{prefix}{name}", "i32") for name in ("num_slots", "page_size", "topk")]
        rows = () if one.planar else ("row_stride",)
        strides += [(f"{prefix}{name}", "i64") for name in ("page_stride", *rows, "indices_request_stride")]
        strides.append((f"{prefix}indices_token_stride", "i32"))
    sizes += [(name, "i32") for name in ("s_q", "num_heads", "first_token", "num_splits", "split_size", "num_tiles")]
    sizes.append(("head_blocks", "i32"))
    angles, num_positions, angle_strides = rotation_arguments(plan)
    out, last = out_arguments(plan, "i32")
    pages = [f"{prefix}page" for prefix, _ in (("", plan.layout), *second)]
    return (
        *inputs,
        *sink,
        *angles,
        *out,
        ("lse_ptr", "*fp32"),
        ("partial_ptr", "*fp32"),
        *num_positions,
        *sizes,
        *dividers("head_blocks", "splits", "s_q", *pages),
        ("sm_scale_log2", "fp32"),
        *strides,
        *angle_strides,
        *last,
    )


def _sparse_decode_details(plan: Plan) -> dict[str, Any]:
    layout, extra_layout = required(plan.layout), plan.extra_layout
    sm90, scaled = required(plan.of(SparseDecodePlan).sm90), plan.splits.partials.scaled
    other = None if extra_layout == layout else extra_layout
    stored = StoredRows(sm90, layout, other, dual=extra_layout is not None)
    is_fp32 = stored.tensor_scale or stored.scales.dtype == "fp32"
    staged = ("rope", "last") if layout.planar else ()
    ready = ("ready",) if stored.copies_tail else ("q_ready", "k_ready")
    scales = ("scales",) if sm90.scale_columns else ()
    tables = ("overflowed", "offsets", *scales, *staged, "mask_bitmask")
    return {
        "q_ready": "shared.ready.index(2)" if stored.copies_tail else "shared.q_ready",
        "p0": "_p0(shared)" if sm90.p0_in_tail else "shared.p0",
        "splits_constants": constants_of_splits(plan, d_v=True),
        **vars(shared(*seesaw_shared(sm90, scaled=scaled), tables, ready)),
        "dual_cache": stored.dual,
        **({"extra_layout": other} if other else {}),
        "stored": stored,
        "rotation": rotation_of(plan, sm90),
        "scale_form": "its bits as fp32" if is_fp32 else "its biased exponent",
        "scale_limits": [_power(exponent, FP32_MANTISSA if is_fp32 else 0) for exponent in FP16_SCALES],
        "q_limits": [_power(exponent, BF16_MANTISSA) for exponent in FP16_Q],
        "shapes": [
            *_said_q_and_out(plan),
            REST_OF_SHAPES,
        ],
    }


def _said_q_and_out(plan: Plan) -> list[str]:
    """Return the shapes of q and out, for docstrings."""
    q, dtype = f"q [requests, s_q, num_heads, {plan.d_qk}]", plan.spec.model.dtype
    if plan.out_quant:
        return [f"q {dtype} {q[2:]}. out and out_scales: see `_splits.quantised_output`. tokens is"]
    return [f"{q}, out [tokens, num_heads, {plan.d_v}]: {dtype}, where tokens is"]


def _rows_of(plan: Plan) -> str:
    """Return the kind of row that the caches hold: the suffix of its kernel's template."""
    layout, extra_layout = required(plan.layout), plan.extra_layout
    if layout.planar:
        return "_two_planes"
    if extra_layout not in (None, layout):
        return "_two_layouts"
    return "_tensor_scale" if layout.tensor_scale else ""


def _module(rows: str) -> Sm90Module:
    """Return the module with the kernel over these rows."""

    def plan_of(plan: Plan) -> Sm90Plan | None:
        sm90 = sm90_of(plan, SparseDecodePlan)
        return sm90 if sm90 and _rows_of(plan) == rows else None

    template = f"sm90/sparse_decode{rows}"
    return Sm90Module(
        module=SparseDecodePlan.SM90_KERNELS["sm90"],
        template=template,
        plan_of=plan_of,
        arguments=_arguments,
        details=_sparse_decode_details,
        kind=TwoLayoutsKernel if rows == "_two_layouts" else Kernel,
    )


def _e4m3_arguments(plan: Plan) -> Signature:
    """Return the arguments: those for a Q of the model's dtype, with Q's bytes and its scale."""
    found: list[tuple[str, str]] = []
    for name, kind in _arguments(plan):
        found.append((name, "*u8" if name in ("q_ptr", "q_rope_ptr") else kind))
        if name == "k_scale_ptr":
            found.append(("q_scale_ptr", "*fp32"))
    return tuple(found)


def _details(plan: Plan) -> dict[str, Any]:
    sm90 = required(plan.of(SparseDecodePlan).sm90_e4m3)
    tiles = ("q_l", "q_r", "k_l", "k_r", "q_tail", "k_tail")
    statistics = ("p0", "p1", "m0", "m1", "alpha0", "alpha1", "l0", "l1")
    return {
        "splits_constants": "D_V, NEG_LARGE",
        "product_keys": PRODUCT_DEPTH,
        "chunks": sm90.block_n // PRODUCT_DEPTH,
        "half_words": sm90.d_half // 4,
        **vars(shared(tiles, statistics, ("q_ready", "k_ready"))),
        "shapes": [
            f"q e4m3 [requests, s_q, num_heads, {plan.d_qk}], q_scale f32 [1].",
            f"out {plan.spec.model.dtype} [tokens, num_heads, {plan.d_v}], where tokens is",
            REST_OF_SHAPES,
        ],
    }


SPARSE_DECODE_E4M3 = Sm90Module(
    module=SparseDecodePlan.SM90_KERNELS["sm90_e4m3"],
    template="sm90/sparse_decode_e4m3",
    plan_of=lambda plan: found.sm90_e4m3 if (found := plan.find(SparseDecodePlan)) else None,
    arguments=_e4m3_arguments,
    details=_details,
    kind=E4m3Kernel,
)

KERNELS: tuple[Sm90Kernels, ...] = (
    *map(_module, ("", "_tensor_scale", "_two_layouts", "_two_planes")),
    SPARSE_DECODE_E4M3,
)
