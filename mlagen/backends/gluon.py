"""The Gluon back end: the Hopper kernels, each a module beside the portable kernels of its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlagen.backends.triton.common import Signature
from mlagen.backends.triton.splits import attention_context, dense_signature
from mlagen.plan import HOPPER_TARGET, HopperPlan, Plan, needed
from mlagen.plan.hopper import FP16_Q, FP16_SCALES, SLACK
from mlagen.work import ITEMSIZE

TEMPLATE = "gluon/seesaw"
EXPONENT_BIAS, BF16_MANTISSA, FP32_MANTISSA = 127, 7, 23  # of fp32, bf16 and, without a mantissa, ue8m0


@dataclass(frozen=True)
class HopperModule:
    """A generated module with the Hopper kernel of one family, as the list of a package's modules takes it.

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
    plan_of: Callable[[Plan], HopperPlan | None]
    arguments: Callable[[Plan], Signature]
    details: Callable[[Plan], dict[str, Any]]

    TEMPLATE = TEMPLATE

    def present(self, plan: Plan) -> bool:
        """Whether the spec has the kernel."""
        return self.plan_of(plan) is not None

    def context(self, plan: Plan) -> dict[str, Any]:
        """What the template asks for."""
        hopper = self.plan_of(plan)
        assert hopper is not None
        tail = ["q_tail", "k0_tail", "k1_tail"] if hopper.d_tail else []
        details = self.details(plan)
        scaled = needed(plan.splits).partials.scaled and not details.get("union")  # unions have no partials
        return {
            **attention_context(plan),
            "hopper": hopper,
            "family": self.family,
            "kernel": self.kernel,
            "has_max_logits": self.has_max_logits,
            "arguments": self.arguments(plan),
            "slack": SLACK,
            "union": None,
            "swapped": False,
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
        return {(self.kernel, None): needed(self.plan_of(plan)).expected_products}


def _length(plan: Plan) -> Signature:
    return (("topk_length_ptr", "*i32"),) if plan.sparse_attention.topk_length != "none" else ()


def _dividers(*names: str) -> Signature:
    """How the Hopper kernel divides by what is known at run time alone: `_launch.divider` of each."""
    return tuple((f"{name}_{part}", "i32") for name in names for part in ("multiplier", "shift"))


def _sparse_arguments(plan: Plan) -> Signature:
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


def _sparse_details(plan: Plan) -> dict[str, Any]:
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


SPARSE = HopperModule(
    MODULE="_sparse_hopper",
    kernel="_sparse_hopper_kernel",
    family="sparse attention",
    has_max_logits=True,
    plan_of=lambda plan: plan.sparse.hopper if plan.sparse else None,
    arguments=_sparse_arguments,
    details=_sparse_details,
)


class SwappedModule(HopperModule):
    """The generated module with the Hopper kernel of few heads, which stand in the columns of its products."""

    TEMPLATE = "gluon/swapped"

    def context(self, plan: Plan) -> dict[str, Any]:
        """What the template asks for."""
        values = super().context(plan)
        tails = ("q_tail", "k_tail") if values["hopper"].d_tail else ()
        statistics = ("m0", "l0", "top0", "m1", "l1", "top1")
        exponents = ("exponents0", "exponents1") if values["scaled"] else ()
        halves = ("q_left", "q_right", "k_left", "k_right")
        return {
            **values,
            "swapped": True,
            "widths": [hopper.block_h for hopper in needed(plan.sparse).swapped],
            "statistics": statistics,
            "shared": [*halves, *tails, *statistics, *exponents, "q_ready", "left_ready", "right_ready"],
        }

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """Those of each number of heads that a program holds."""
        return {(self.kernel, one.block_h): one.expected_products for one in needed(plan.sparse).swapped}


def _swapped_arguments(plan: Plan) -> Signature:
    """Those of the other Hopper kernel over rows; a program holds all heads."""
    left_out = {"head_blocks", *dict(_dividers("head_blocks"))}
    return tuple(argument for argument in _sparse_arguments(plan) if argument[0] not in left_out)


SWAPPED = SwappedModule(
    MODULE="_sparse_swapped",
    kernel="_sparse_swapped_kernel",
    family="sparse attention",
    has_max_logits=True,
    plan_of=lambda plan: next(iter(plan.sparse.swapped), None) if plan.sparse else None,
    arguments=_swapped_arguments,
    details=_sparse_details,
)


def _kvcache_arguments(plan: Plan) -> Signature:
    attention = plan.sparse_attention
    element = f"*{plan.spec.model.dtype}"
    sink = (("attn_sink_ptr", "*fp32"),) if attention.attn_sink != "none" else ()
    inputs: list[tuple[str, str]] = [("q_ptr", element)]
    sizes: list[tuple[str, str]] = []
    strides = [("q_request_stride", "i64"), ("q_token_stride", "i64"), ("q_head_stride", "i32")]
    second = [] if plan.extra_layout is None else [("extra_", plan.extra_layout)]
    for prefix, one in (("", needed(plan.layout)), *second):
        inputs += [(f"{prefix}k_cache_ptr", "*u8"), (f"{prefix}indices_ptr", "*i32")]
        inputs += [(f"{prefix}{name}", kind) for name, kind in _length(plan)]
        sizes += [(f"{prefix}{name}", "i32") for name in ("num_slots", "page_size", "topk")]
        rows = () if one.planar else ("row_stride",)
        strides += [(f"{prefix}{name}", "i64") for name in ("page_stride", *rows, "indices_request_stride")]
        strides.append((f"{prefix}indices_token_stride", "i32"))
    sizes += [(name, "i32") for name in ("s_q", "num_heads", "first_token", "num_splits", "split_size", "num_tiles")]
    sizes.append(("head_blocks", "i32"))
    pages = [f"{prefix}page" for prefix, _ in (("", plan.layout), *second)]
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


def _kvcache_details(plan: Plan) -> dict[str, Any]:
    dtype = plan.spec.model.dtype
    layout = needed(plan.layout)
    latent, *tail = layout.data
    scales = layout.scales_of(latent)
    assert scales is not None
    assert plan.kvcache is not None
    hopper = plan.kvcache.hopper
    assert hopper is not None
    mixed = plan.extra_layout not in (None, layout)
    staged = ("rope", "last") if layout.planar else ()
    ready = ("ready",) if hopper.d_tail else ("q_ready", "k_ready")
    return {
        "dequantises": True,
        "q_ready": "shared.ready.index(2)" if hopper.d_tail else "shared.q_ready",
        "shared": ("spoilt", "offsets", "scales", *staged, "valid", *ready),
        "paged": False,
        "second": plan.extra_layout is not None,
        "planar": layout.planar,
        "mixed": mixed,
        "scales": scales,
        "extra_layout": plan.extra_layout,
        "extra_scales": needed(plan.extra_layout).scales_of(needed(plan.extra_layout).data[0]) if mixed else None,
        "scale_limits": [_power(exponent, FP32_MANTISSA if scales.dtype == "fp32" else 0) for exponent in FP16_SCALES],
        "q_limits": [_power(exponent, BF16_MANTISSA) for exponent in FP16_Q],
        "scale_columns": hopper.scale_columns,
        "tail": tail[0] if tail else None,
        "shapes": [
            f"q [requests, s_q, num_heads, {plan.d_qk}], out [tokens, num_heads, {plan.d_v}]: {dtype}, where tokens is",
            "requests * s_q. indices i32 [requests, s_q, topk], lengths i32 [requests], lse f32 [tokens, num_heads].",
        ],
    }


def _union_arguments(plan: Plan) -> Signature:
    """Those of the Hopper kernel over rows, with lists in place of indices, and without splits."""
    left_out = {"topk_length_ptr", "partial_ptr", "s_kv", "topk", "num_splits", "split_size", "indices_token_stride"}
    left_out |= {"head_blocks", *dict(_dividers("head_blocks", "splits"))}
    instead = {
        "indices_ptr": (("lists_ptr", "*i32"), ("counts_ptr", "*i32"), ("redo_ptr", "*i32")),
        "num_heads": (("tokens", "i32"), ("num_heads", "i32")),
        "kv_row_stride": (("kv_row_stride", "i64"), ("list_stride", "i64")),
    }
    kept = [argument for argument in _sparse_arguments(plan) if argument[0] not in left_out]
    return tuple(each for argument in kept for each in instead.get(argument[0], (argument,)))


def _union_details(plan: Plan) -> dict[str, Any]:
    union = plan.union
    assert union is not None
    details = _sparse_details(plan)
    return {
        **details,
        "union": union,
        "shapes": [
            *details["shapes"][:2],
            f"lists i32 [num_tiles, {union.group} * topk], of which so many entries count: counts i32 [num_tiles].",
            "max_logits, lse f32 [tokens, num_heads]. redo i32 [num_tiles] becomes 1 where a result is NaN.",
        ],
    }


UNION = HopperModule(
    MODULE="_sparse_union",
    kernel="_sparse_union_kernel",
    family="sparse attention with shared rows",
    has_max_logits=True,
    plan_of=lambda plan: plan.union.hopper if plan.union else None,
    arguments=_union_arguments,
    details=_union_details,
)


class UnionLists:
    """The generated module with the kernel that makes the lists of groups of tokens."""

    MODULE = "_union"
    TEMPLATE = "gluon/union"

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


UNION_LISTS = UnionLists()


KVCACHE = HopperModule(
    MODULE="_kvcache_hopper",
    kernel="_kvcache_hopper_kernel",
    family="attention over a cache",
    has_max_logits=False,
    plan_of=lambda plan: plan.kvcache.hopper if plan.kvcache else None,
    arguments=_kvcache_arguments,
    details=_kvcache_details,
)


def _dense_arguments(plan: Plan) -> Signature:
    """Those of the portable kernel, and how the Hopper kernel divides by a page's size."""
    arguments = dense_signature(plan)
    behind = [name for name, _ in arguments].index("page_size") + 1
    return (*arguments[:behind], *_dividers("page"), *arguments[behind:])


def _dense_details(plan: Plan) -> dict[str, Any]:
    return {
        "dequantises": False,
        "second": False,
        "q_ready": "shared.q_ready",
        "shared": ("q_ready", "k_ready"),
        "paged": False,
        "plan": plan.dense,
        "shapes": [],
    }


DENSE = HopperModule(
    MODULE="_dense_hopper",
    kernel="_dense_hopper_kernel",
    family="dense attention over a paged cache",
    has_max_logits=False,
    plan_of=lambda plan: plan.dense.hopper if plan.dense else None,
    arguments=_dense_arguments,
    details=_dense_details,
)


@dataclass(frozen=True)
class HeadsModule:
    """The generated module with the Hopper kernel of multi-head attention.

    Attributes:
        context_of: what the family's template asks for.
        signature: run-time arguments of the portable kernel that loads by pointers, and their Triton types.
    """

    context_of: Callable[[Plan], dict[str, Any]]
    signature: Callable[[Plan], Signature]

    MODULE = "_varlen_hopper"
    TEMPLATE = "gluon/heads"
    KERNEL = "_varlen_hopper_kernel"

    def present(self, plan: Plan) -> bool:
        """Whether the spec has the kernel."""
        return plan.varlen is not None and plan.varlen.hopper is not None

    def _arguments(self, plan: Plan) -> Signature:
        arguments = (*self.signature(plan), ("num_tiles", "i32"), ("causal", "i32"), ("taken_ptr", "*i32"))
        varlen, dtype = needed(plan.varlen), plan.spec.model.dtype
        if HOPPER_TARGET not in varlen.descriptor_targets:
            return arguments
        rows = needed(varlen.hopper).block_n
        blocks = [
            *((chunk.name, chunk.block) for chunk in varlen.k_chunks),
            ("v", varlen.d_v),
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
        return {(self.KERNEL, None): needed(needed(plan.varlen).hopper).expected_products}
