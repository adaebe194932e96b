"""Sparse attention over unquantised rows: single-pass and split-KV kernels, and their wrappers."""

from __future__ import annotations

from typing import Any

from mlagen.backends.parts import splits, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.call import Field, given
from mlagen.backends.parts.common import blocks_of, facts, tuple_text
from mlagen.backends.parts.splits import attention_context
from mlagen.backends.parts.splits import given as values_of
from mlagen.plan import Plan, SparseFwdPlan

MODULE = "sparse_fwd"
# Facts of attention in the templates of both, of the kernels and of the wrappers.
FACTS = ("d_qk", "d_v", "dtype", "takes_pair", "has_sink", "sink_required", "length_required")
OF_KERNELS = ("partials", "has_topk_length")
OF_WRAPPERS = (
    *("wrappers", "layout", "rope_aligned", "merges", "merge_import", "merge_sources", "torch_dtype"),
    *("lse_base", "empty_row_lse", "q", "q_type", "q_sources", "q_rope_address", "rope_said"),
    *("scale_type", "scale_said", "scale_else"),
)
# Optional tensors of the calls that launch every variant.
WARM_TENSORS = {
    "length": "length = torch.ones(1, dtype=torch.int32, device=device)",
    "sink": "sink = torch.zeros(heads, dtype=torch.float32, device=device)",
}


def _given(plan: Plan) -> tuple[list[str], list[str]]:
    """Return the possible values of topk_length and attn_sink in wrappers, as text."""
    attention = plan.sparse_attention
    lengths, sinks = values_of(attention.topk_length, "length"), values_of(attention.attn_sink, "sink")
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
        "chunks": blocks_of(sparse.chunks),
        "v_chunks": [block for block in blocks_of(sparse.chunks) if block.acc],
        "union": sparse.sm90_shared,
    }


def _wrappers(plan: Plan, sparse: SparseFwdPlan) -> dict[str, Any]:
    """Context of the wrappers' template."""
    (lengths, sinks), pages = _given(plan), _pages(plan)
    shape = f"[pages, {pages['page_rows']}, {plan.d_qk}]" if pages["paged"] else f"[s_kv, 1, {plan.d_qk}]"
    return {
        **attention_context(plan, *FACTS, *OF_WRAPPERS),
        **pages,
        "optional": [f"{length}, {sink}" for length in lengths for sink in sinks],
        "warm_tensors": [text for name, text in WARM_TENSORS.items() if name in (*lengths, *sinks)],
        "sparse": sparse,
        "sm90": sparse.sm90,
        "sm90_kernels": list(sparse.sm90_kernels.items()),
        "union": sparse.sm90_shared,
        "kv_shape": shape,
        **_call(plan, paged=pages["paged"]),
        **_text(plan, sparse, paged=pages["paged"]),
        "options": given(
            Field("can_sm90", said="the sm90 kernels support the call's addresses and scale.") if sparse.sm90 else None,
            Field("can_share", said="the index-union kernels support the call's kv.") if sparse.sm90_shared else None,
        ),
    }


def _call(plan: Plan, *, paged: bool) -> dict[str, list[Field]]:
    """Return the table of a call's attributes: the constructor's arguments, and sizes and strides."""
    pair, heads = plan.takes_pair, "self.tokens, self.num_heads, self.q_token_stride, self.q_head_stride"
    inputs = (
        Field("q", part="part"),
        Field("q_rope", part="part") if pair else None,
        Field("kv"),
        Field("indices", part="part"),
        Field("sm_scale"),
        Field("topk_length", of_piece="length"),
        Field("attn_sink"),
        Field("out", part="part"),
        Field("max_logits", part="part"),
        Field("lse", part="part"),
        Field("workspace", said="the caller's"),
    )
    sizes = (
        Field("self.partial", "None", said="the splits' partials"),
        Field("self.q_rope_token_stride, self.q_rope_head_stride, _", "q_rope.stride()") if pair else None,
        Field("self.sm_scale_log2", "sm_scale * LOG2E.value"),
        Field(heads, "*q.shape[:2], *q.stride()[:2]"),
        Field("self.s_kv, self.topk", f"kv.shape[0]{' * PAGE_SIZE' if paged else ''}, indices.shape[2]"),
        Field("self.kv_page_stride, self.kv_row_stride, _", "kv.stride()") if paged else None,
        None if paged else Field("self.kv_row_stride", "kv.stride(0)"),
        Field("self.indices_token_stride", "indices.stride(0)"),
        Field("self.out_token_stride, self.out_head_stride, _", "out.stride()"),
        Field("self.num_splits, self.split_size", "schedule.num_splits, schedule.split_size"),
        Field("self.num_rows", "self.tokens * self.num_heads * self.num_splits"),
    )
    return {"call_inputs": given(*inputs), "call_sizes": given(*sizes)}


def _text(plan: Plan, sparse: SparseFwdPlan, *, paged: bool) -> dict[str, str]:
    """Text of the wrappers for pages, a separate RoPE and sm90 kernels."""
    shared_runs = '"sm90_shared" not in _tiles.SPARSE_FWD_LEFT_OUT' if sparse.left_out else ""
    return {
        "swap_ab_heads": tuple_text(one.block_h for one in sparse.sm90_swap_ab),
        "shared_runs_and": f"{shared_runs} and " if shared_runs else "",
        "and_shared_runs": f" and {shared_runs}" if shared_runs else "",
        "over_unions": "over index unions or " if sparse.sm90_shared else "",
        "warm_heads": "(1, *(heads + 1 for heads in SWAP_AB_HEADS))" if sparse.sm90 else "(1,)",
        "can_run": "can_sm90, can_share" if sparse.sm90_shared else "can_sm90",
        "per_page": " * PAGE_SIZE" if paged else "",
        "kv_rows": "PAGE_SIZE" if paged else "1",
        "kv_strides": "kv_page, kv_row, _" if paged else "kv_row, _, _",
        "kv_page": "kv_page | " if paged else "",
        "kv_unit": "pages" if paged else "rows",
        "q_rope_bits": "q_rope_token | q_rope_head | " if facts(plan)["rope_aligned"] else "",
    }


def shared(plan: Plan, family: SparseFwdPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    return [tiles.file(plan), splits.file(plan), generated("_sparse_fwd_kernels", _kernels(plan, family))]


def modules(plan: Plan, family: SparseFwdPlan) -> list[Module]:
    """The module of the family's wrappers."""
    wrappers = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
    return [Module(generated(MODULE, _wrappers(plan, family)), sorted([*wrappers, "workspace_size"]))]
