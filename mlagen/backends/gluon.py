"""The Gluon back end: the Hopper kernels, each a module beside the portable kernels of its family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlagen.backends.triton.common import Signature
from mlagen.backends.triton.splits import attention_context
from mlagen.plan import HOPPER_TARGET, CompileJob, HopperPlan, Plan

TEMPLATE = "gluon/seesaw"


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
        return {
            **attention_context(plan),
            "hopper": hopper,
            "family": self.family,
            "kernel": self.kernel,
            "has_max_logits": self.has_max_logits,
            "arguments": self.arguments(plan),
            **details,
            "shared": [
                *("q_left", "q_right", "k0_left", "k0_right", "k1_left", "k1_right", *(tail or ["p0"]), "p1"),
                *("m0", "m1", *details["shared"]),
            ],
        }

    def jobs(self, plan: Plan) -> Iterator[CompileJob]:
        """The kernel with results and with partials, all other optional tensors given, and none of them."""
        hopper = self.plan_of(plan)
        assert hopper is not None
        signature = self.arguments(plan)
        results = {"attn_sink_ptr", "out_ptr", "max_logits_ptr", "lse_ptr"}
        optional = {name for name, _ in signature if name in {"attn_sink_ptr", "topk_length_ptr"}}
        required = {
            name
            for name, word in (
                ("attn_sink_ptr", plan.spec.attention.attn_sink),
                ("topk_length_ptr", plan.spec.attention.topk_length),
            )
            if word == "required"
        }
        for variant, absent in (
            ("", {"partial_ptr"}),
            (" bare", {"partial_ptr", *optional - required}),
            (" split", results),
        ):
            given = tuple((name, kind) for name, kind in signature if name not in absent)
            yield CompileJob(
                module=self.MODULE,
                kernel=self.kernel,
                variant=f"{hopper.tile.block_h}x{hopper.tile.block_n}{variant}",
                target=HOPPER_TARGET,
                signature=given,
                constexprs=tuple((name, None) for name, _ in signature if name in absent),
                num_warps=hopper.tile.num_warps,
                num_stages=hopper.tile.num_stages,
                expected_shared=hopper.expected_shared,
                expected_products=hopper.expected_products,
            )


def _sparse_arguments(plan: Plan) -> Signature:
    attention = plan.spec.attention
    element = f"*{plan.spec.model.dtype}"
    length = (("topk_length_ptr", "*i32"),) if attention.topk_length != "none" else ()
    sink = (("attn_sink_ptr", "*fp32"),) if attention.attn_sink != "none" else ()
    page = (("kv_page_stride", "i64"),) if plan.rows_block_size is not None else ()
    sizes = ("s_kv", "topk", "num_heads", "num_splits", "split_size", "num_tiles")
    return (
        ("q_ptr", element),
        ("kv_ptr", element),
        ("indices_ptr", "*i32"),
        *length,
        *sink,
        ("out_ptr", element),
        ("max_logits_ptr", "*fp32"),
        ("lse_ptr", "*fp32"),
        ("partial_ptr", "*fp32"),
        *((name, "i32") for name in sizes),
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
        "q_ready": "shared.q_ready",
        "shared": ("l0", "l1", "q_ready", "k_ready"),
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
    plan_of=lambda plan: plan.sparse.hopper,
    arguments=_sparse_arguments,
    details=_sparse_details,
)


def _kvcache_arguments(plan: Plan) -> Signature:
    attention = plan.spec.attention
    element = f"*{plan.spec.model.dtype}"
    length = (("topk_length_ptr", "*i32"),) if attention.topk_length != "none" else ()
    sink = (("attn_sink_ptr", "*fp32"),) if attention.attn_sink != "none" else ()
    sizes = ("num_slots", "page_size", "topk", "s_q", "num_heads")
    pieces = ("first_token", "num_splits", "split_size", "num_tiles")
    return (
        ("q_ptr", element),
        ("k_cache_ptr", "*u8"),
        ("indices_ptr", "*i32"),
        *length,
        *sink,
        ("out_ptr", element),
        ("lse_ptr", "*fp32"),
        ("partial_ptr", "*fp32"),
        *((name, "i32") for name in (*sizes, *pieces)),
        ("sm_scale_log2", "fp32"),
        ("q_request_stride", "i64"),
        ("q_token_stride", "i64"),
        ("q_head_stride", "i32"),
        ("page_stride", "i64"),
        ("row_stride", "i64"),
        ("indices_request_stride", "i64"),
        ("indices_token_stride", "i32"),
        ("out_token_stride", "i32"),
        ("out_head_stride", "i32"),
    )


def _kvcache_details(plan: Plan) -> dict[str, Any]:
    dtype = plan.spec.model.dtype
    latent, *tail = plan.layout.data
    scales = plan.layout.scales_of(latent)
    assert scales is not None
    return {
        "dequantises": True,
        "q_ready": "shared.ready.index(2)",
        "shared": ("offsets", "scales", "scales_low", "valid0", "valid1", "ready"),
        "paged": False,
        "scales": scales,
        "scale_count": latent.count // scales.tile,
        "tail": tail[0] if tail else None,
        "shapes": [
            f"q [requests, s_q, num_heads, {plan.d_qk}], out [tokens, num_heads, {plan.d_v}]: {dtype}, where tokens is",
            "requests * s_q. indices i32 [requests, s_q, topk], lengths i32 [requests], lse f32 [tokens, num_heads].",
        ],
    }


KVCACHE = HopperModule(
    MODULE="_kvcache_hopper",
    kernel="_kvcache_hopper_kernel",
    family="attention over a cache",
    has_max_logits=False,
    plan_of=lambda plan: plan.kvcache.hopper if plan.kvcache else None,
    arguments=_kvcache_arguments,
    details=_kvcache_details,
)
