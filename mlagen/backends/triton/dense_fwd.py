"""Multi-head attention over requests of any lengths, by pointers or by tensor descriptors, and its wrapper."""

from __future__ import annotations

from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.triton.common import FULL_ALIGNMENT, Signature, alignment_of, chunk_of, common, tables
from mlagen.backends.triton.splits import accumulators
from mlagen.plan import DenseFwdPlan, Plan

MODULE = "dense_fwd"
BY_POINTERS, BY_DESCRIPTORS = "_dense_fwd_kernel", "_dense_fwd_descriptor_kernel"


def signature(plan: Plan, block_n: int | None = None) -> Signature:
    """Run-time arguments and their Triton types, by pointers; by descriptors of blocks of `block_n` keys if given."""
    dense_fwd, element = plan.of(DenseFwdPlan), f"*{plan.spec.model.dtype}"
    chunks = (*dense_fwd.k_chunks, *dense_fwd.v_chunks)
    blocks = [f"tensordesc<{plan.spec.model.dtype}[1,{block_n},{chunk.block}]>" for chunk in chunks]
    described = tuple((f"{chunk.name}_desc", block) for chunk, block in zip(chunks, blocks, strict=True))
    return (
        ("q_ptr", element),
        *((("k_ptr", element), ("v_ptr", element)) if block_n is None else described),
        ("cu_seqlens_q_ptr", "*i32"),
        ("cu_seqlens_k_ptr", "*i32"),
        ("out_ptr", element),
        ("lse_ptr", "*fp32"),
        ("total_q", "i32"),
        ("total_k", "i32"),
        ("num_heads", "i32"),
        ("heads_per_kv", "i32"),
        ("num_requests", "i32"),
        ("request_bits", "i32"),
        ("num_slots", "i32"),
        ("head_group", "i32"),
        ("scale_log2", "fp32"),
        ("q_row_stride", "i64"),
        ("q_head_stride", "i64"),
        ("out_row_stride", "i64"),
        ("out_head_stride", "i64"),
        *((name, "i64") for name in _strides(block_n)),
    )


def _strides(block_n: int | None) -> tuple[str, ...]:
    return () if block_n else ("k_row_stride", "k_head_stride", "v_row_stride", "v_head_stride")


def _addressings(plan: Plan, dense_fwd: DenseFwdPlan) -> list[dict[str, Any]]:
    """How kernels of the package address k and v, each with what tells its functions from the others'."""
    pointers = {"descriptors": False, "suffix": "", "arguments": len(signature(plan))}
    descriptors = {"descriptors": True, "suffix": "_descriptor", "arguments": len(signature(plan, 1))}
    return [descriptors, pointers] if dense_fwd.descriptor_targets else [pointers]


def context(plan: Plan) -> dict[str, Any]:
    """What the template asks for."""
    dense_fwd = plan.of(DenseFwdPlan)
    k_chunks = [chunk_of(chunk) for chunk in dense_fwd.k_chunks]
    v_chunks = accumulators(dense_fwd.v_chunks)
    for chunk in (*k_chunks, *v_chunks):  # where all rows are aligned, as those of descriptors are
        chunk["told"] = FULL_ALIGNMENT if alignment_of(chunk["start"]) == "ALIGNMENT" else 1
    return {
        **common(plan),
        "d_qk": dense_fwd.d_qk,
        "d_v": dense_fwd.d_v,
        "dense_fwd": dense_fwd,
        **tables(dense_fwd),
        "descriptors": bool(dense_fwd.descriptor_targets),
        "sm90": dense_fwd.sm90,
        "addressings": _addressings(plan, dense_fwd),
        "chunks": [*k_chunks, *v_chunks],
        "k_chunks": k_chunks,
        "v_chunks": v_chunks,
    }


def shared(plan: Plan, family: DenseFwdPlan) -> list[GeneratedFile]:
    """What the family's module imports beside its sm90 kernel: nothing."""
    return []


def modules(plan: Plan, family: DenseFwdPlan) -> list[Module]:
    """The family's module."""
    return [Module(generated(MODULE, context(plan)), family.WRAPPERS)]
