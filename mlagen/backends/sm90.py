"""The Gluon back end: the sm90 kernels, each a module beside the portable kernels of its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlagen.backends.triton.common import Signature
from mlagen.backends.triton.splits import attention_context, dense_decode_signature
from mlagen.plan import (
    SM90,
    DenseDecodePlan,
    DenseFwdPlan,
    Plan,
    Sm90Plan,
    SparseDecodePlan,
    SparseFwdPlan,
)
from mlagen.plan.sm90 import FP16_Q, FP16_SCALES, SLACK, DenseFwdSm90Plan
from mlagen.work import ITEMSIZE

TEMPLATE = "sm90/seesaw"
EXPONENT_BIAS, BF16_MANTISSA, FP32_MANTISSA = 127, 7, 23  # of fp32, bf16 and, without a mantissa, ue8m0


@dataclass(frozen=True)
class Sm90Module:
    """A generated module with the sm90 kernel of one family, as the list of a package's modules takes it.

    Attributes:
        MODULE: its name.
        kernel: the kernel's.
        family: what the family computes, in words.
        has_max_logits: the family gives the row's maximum logits.
        plan_of: the kernel's numbers; None where the spec does without.
        arguments: run-time arguments and their Triton types, with every optional tensor given.
        details: what the family's template asks for beside.
    """

    MODULE: str
    kernel: str
    family: str
    has_max_logits: bool
    plan_of: Callable[[Plan], Sm90Plan | None]
    arguments: Callable[[Plan], Signature]
    details: Callable[[Plan], dict[str, Any]]

    TEMPLATE = TEMPLATE

    def present(self, plan: Plan) -> bool:
        """Whether the spec has the kernel."""
        return self.plan_of(plan) is not None

    def numbers(self, plan: Plan) -> Sm90Plan:
        """The kernel's numbers. Raises LookupError: the spec does without."""
        sm90 = self.plan_of(plan)
        if sm90 is None:
            raise LookupError(f"{plan.spec.name} has no {self.kernel}")
        return sm90

    def context(self, plan: Plan) -> dict[str, Any]:
        """What the template asks for."""
        sm90 = self.numbers(plan)
        tail = ["q_tail", "k0_tail", "k1_tail"] if sm90.d_tail else []
        details = self.details(plan)
        scaled = plan.splits.partials.scaled and not details.get("union")  # unions have no partials
        return {
            **attention_context(plan),
            "sm90": sm90,
            "family": self.family,
            "kernel": self.kernel,
            "has_max_logits": self.has_max_logits,
            "arguments": self.arguments(plan),
            "slack": SLACK,
            "union": None,
            "swap_ab": False,
            **details,
            "scaled": scaled,
            "shared": [
                *("q_left", "q_right", "k0_left", "k0_right", "k1_left", "k1_right", *(tail or ["p0"]), "p1"),
                *("m0", "m1", "l0", "l1", *(("top0", "top1") if self.has_max_logits else ())),
                *(("e0", "e1") if scaled else ()),
                *details["shared"],
            ],
        }

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """Warpgroup products in the kernel's code, as `expected_products` takes them."""
        return {(self.kernel, None): self.numbers(plan).expected_products}


def _sm90_of(plan: Plan, kind: type[SparseFwdPlan | SparseDecodePlan | DenseDecodePlan]) -> Sm90Plan | None:
    """The numbers of a family's sm90 kernel; None where the spec does without."""
    found = plan.find(kind)
    return found.sm90 if found else None


def _length(plan: Plan) -> Signature:
    return (("topk_length_ptr", "*i32"),) if plan.sparse_attention.topk_length != "none" else ()


def _dividers(*names: str) -> Signature:
    """How the sm90 kernel divides by what is known at run time alone: `_launch.divider` of each."""
    return tuple((f"{name}_{part}", "i32") for name in names for part in ("multiplier", "shift"))


def _sparse_fwd_arguments(plan: Plan) -> Signature:
    attention = plan.sparse_attention
    element = f"*{plan.spec.model.dtype}"
    sink = (("attn_sink_ptr", "*fp32"),) if attention.attn_sink != "none" else ()
    page = (("kv_page_stride", "i64"),) if plan.rows_block_size is not None else ()
    sizes = ("s_kv", "topk", "num_heads", "num_splits", "split_size", "num_tiles", "head_blocks")
    return (
        ("q_ptr", element),
        ("kv_ptr", element),
        ("indices_ptr", "*i32"),
        *_length(plan),
        *sink,
        ("out_ptr", element),
        ("max_logits_ptr", "*fp32"),
        ("lse_ptr", "*fp32"),
        ("partial_ptr", "*fp32"),
        *((name, "i32") for name in sizes),
        *_dividers("head_blocks", "splits"),
        ("sm_scale_log2", "fp32"),
        ("q_token_stride", "i64"),
        ("q_head_stride", "i64"),
        *page,
        ("kv_row_stride", "i64"),
        ("indices_token_stride", "i64"),
        ("out_token_stride", "i64"),
        ("out_head_stride", "i64"),
    )


def _sparse_fwd_details(plan: Plan) -> dict[str, Any]:
    dtype = plan.spec.model.dtype
    paged = plan.rows_block_size is not None
    rows = f"kv pages of {plan.rows_block_size} rows" if paged else "kv rows"
    return {
        "dequantises": False,
        "second": False,
        "q_ready": "shared.q_ready",
        "shared": ("q_ready", "k_ready"),
        "paged": paged,
        "page_rows": plan.rows_block_size,
        "rows_name": "s_kv",
        "shapes": [
            f"q [tokens, num_heads, {plan.d_qk}], {rows} of {plan.d_qk} lanes: {dtype}.",
            f"out [tokens, num_heads, {plan.d_v}] likewise.",
            "indices i32 [tokens, topk]. max_logits, lse f32 [tokens, num_heads].",
        ],
    }


SPARSE_FWD = Sm90Module(
    MODULE="_sparse_fwd_sm90",
    kernel="_sparse_fwd_sm90_kernel",
    family="sparse attention",
    has_max_logits=True,
    plan_of=lambda plan: _sm90_of(plan, SparseFwdPlan),
    arguments=_sparse_fwd_arguments,
    details=_sparse_fwd_details,
)


class SwapAbModule(Sm90Module):
    """The generated module with the sm90 kernel of few heads, which stand in the columns of its products."""

    TEMPLATE = "sm90/sparse_fwd_swap_ab"

    def context(self, plan: Plan) -> dict[str, Any]:
        """What the template asks for."""
        values = super().context(plan)
        tails = ("q_tail", "k_tail") if values["sm90"].d_tail else ()
        statistics = ("m0", "l0", "top0", "m1", "l1", "top1")
        exponents = ("exponents0", "exponents1") if values["scaled"] else ()
        halves = ("q_left", "q_right", "k_left", "k_right")
        return {
            **values,
            "swap_ab": True,
            "widths": [sm90.block_h for sm90 in plan.of(SparseFwdPlan).swap_ab],
            "statistics": statistics,
            "shared": [*halves, *tails, *statistics, *exponents, "q_ready", "left_ready", "right_ready"],
        }

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """Those of each number of heads that a program holds."""
        return {(self.kernel, one.block_h): one.expected_products for one in plan.of(SparseFwdPlan).swap_ab}


def _swap_ab_arguments(plan: Plan) -> Signature:
    """Those of the other sm90 kernel over rows; a program holds all heads."""
    left_out = {"head_blocks", *dict(_dividers("head_blocks"))}
    return tuple(argument for argument in _sparse_fwd_arguments(plan) if argument[0] not in left_out)


SWAP_AB = SwapAbModule(
    MODULE="_sparse_fwd_sm90_swap_ab",
    kernel="_sparse_fwd_sm90_swap_ab_kernel",
    family="sparse attention",
    has_max_logits=True,
    plan_of=lambda plan: next(iter(found.swap_ab), None) if (found := plan.find(SparseFwdPlan)) else None,
    arguments=_swap_ab_arguments,
    details=_sparse_fwd_details,
)


def _sparse_decode_arguments(plan: Plan) -> Signature:
    attention = plan.sparse_attention
    element = f"*{plan.spec.model.dtype}"
    sink = (("attn_sink_ptr", "*fp32"),) if attention.attn_sink != "none" else ()
    inputs: list[tuple[str, str]] = [("q_ptr", element)]
    sizes: list[tuple[str, str]] = []
    strides = [("q_request_stride", "i64"), ("q_token_stride", "i64"), ("q_head_stride", "i32")]
    caches = plan.of(SparseDecodePlan).caches
    second = [("extra_", caches.extra.layout)] if caches.extra else []
    for prefix, one in (("", caches.main.layout), *second):
        inputs += [(f"{prefix}k_cache_ptr", "*u8"), (f"{prefix}indices_ptr", "*i32")]
        inputs += [(f"{prefix}{name}", kind) for name, kind in _length(plan)]
        sizes += [(f"{prefix}{name}", "i32") for name in ("num_slots", "page_size", "topk")]
        rows = () if one.planar else ("row_stride",)
        strides += [(f"{prefix}{name}", "i64") for name in ("page_stride", *rows, "indices_request_stride")]
        strides.append((f"{prefix}indices_token_stride", "i32"))
    sizes += [(name, "i32") for name in ("s_q", "num_heads", "first_token", "num_splits", "split_size", "num_tiles")]
    sizes.append(("head_blocks", "i32"))
    pages = [f"{prefix}page" for prefix, _ in (("", caches.main.layout), *second)]
    return (
        *inputs,
        *sink,
        ("out_ptr", element),
        ("lse_ptr", "*fp32"),
        ("partial_ptr", "*fp32"),
        *sizes,
        *_dividers("head_blocks", "splits", "s_q", *pages),
        ("sm_scale_log2", "fp32"),
        *strides,
        ("out_token_stride", "i32"),
        ("out_head_stride", "i32"),
    )


def _power(exponent: int, mantissa: int) -> dict[str, Any]:
    """A power of two, and its bits in a format of 8 bits of exponent and so many of mantissa, hex if there are any."""
    bits = exponent + EXPONENT_BIAS << mantissa
    return {"exponent": exponent, "bits": f"0x{bits:04X}" if mantissa else str(bits)}


def _sparse_decode_details(plan: Plan) -> dict[str, Any]:
    dtype = plan.spec.model.dtype
    caches = plan.of(SparseDecodePlan).caches
    layout, other = caches.main.layout, caches.other.layout if caches.other else None
    latent, *tail = layout.data
    scales = layout.scales_of(latent)
    assert scales is not None
    sm90 = SPARSE_DECODE.numbers(plan)
    staged = ("rope", "last") if layout.planar else ()
    ready = ("ready",) if sm90.d_tail else ("q_ready", "k_ready")
    return {
        "dequantises": True,
        "q_ready": "shared.ready.index(2)" if sm90.d_tail else "shared.q_ready",
        "shared": ("spoilt", "offsets", "scales", *staged, "valid", *ready),
        "paged": False,
        "second": plan.extra_layout is not None,
        "planar": layout.planar,
        "mixed": other is not None,
        "scales": scales,
        "extra_layout": plan.extra_layout,
        "extra_scales": other.scales_of(other.data[0]) if other else None,
        "scale_limits": [_power(exponent, FP32_MANTISSA if scales.dtype == "fp32" else 0) for exponent in FP16_SCALES],
        "q_limits": [_power(exponent, BF16_MANTISSA) for exponent in FP16_Q],
        "scale_columns": sm90.scale_columns,
        "tail": tail[0] if tail else None,
        "shapes": [
            f"q [requests, s_q, num_heads, {plan.d_qk}], out [tokens, num_heads, {plan.d_v}]: {dtype}, where tokens is",
            "requests * s_q. indices i32 [requests, s_q, topk], lengths i32 [requests], lse f32 [tokens, num_heads].",
        ],
    }


def _union_arguments(plan: Plan) -> Signature:
    """Those of the sm90 kernel over rows, with lists in place of indices, and without splits."""
    left_out = {"topk_length_ptr", "partial_ptr", "s_kv", "topk", "num_splits", "split_size", "indices_token_stride"}
    left_out |= {"head_blocks", *dict(_dividers("head_blocks", "splits"))}
    instead = {
        "indices_ptr": (("lists_ptr", "*i32"), ("counts_ptr", "*i32"), ("redo_ptr", "*i32")),
        "num_heads": (("tokens", "i32"), ("num_heads", "i32")),
        "kv_row_stride": (("kv_row_stride", "i64"), ("list_stride", "i64")),
    }
    kept = [argument for argument in _sparse_fwd_arguments(plan) if argument[0] not in left_out]
    return tuple(each for argument in kept for each in instead.get(argument[0], (argument,)))


def _union_details(plan: Plan) -> dict[str, Any]:
    union = plan.union
    assert union is not None
    details = _sparse_fwd_details(plan)
    return {
        **details,
        "union": union,
        "shapes": [
            *details["shapes"][:2],
            f"lists i32 [num_tiles, {union.group} * topk], of which so many entries count: counts i32 [num_tiles].",
            "max_logits, lse f32 [tokens, num_heads]. redo i32 [num_tiles] becomes 1 where a result is NaN.",
        ],
    }


SHARED_FWD = Sm90Module(
    MODULE="_sparse_fwd_sm90_shared",
    kernel="_sparse_fwd_sm90_shared_kernel",
    family="sparse attention with shared rows",
    has_max_logits=True,
    plan_of=lambda plan: plan.union.sm90 if plan.union else None,
    arguments=_union_arguments,
    details=_union_details,
)


class UnionLists:
    """The generated module with the kernel that makes the lists of groups of tokens."""

    MODULE = "_index_union_sm90"
    TEMPLATE = "sm90/index_union"

    def present(self, plan: Plan) -> bool:
        """Whether the spec has the kernel."""
        return plan.union is not None

    def arguments(self, plan: Plan) -> Signature:
        """Run-time arguments and their Triton types, with the optional tensor given."""
        return (
            ("indices_ptr", "*i32"),
            *_length(plan),
            ("lists_ptr", "*i32"),
            ("counts_ptr", "*i32"),
            ("redo_ptr", "*i32"),
            ("tokens", "i32"),
            ("topk", "i32"),
            ("s_kv", "i32"),
            ("indices_token_stride", "i64"),
        )

    def context(self, plan: Plan) -> dict[str, Any]:
        """What the template asks for."""
        return {**attention_context(plan), "union": plan.union, "arguments": self.arguments(plan)}

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """None: it multiplies nothing."""
        return {}


INDEX_UNION = UnionLists()


SPARSE_DECODE = Sm90Module(
    MODULE="_sparse_decode_sm90",
    kernel="_sparse_decode_sm90_kernel",
    family="attention over a cache",
    has_max_logits=False,
    plan_of=lambda plan: _sm90_of(plan, SparseDecodePlan),
    arguments=_sparse_decode_arguments,
    details=_sparse_decode_details,
)


def _dense_decode_arguments(plan: Plan) -> Signature:
    """Those of the portable kernel, and how the sm90 kernel divides by a page's size."""
    arguments = dense_decode_signature(plan)
    behind = [name for name, _ in arguments].index("page_size") + 1
    return (*arguments[:behind], *_dividers("page"), *arguments[behind:])


def _dense_decode_details(plan: Plan) -> dict[str, Any]:
    return {
        "dequantises": False,
        "second": False,
        "q_ready": "shared.q_ready",
        "shared": ("q_ready", "k_ready"),
        "paged": False,
        "plan": plan.of(DenseDecodePlan),
        "shapes": [],
    }


DENSE_DECODE = Sm90Module(
    MODULE="_dense_decode_sm90",
    kernel="_dense_decode_sm90_kernel",
    family="dense attention over a paged cache",
    has_max_logits=False,
    plan_of=lambda plan: _sm90_of(plan, DenseDecodePlan),
    arguments=_dense_decode_arguments,
    details=_dense_decode_details,
)


@dataclass(frozen=True)
class DenseFwdModule:
    """The generated module with the sm90 kernel of multi-head attention.

    Attributes:
        context_of: what the family's template asks for.
        signature: run-time arguments of the portable kernel that loads by pointers, and their Triton types.
    """

    context_of: Callable[[Plan], dict[str, Any]]
    signature: Callable[[Plan], Signature]

    MODULE = "_dense_fwd_sm90"
    TEMPLATE = "sm90/dense_fwd"
    KERNEL = "_dense_fwd_sm90_kernel"

    def present(self, plan: Plan) -> bool:
        """Whether the spec has the kernel."""
        return bool(plan.of(DenseFwdPlan).sm90)

    def _numbers(self, plan: Plan) -> DenseFwdSm90Plan:
        sm90 = plan.of(DenseFwdPlan).sm90
        if sm90 is None:
            raise LookupError(f"{plan.spec.name} has no {self.KERNEL}")
        return sm90

    def _arguments(self, plan: Plan) -> Signature:
        arguments = (*self.signature(plan), ("num_tiles", "i32"), ("causal", "i32"), ("taken_ptr", "*i32"))
        dense_fwd, dtype = plan.of(DenseFwdPlan), plan.spec.model.dtype
        if SM90 not in dense_fwd.descriptor_targets:
            return arguments
        rows = self._numbers(plan).block_n
        blocks = [
            *((chunk.name, chunk.block) for chunk in dense_fwd.k_chunks),
            ("v", dense_fwd.d_v),
        ]
        described = ((f"{name}_desc", f"tensordesc<{dtype}[{rows},{lanes}],TILE>") for name, lanes in blocks)
        return (*arguments, ("described", "i32"), *described)

    def context(self, plan: Plan) -> dict[str, Any]:
        """What the template asks for."""
        values = self.context_of(plan)
        names = [chunk["name"] for chunk in values["k_chunks"]]
        return {
            **values,
            "kernel": self.KERNEL,
            "itemsize": ITEMSIZE,
            "arguments": self._arguments(plan),
            "shared": [
                *(f"q_{name}" for name in names),
                *names,
                *("v", "told", "told_ready", "q_ready", "q_free", "k_ready", "k_free", "v_ready", "v_free"),
            ],
        }

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """Warpgroup products in the kernel's code, as `expected_products` takes them."""
        return {(self.KERNEL, None): self._numbers(plan).expected_products}
