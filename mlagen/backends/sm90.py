"""The Gluon back end: sm90 kernels, each in a module next to the portable kernels of its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mlagen.backends.grouped import interface, shared
from mlagen.backends.sm90_columns import SEESAW, row_context
from mlagen.backends.triton.common import Signature
from mlagen.backends.triton.splits import attention_context
from mlagen.plan import (
    DenseDecodePlan,
    Plan,
    Sm90Plan,
    SparseDecodePlan,
    SparseFwdPlan,
)
from mlagen.plan.sm90.seesaw import Registers

# Facts of attention that the templates over indices read.
FACTS = ("d_v", "partials", "has_sink", "has_topk_length", "length_required")
FIRST_BARRIER = 4  # named barriers; Triton uses the lower ones
# Shapes of the arguments of attention over a cache, except q and out.
REST_OF_SHAPES = (
    "requests * s_q. indices i32 [requests, s_q, topk], lengths i32 [requests], lse f32 [tokens, num_heads]."
)


def register_split(registers: Registers) -> str:
    """Return the text of a kernel's register split, with the splits of other Triton versions."""
    split = str(list(registers.split))
    if not registers.under:
        return split
    others = ", ".join(f"{minor}: {list(other)}" for minor, other in registers.under)
    return f"{{{others}}}.get(TRITON, {split})"


Part = TypeVar("Part")


def required(part: Part | None) -> Part:
    """Return a part of the plan that must exist, since its kernel is in the package."""
    if part is None:
        raise LookupError("the plan has no such part")
    return part


def sm90_of(plan: Plan, kind: type[SparseFwdPlan | SparseDecodePlan | DenseDecodePlan]) -> Sm90Plan | None:
    """Return the plan of a family's sm90 kernel, or None."""
    family = plan.find(kind)
    return family.sm90 if family else None


@dataclass(frozen=True)
class Sm90Module:
    """A generated module with the sm90 kernel of one family.

    Attributes:
        MODULE: name of the module.
        TEMPLATE: name of the template, in `templates/`.
        plan_of: returns the kernel's plan, or None if the package has no such kernel.
        arguments: run-time arguments and their Triton types, with every optional tensor given.
        details: further context of the kernel's template.
        facts: names of the facts of attention that the template reads.
        columns: names of `row_context` that it reads.
        constexprs: names of the kernel's constexpr arguments.
    """

    MODULE: str
    TEMPLATE: str
    plan_of: Callable[[Plan], Sm90Plan | None]
    arguments: Callable[[Plan], Signature]
    details: Callable[[Plan], dict[str, Any]]
    facts: tuple[str, ...]
    columns: tuple[str, ...] = SEESAW
    constexprs: tuple[str, ...] = ()

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return f"{self.MODULE}_kernel"

    def present(self, plan: Plan) -> bool:
        """Whether the package has the kernel."""
        return self.plan_of(plan) is not None

    def context(self, plan: Plan) -> dict[str, Any]:
        """Template context."""
        sm90 = required(self.plan_of(plan))
        columns = row_context(sm90, takes_pair=plan.takes_pair)
        return {
            **attention_context(plan, *self.facts),
            "sm90": sm90,
            **{name: columns[name] for name in self.columns},
            "kernel": self.kernel,
            **interface(self.arguments(plan), *self.constexprs),
            "register_split": register_split(sm90.registers),
            "splits_constants": "D_V, NEG_LARGE" if names_d_v(sm90) else "NEG_LARGE",
            **rescaling(plan.rescale_threshold_log2),
            "scaled": plan.splits.partials.scaled,
            **self.details(plan),
        }

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """Number of wgmma instructions in the kernel's code, in the form of `expected_products`."""
        return {(self.kernel, None): required(self.plan_of(plan)).expected_products}


def rescaling(threshold_log2: int) -> dict[str, int]:
    """Return the threshold for rescaling O, and the upper bound of rounded P, which is twice the threshold."""
    return {"rescale_threshold_log2": threshold_log2, "p_limit_log2": threshold_log2 + 1}


def names_d_v(sm90: Sm90Plan) -> bool:
    """Whether a kernel's text names V's columns, to bound stores or to find the tail."""
    return sm90.pieces.pads_v or sm90.d_tail > 0


def seesaw_shared(sm90: Sm90Plan, *statistics: str, scaled: bool = False) -> list[tuple[str, ...]]:
    """Return groups of names of a seesaw kernel's shared memory, including its `statistics`."""
    tails = ("q_tail", "k0_tail", "k1_tail") if sm90.d_tail else ()
    p0 = () if sm90.p0_in_tail else ("p0",)
    halves = ("q_l", "q_r", "k0_l", "k0_r", "k1_l", "k1_r")
    return [(*halves, *tails), (*p0, "p1", "m0", "m1", "l0", "l1", *statistics, *(("e0", "e1") if scaled else ()))]


def p0_place(sm90: Sm90Plan) -> str:
    """Return the shared memory of local P: that of block 0's tail, which is free by then, or its own."""
    return "shared.k0_tail" if sm90.p0_in_tail else "shared.p0"


def _length(plan: Plan) -> Signature:
    return (("topk_length_ptr", "*i32"),) if plan.sparse_attention.topk_length != "none" else ()


def dividers(*names: str) -> Signature:
    """Return the names of run-time divisors' multipliers and shifts, from `_launch.divider`."""
    return tuple((f"{name}_{part}", "i32") for name in names for part in ("multiplier", "shift"))


def of_rope(plan: Plan, arguments: Signature) -> Signature:
    """Return the arguments for Q's RoPE columns, which follow those of Q; empty if Q is one tensor."""
    return tuple((name.replace("q_", "q_rope_", 1), kind) for name, kind in arguments) if plan.takes_pair else ()


def _sparse_fwd_arguments(plan: Plan) -> Signature:
    attention = plan.sparse_attention
    element = f"*{plan.spec.model.dtype}"
    sink = (("attn_sink_ptr", "*fp32"),) if attention.attn_sink != "none" else ()
    page = (("kv_page_stride", "i64"),) if plan.rows_block_size is not None else ()
    sizes = ("s_kv", "topk", "num_heads", "num_splits", "split_size", "num_tiles", "head_blocks")
    q, q_strides = (("q_ptr", element),), (("q_token_stride", "i64"), ("q_head_stride", "i64"))
    return (
        *q,
        *of_rope(plan, q),
        ("kv_ptr", element),
        ("indices_ptr", "*i32"),
        *_length(plan),
        *sink,
        ("out_ptr", element),
        ("max_logits_ptr", "*fp32"),
        ("lse_ptr", "*fp32"),
        ("partial_ptr", "*fp32"),
        *((name, "i32") for name in sizes),
        *dividers("head_blocks", "splits"),
        ("sm_scale_log2", "fp32"),
        *q_strides,
        *of_rope(plan, q_strides),
        *page,
        ("kv_row_stride", "i64"),
        ("indices_token_stride", "i64"),
        ("out_token_stride", "i64"),
        ("out_head_stride", "i64"),
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
            f"out [tokens, num_heads, {plan.d_v}] likewise.",
            "indices i32 [tokens, topk]. max_logits, lse f32 [tokens, num_heads].",
        ],
    }


def _sparse_fwd_details(plan: Plan) -> dict[str, Any]:
    sm90, scaled = required(plan.of(SparseFwdPlan).sm90), plan.splits.partials.scaled
    return {
        **_rows_details(plan),
        "p0": p0_place(sm90),
        **shared(*seesaw_shared(sm90, "true_max0", "true_max1", scaled=scaled), ("q_ready", "k_ready")),
    }


SPARSE_FWD = Sm90Module(
    MODULE="_sparse_fwd_sm90",
    TEMPLATE="sm90/sparse_fwd",
    plan_of=lambda plan: sm90_of(plan, SparseFwdPlan),
    arguments=_sparse_fwd_arguments,
    details=_sparse_fwd_details,
    facts=(*FACTS, "takes_pair"),
    columns=(*SEESAW, "words"),
)


@dataclass(frozen=True, kw_only=True)
class SwapAbModule(Sm90Module):
    """The generated module with a swap-AB kernel, for few heads.

    Attributes:
        plans_of: returns the kernel's plans by number of heads; empty if the package has no such kernel.
    """

    plans_of: Callable[[Plan], tuple[Sm90Plan, ...]]

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """Number of wgmma instructions, by number of heads per program."""
        return {(self.kernel, one.block_h): one.expected_products for one in self.plans_of(plan)}


def swap_ab_details(plans: tuple[Sm90Plan, ...], statistics: tuple[str, ...], *, scaled: bool) -> dict[str, Any]:
    """Further context of a swap-AB kernel. Its consumers exchange `statistics`."""
    sm90 = plans[0]
    tails = ("q_tail", "k_tail") if sm90.d_tail else ()
    exponents = ("exponents0", "exponents1") if scaled else ()
    halves = ("q_l", "q_r", "k_l", "k_r")
    return {
        "most_heads": plans[-1].block_h,
        "k_r_free": FIRST_BARRIER + sm90.k_l_stages,
        "exchange_ready": FIRST_BARRIER + sm90.k_l_stages + 2,
        "statistics": statistics,
        **shared((*halves, *tails), (*statistics, *exponents), ("q_ready", "k_l_ready", "k_r_ready")),
    }


def _sparse_swap_ab(plan: Plan) -> tuple[Sm90Plan, ...]:
    family = plan.find(SparseFwdPlan)
    return family.swap_ab if family else ()


def _swap_ab_details(plan: Plan) -> dict[str, Any]:
    statistics = ("m0", "l0", "true_max0", "m1", "l1", "true_max1")
    scaled = plan.splits.partials.scaled
    return {**_rows_details(plan), **swap_ab_details(_sparse_swap_ab(plan), statistics, scaled=scaled)}


def _swap_ab_arguments(plan: Plan) -> Signature:
    """Return the arguments of the swap-AB kernel over rows. A program has all heads."""
    left_out = {"head_blocks", *dict(dividers("head_blocks"))}
    return tuple(argument for argument in _sparse_fwd_arguments(plan) if argument[0] not in left_out)


SWAP_AB = SwapAbModule(
    MODULE="_sparse_fwd_sm90_swap_ab",
    TEMPLATE="sm90/sparse_fwd_swap_ab",
    plan_of=lambda plan: next(iter(_sparse_swap_ab(plan)), None),
    plans_of=_sparse_swap_ab,
    arguments=_swap_ab_arguments,
    details=_swap_ab_details,
    facts=(*FACTS, "takes_pair"),
    columns=(
        *("pieces", "left", "right", "halves", "plain", "columns_of_acc", "columns_of_like", "half_columns"),
        *("tail_start", "tail_tile", "tail_swizzle", "v_end"),
    ),
    constexprs=("BLOCK_H",),
)


def sparse_decode_arguments(plan: Plan) -> Signature:
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
        inputs += [(f"{prefix}{name}", kind) for name, kind in _length(plan)]
        inputs += [(f"{prefix}k_scale_ptr", "*fp32")] if one.tensor_scale else []
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
        *dividers("head_blocks", "splits", "s_q", *pages),
        ("sm_scale_log2", "fp32"),
        *strides,
        ("out_token_stride", "i32"),
        ("out_head_stride", "i32"),
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
        **shared(*seesaw_shared(union.sm90, "true_max0", "true_max1"), ("q_ready", "k_ready")),
        "shapes": [
            *details["shapes"][:2],
            f"union i32 [num_tiles, {union.group} * topk], of which union_length i32 [num_tiles] entries count.",
            "max_logits, lse f32 [tokens, num_heads]. recompute i32 [num_tiles] becomes 1 where a result is NaN.",
        ],
    }


SHARED_FWD = Sm90Module(
    MODULE="_sparse_fwd_sm90_shared",
    TEMPLATE="sm90/sparse_fwd_shared",
    plan_of=lambda plan: plan.union.sm90 if plan.union else None,
    arguments=_union_arguments,
    details=_union_details,
    facts=("takes_pair", "has_sink"),
)


class UnionLists:
    """The generated module with the kernel that builds index unions."""

    MODULE = "_index_union_sm90"
    TEMPLATE = "sm90/index_union"

    def present(self, plan: Plan) -> bool:
        """Whether the package has the kernel."""
        return plan.union is not None

    def arguments(self, plan: Plan) -> Signature:
        """Run-time arguments and their Triton types, with the optional tensor given."""
        return (
            ("indices_ptr", "*i32"),
            *_length(plan),
            ("union_ptr", "*i32"),
            ("union_length_ptr", "*i32"),
            ("recompute_ptr", "*i32"),
            ("tokens", "i32"),
            ("topk", "i32"),
            ("s_kv", "i32"),
            ("indices_token_stride", "i64"),
        )

    def context(self, plan: Plan) -> dict[str, Any]:
        """Template context."""
        return {
            **attention_context(plan, "has_topk_length", "length_required"),
            "kernel": "_index_union_kernel",
            **interface(self.arguments(plan)),
            "union": plan.union,
        }

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """None: the kernel has no matrix products."""
        return {}


INDEX_UNION = UnionLists()
