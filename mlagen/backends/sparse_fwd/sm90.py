"""The sm90 kernels of sparse attention over rows: one row a token, swap-AB for few heads, and shared indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlagen.backends.parts.columns import PaddedSeesaw
from mlagen.backends.parts.common import Signature
from mlagen.backends.parts.gluon import (
    Rotation,
    Sm90Kernel,
    Sm90Kernels,
    Sm90Module,
    SwapAbKernel,
    SwapAbModule,
    dividers,
    of_rope,
    out_arguments,
    p0_place,
    required,
    rotation_arguments,
    rotation_of,
    seesaw_shared,
    sm90_of,
    swap_ab_details,
    topk_lengths,
)
from mlagen.backends.parts.grouped import Interface, interface, shared
from mlagen.backends.parts.splits import QuantisedOut, attention_context
from mlagen.plan import IndexUnionPlan, Plan, Sm90Plan, SparseFwdPlan
from mlagen.plan.sm90.index_union import MODULE as UNION_MODULE
from mlagen.plan.splits import PartialRow


@dataclass(frozen=True)
class OverRows:
    """Facts that the templates of the kernels over rows take.

    Attributes:
        takes_pair: whether Q's RoPE columns are in another tensor.
        has_sink: whether attention may take a sink.
        paged, page_rows: whether rows lie in pages, and rows of a page; None: rows lie in no pages.
        shapes: shapes of the arguments, for docstrings.
    """

    takes_pair: bool
    has_sink: bool
    paged: bool
    page_rows: int | None
    shapes: Sequence[str]


@dataclass(frozen=True)
class OverIndices:
    """Facts that the templates of the kernels over splits of indices take.

    Attributes:
        d_v: columns of V.
        partials: a row of a split's results.
        has_topk_length, length_required: whether attention may take lengths of index lists, and whether it must.
        rotation, out_quant: the rotation and the quantisation of the output; None without.
    """

    d_v: int
    partials: PartialRow
    has_topk_length: bool
    length_required: bool
    rotation: Rotation | None
    out_quant: QuantisedOut | None


@dataclass(frozen=True)
class Kernel(Sm90Kernel, PaddedSeesaw, OverRows, OverIndices):
    """Context of the template of the kernel with one row a token. `words` are names of a warp's indices."""

    words: Sequence[str]


@dataclass(frozen=True)
class SwapAbOverRows(SwapAbKernel, OverRows, OverIndices):
    """Context of the template of the swap-AB kernel."""


@dataclass(frozen=True)
class SharedIndicesKernel(Sm90Kernel, PaddedSeesaw, OverRows):
    """Context of the template of the kernel with shared indices. `union` is the plan of index unions."""

    union: IndexUnionPlan


@dataclass(frozen=True)
class UnionKernel(Interface):
    """Context of the template of the kernel that builds index unions.

    Attributes:
        has_topk_length, length_required: whether attention may take lengths of index lists, and whether it must.
        kernel: name of the kernel.
        union: the plan of index unions.
    """

    has_topk_length: bool
    length_required: bool
    kernel: str
    union: IndexUnionPlan


def _sparse_fwd_arguments(plan: Plan) -> Signature:
    attention = plan.sparse_attention
    element = f"*{plan.spec.model.dtype}"
    sink = (("attn_sink_ptr", "*fp32"),) if attention.attn_sink != "none" else ()
    page = (("kv_page_stride", "i64"),) if plan.rows_block_size is not None else ()
    sizes = ("s_kv", "topk", "num_heads", "num_splits", "split_size", "num_tiles", "head_blocks")
    angles, num_positions, angle_strides = rotation_arguments(plan)
    out, last = out_arguments(plan, "i64")
    q, q_strides = (("q_ptr", element),), (("q_token_stride", "i64"), ("q_head_stride", "i64"))
    return (
        *q,
        *of_rope(plan, q),
        ("kv_ptr", element),
        ("indices_ptr", "*i32"),
        *topk_lengths(plan),
        *sink,
        *angles,
        *out,
        ("max_logits_ptr", "*fp32"),
        ("lse_ptr", "*fp32"),
        ("partial_ptr", "*fp32"),
        *num_positions,
        *((name, "i32") for name in sizes),
        *dividers("head_blocks", "splits"),
        ("sm_scale_log2", "fp32"),
        *q_strides,
        *of_rope(plan, q_strides),
        *page,
        ("kv_row_stride", "i64"),
        ("indices_token_stride", "i64"),
        *angle_strides,
        *last,
    )


def _rows_details(plan: Plan) -> dict[str, Any]:
    """Further context of the kernels over rows."""
    dtype, page_rows = plan.spec.model.dtype, plan.rows_block_size
    rows = f"kv pages of {page_rows} rows" if page_rows is not None else "kv rows"
    return {
        "paged": page_rows is not None,
        "page_rows": page_rows,
        "shapes": [
            f"q [tokens, num_heads, {plan.d_qk}], {rows} of {plan.d_qk} columns: {dtype}.",
            f"out [tokens, num_heads, {plan.d_v}] likewise."
            if plan.out_quant is None
            else "out and out_scales: see `_splits.quantised_output`.",
            "indices i32 [tokens, topk]. max_logits, lse f32 [tokens, num_heads].",
        ],
    }


def _sparse_fwd_details(plan: Plan) -> dict[str, Any]:
    sm90, scaled = required(plan.of(SparseFwdPlan).sm90), plan.splits.partials.scaled
    return {
        **_rows_details(plan),
        "rotation": rotation_of(plan, sm90),
        "p0": p0_place(sm90),
        **vars(shared(*seesaw_shared(sm90, "true_max0", "true_max1", scaled=scaled), ("q_ready", "k_ready"))),
    }


SPARSE_FWD = Sm90Module(
    module=SparseFwdPlan.SM90_KERNELS["sm90"],
    template="sm90/sparse_fwd",
    plan_of=lambda plan: sm90_of(plan, SparseFwdPlan),
    arguments=_sparse_fwd_arguments,
    details=_sparse_fwd_details,
    kind=Kernel,
)


def _sparse_swap_ab(plan: Plan) -> tuple[Sm90Plan, ...]:
    family = plan.find(SparseFwdPlan)
    return family.sm90_swap_ab if family else ()


def _swap_ab_details(plan: Plan) -> dict[str, Any]:
    statistics = ("m0", "l0", "true_max0", "m1", "l1", "true_max1")
    scaled = plan.splits.partials.scaled
    plans = _sparse_swap_ab(plan)
    return {
        **_rows_details(plan),
        "rotation": rotation_of(plan, plans[0]),
        **swap_ab_details(plans, statistics, scaled=scaled),
    }


def _swap_ab_arguments(plan: Plan) -> Signature:
    """Return the arguments of the swap-AB kernel over rows. A program has all heads."""
    left_out = {"head_blocks", *dict(dividers("head_blocks"))}
    return tuple(argument for argument in _sparse_fwd_arguments(plan) if argument[0] not in left_out)


SWAP_AB = SwapAbModule(
    module=SparseFwdPlan.SM90_KERNELS["sm90_swap_ab"],
    template="sm90/sparse_fwd_swap_ab",
    plan_of=lambda plan: next(iter(_sparse_swap_ab(plan)), None),
    plans_of=_sparse_swap_ab,
    arguments=_swap_ab_arguments,
    details=_swap_ab_details,
    kind=SwapAbOverRows,
    constexprs=("BLOCK_H",),
)


def _union_arguments(plan: Plan) -> Signature:
    """Return the arguments of shared-index prefill: those over rows, with index unions and without splits."""
    left_out = {"topk_length_ptr", "partial_ptr", "s_kv", "topk", "num_splits", "split_size", "indices_token_stride"}
    left_out |= {"head_blocks", *dict(dividers("head_blocks", "splits"))}
    instead = {
        "indices_ptr": (("union_ptr", "*i32"), ("union_length_ptr", "*i32"), ("recompute_ptr", "*i32")),
        "num_heads": (("tokens", "i32"), ("num_heads", "i32")),
        "kv_row_stride": (("kv_row_stride", "i64"), ("union_stride", "i64")),
    }
    kept = [argument for argument in _sparse_fwd_arguments(plan) if argument[0] not in left_out]
    return tuple(each for argument in kept for each in instead.get(argument[0], (argument,)))


def _union_details(plan: Plan) -> dict[str, Any]:
    union = required(plan.union)
    details = _rows_details(plan)
    return {
        **details,
        "union": union,
        "scaled": False,  # it has no partials
        "p0": p0_place(union.sm90),
        **vars(shared(*seesaw_shared(union.sm90, "true_max0", "true_max1"), ("q_ready", "k_ready"))),
        "shapes": [
            *details["shapes"][:2],
            f"union i32 [num_tiles, {union.group} * topk], of which union_length i32 [num_tiles] entries count.",
            "max_logits, lse f32 [tokens, num_heads]. recompute i32 [num_tiles] becomes 1 where a result is NaN.",
        ],
    }


SHARED_FWD = Sm90Module(
    module=SparseFwdPlan.SM90_KERNELS["sm90_shared"],
    template="sm90/sparse_fwd_shared",
    plan_of=lambda plan: plan.union.sm90 if plan.union else None,
    arguments=_union_arguments,
    details=_union_details,
    kind=SharedIndicesKernel,
)


class UnionLists:
    """The generated module with the kernel that builds index unions."""

    module = UNION_MODULE
    template = "sm90/index_union"

    def present(self, plan: Plan) -> bool:
        """Whether the package has the kernel."""
        return plan.union is not None

    def arguments(self, plan: Plan) -> Signature:
        """Run-time arguments and their Triton types, with the optional tensor given."""
        return (
            ("indices_ptr", "*i32"),
            *topk_lengths(plan),
            ("union_ptr", "*i32"),
            ("union_length_ptr", "*i32"),
            ("recompute_ptr", "*i32"),
            ("tokens", "i32"),
            ("topk", "i32"),
            ("s_kv", "i32"),
            ("indices_token_stride", "i64"),
        )

    def context(self, plan: Plan) -> Mapping[str, object]:
        """Template context."""
        context = UnionKernel(
            **vars(interface(self.arguments(plan))),
            **attention_context(plan, UnionKernel),
            kernel="_index_union_kernel",
            union=required(plan.union),
        )
        return vars(context)

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """None: the kernel has no matrix products."""
        return {}


KERNELS: tuple[Sm90Kernels, ...] = (SPARSE_FWD, SWAP_AB, UnionLists(), SHARED_FWD)
