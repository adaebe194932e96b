"""Multi-head attention over requests of any lengths, by pointers or by tensor descriptors, and its wrapper."""

from __future__ import annotations

from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.triton import tiles
from mlagen.backends.triton.common import FULL_ALIGNMENT, Signature, chunk_of, common, stated_scale
from mlagen.backends.triton.splits import accumulators
from mlagen.plan import DenseFwdPlan, Plan

MODULE = "dense_fwd"


def signature(plan: Plan) -> Signature:
    """Return the run-time arguments of the pointer kernel and the sm90 kernel, with their Triton types."""
    element = f"*{plan.spec.model.dtype}"
    heads = ("num_heads", "heads_per_kv")
    sizes = ("total_q", "total_k", *heads, "num_requests", "request_bits", "num_slots", "head_group")
    strides = (f"{tensor}_{dim}_stride" for tensor in ("q", "out", "k", "v") for dim in ("row", "head"))
    return (
        ("q_ptr", element),
        ("k_ptr", element),
        ("v_ptr", element),
        ("cu_seqlens_q_ptr", "*i32"),
        ("cu_seqlens_k_ptr", "*i32"),
        ("out_ptr", element),
        ("lse_ptr", "*fp32"),
        *((name, "i32") for name in sizes),
        ("scale_log2", "fp32"),
        *((name, "i64") for name in strides),
    )


def context(plan: Plan) -> dict[str, Any]:
    """Context of the templates."""
    dense_fwd = plan.of(DenseFwdPlan)
    k_chunks = [chunk_of(chunk) for chunk in dense_fwd.k_chunks]
    v_chunks = accumulators(dense_fwd.v_chunks)
    described, multi_head = bool(dense_fwd.descriptor_targets), plan.spec.multi_head
    return {
        **common(plan, "dtype", "merges", "torch_dtype"),
        "d_qk": dense_fwd.d_qk,
        "d_v": dense_fwd.d_v,
        "dense_fwd": dense_fwd,
        "descriptors": described,
        "full_alignment": FULL_ALIGNMENT,
        "sm90": dense_fwd.sm90,
        "addressings": [True, False] if described else [False],  # by descriptors or by pointers
        "chunks": [*k_chunks, *v_chunks],
        "k_chunks": k_chunks,
        "v_chunks": v_chunks,
        "stated_scale": stated_scale(multi_head.softmax_scale if multi_head else None),
    }


def shared(plan: Plan, family: DenseFwdPlan) -> list[GeneratedFile]:
    """Files that the family's module and its sm90 kernel import."""
    return [tiles.file(plan), generated("_dense_fwd_kernels", context(plan))]


def modules(plan: Plan, family: DenseFwdPlan) -> list[Module]:
    """The module of the family's wrappers."""
    return [Module(generated(MODULE, context(plan)), family.WRAPPERS)]
