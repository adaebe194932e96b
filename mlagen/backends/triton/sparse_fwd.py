"""Sparse attention over unquantised rows: single-pass and split-KV kernels, and their wrappers."""

from __future__ import annotations

from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.triton import splits, tiles
from mlagen.backends.triton.common import chunk_of
from mlagen.backends.triton.splits import accumulators, attention_context, given
from mlagen.plan import Plan, SparseFwdPlan

MODULE = "sparse_fwd"
# Facts of attention in the templates of both, of the kernels and of the wrappers.
FACTS = ("d_qk", "d_v", "dtype", "takes_pair", "has_sink", "sink_required", "length_required")
OF_KERNELS = ("partials", "has_topk_length")
OF_WRAPPERS = (
    *("wrappers", "layout", "rope_aligned", "merges", "torch_dtype", "has_rope"),
    *("lse_base", "empty_row_lse", "stated_scale"),
)


def _given(plan: Plan) -> tuple[list[str], list[str]]:
    """Return the possible values of topk_length and attn_sink in wrappers, as text."""
    attention = plan.sparse_attention
    lengths, sinks = given(attention.topk_length, "length"), given(attention.attn_sink, "sink")
    if "flash_mla_sparse_fwd" not in plan.spec.wrappers:  # the other wrapper leaves out optional tensors
        return lengths[:1], sinks[:1]
    return lengths, sinks


def _pages(plan: Plan) -> dict[str, Any]:
    """Return the context of both templates for rows in pages."""
    rows = plan.rows_block_size
    return {"paged": rows is not None, "page_rows": rows or 1}


def _kernels(plan: Plan, sparse: SparseFwdPlan) -> dict[str, Any]:
    """Context of the kernels' template."""
    return {
        **attention_context(plan, *FACTS, *OF_KERNELS),
        **_pages(plan),
        "chunks": [chunk_of(chunk) for chunk in sparse.chunks],
        "v_chunks": accumulators(sparse.chunks),
        "union": sparse.union,
    }


def _wrappers(plan: Plan, sparse: SparseFwdPlan) -> dict[str, Any]:
    """Context of the wrappers' template."""
    (lengths, sinks), pages = _given(plan), _pages(plan)
    shape = f"[pages, {pages['page_rows']}, {plan.d_qk}]" if pages["paged"] else f"[s_kv, 1, {plan.d_qk}]"
    return {
        **attention_context(plan, *FACTS, *OF_WRAPPERS),
        **pages,
        "optional": [f"{length}, {sink}" for length in lengths for sink in sinks],
        "warms_length": "length" in lengths,
        "warms_sink": "sink" in sinks,
        "sparse": sparse,
        "sm90": sparse.sm90,
        "swap_ab": sparse.swap_ab,
        "union": sparse.union,
        "kv_shape": shape,
    }


def shared(plan: Plan, family: SparseFwdPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    return [tiles.file(plan), splits.file(plan), generated("_sparse_fwd_kernels", _kernels(plan, family))]


def modules(plan: Plan, family: SparseFwdPlan) -> list[Module]:
    """The module of the family's wrappers."""
    wrappers = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
    return [Module(generated(MODULE, _wrappers(plan, family)), sorted([*wrappers, "workspace_size"]))]
