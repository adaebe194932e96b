"""Sparse attention over unquantised rows: single-pass and split-KV kernels, and their wrappers."""

from __future__ import annotations

from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.triton import splits
from mlagen.backends.triton.common import Signature, chunk_of, tables
from mlagen.backends.triton.splits import accumulators, attention_context, given
from mlagen.plan import Plan, SparseFwdPlan

MODULE = "sparse_fwd"
TILE_ARGUMENTS = ("ALIGNMENT", "INDEX_GROUP", "BLOCK_H", "BLOCK_N", "INDICES_AHEAD", "NUM_STAGES")


def _given(plan: Plan) -> tuple[list[str], list[str]]:
    """What the wrappers can pass for topk_length and for attn_sink, as text."""
    attention = plan.sparse_attention
    lengths, sinks = given(attention.topk_length, "length"), given(attention.attn_sink, "sink")
    if "flash_mla_sparse_fwd" not in plan.spec.wrappers:  # the other one leaves out what is optional
        return lengths[:1], sinks[:1]
    return lengths, sinks


def _signatures(plan: Plan) -> dict[str, Signature]:
    """Run-time arguments and their Triton types of the attention kernels, with every optional tensor given."""
    attention = plan.sparse_attention
    element = f"*{plan.spec.model.dtype}"
    length = (("topk_length_ptr", "*i32"),) if attention.topk_length != "none" else ()
    sink = (("attn_sink_ptr", "*fp32"),) if attention.attn_sink != "none" else ()
    page = (("kv_page_stride", "i64"),) if plan.rows_block_size is not None else ()
    inputs = (("q_ptr", element), ("kv_ptr", element), ("indices_ptr", "*i32"), *length)
    partials = (("partial_ptr", "*fp32"),)
    outputs = (("out_ptr", element), ("max_logits_ptr", "*fp32"), ("lse_ptr", "*fp32"))
    sizes = (("s_kv", "i32"), ("topk", "i32"), ("num_heads", "i32"))
    num_splits, num_rows = ("num_splits", "i32"), ("num_rows", "i32")
    scale = (("sm_scale_log2", "fp32"),)
    q_strides = (("q_token_stride", "i64"), ("q_head_stride", "i64"))
    in_strides = (*q_strides, *page, ("kv_row_stride", "i64"), ("indices_token_stride", "i64"))
    out_strides = (("out_token_stride", "i64"), ("out_head_stride", "i64"))
    forward = (*inputs, *sink, *outputs, *sizes, *scale, *in_strides, *out_strides)
    return {
        "fwd": forward,
        "redo": (("redo_ptr", "*i32"), ("tokens", "i32"), *forward),
        "split": (*inputs, *partials, *sizes, num_splits, ("split_size", "i32"), num_rows, *scale, *in_strides),
    }


def _context(plan: Plan, sparse: SparseFwdPlan) -> dict[str, Any]:
    """What the template asks for."""
    paged = plan.rows_block_size is not None
    lengths, sinks = _given(plan)
    return {
        **attention_context(plan),
        "chunks": [chunk_of(chunk) for chunk in sparse.chunks],
        "v_chunks": accumulators(sparse.chunks),
        "optional": [f"{length}, {sink}" for length in lengths for sink in sinks],
        "warms_length": "length" in lengths,
        "warms_sink": "sink" in sinks,
        "sparse": sparse,
        "sm90": sparse.sm90,
        "swap_ab": sparse.swap_ab,
        "union": sparse.union,
        **tables(sparse),
        "paged": paged,
        "kv_shape": f"[pages, {plan.rows_block_size}, {plan.d_qk}]" if paged else f"[s_kv, 1, {plan.d_qk}]",
        "page_rows": plan.rows_block_size if paged else 1,
        "forward": [*(name for name, _ in _signatures(plan)["fwd"]), *TILE_ARGUMENTS],
        "arguments": {kernel: len(signature) for kernel, signature in _signatures(plan).items()},
    }


def shared(plan: Plan, family: SparseFwdPlan) -> list[GeneratedFile]:
    """What the family's module imports."""
    return [splits.file(plan)]


def modules(plan: Plan, family: SparseFwdPlan) -> list[Module]:
    """The family's module."""
    wrappers = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
    return [Module(generated(MODULE, _context(plan, family)), sorted([*wrappers, "workspace_size"]))]
