"""Sparse attention over unquantised rows: single-pass and split-KV kernels, and their wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.backends.parts import splits, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.call import CallTable, Field, given
from mlagen.backends.parts.common import Block, blocks_of, tuple_text
from mlagen.backends.parts.splits import (
    ANGLE_ARGUMENTS,
    QUANT_ARGUMENTS,
    Attention,
    AttentionWrappers,
    OutRope,
    QuantisedOut,
    attention_context,
    rope_aligned,
    rotated,
    values_of,
)
from mlagen.plan import IndexUnionPlan, Plan, Sm90Plan, SparseFwdPlan
from mlagen.plan.splits import PartialRow

MODULE = "sparse_fwd"
# Optional tensors of the calls that launch every variant.
WARM_TENSORS = {
    "length": "length = torch.ones(1, dtype=torch.int32, device=device)",
    "sink": "sink = torch.zeros(heads, dtype=torch.float32, device=device)",
}


@dataclass(frozen=True)
class Kernels(Attention):
    """Context of the kernels' template.

    Attributes:
        has_sink, sink_required: whether attention may take a sink, and whether it must.
        has_topk_length, length_required: whether it may take lengths of index lists, and whether it must.
        partials: a row of a split's results.
        paged, page_rows: whether rows lie in pages, and rows of a page.
        chunks, v_chunks: blocks of K and of V.
        out_rope, out_quant: the rotation and the quantisation of the output; None without.
        rotated: blocks of V with columns that the epilogue rotates.
        angle_arguments, quant_arguments: a further line of kernels' arguments, for positions and angles and for a
            quantised output; empty without.
        union: the plan of index unions; None without.
    """

    has_sink: bool
    sink_required: bool
    has_topk_length: bool
    length_required: bool
    partials: PartialRow
    paged: bool
    page_rows: int
    chunks: Sequence[Block]
    v_chunks: Sequence[Block]
    out_rope: OutRope | None
    out_quant: QuantisedOut | None
    rotated: Sequence[Block]
    angle_arguments: str
    quant_arguments: str
    union: IndexUnionPlan | None


@dataclass(frozen=True)
class Text:
    """Text of the wrappers for pages, a separate RoPE and sm90 kernels.

    Attributes:
        swap_ab_heads: heads of the swap-AB kernels.
        shared_runs_and, and_shared_runs: the condition that the index-union kernels run, on either side of `and`.
        over_unions: the kernels over index unions, in docstrings.
        warm_heads: heads of the calls that launch every variant.
        can_run: options of a call.
        per_page: the factor from pages to rows.
        kv_rows, kv_strides, kv_page, kv_unit: rows of a page, strides, the page's stride and its unit.
        q_rope_bits: strides of Q's RoPE columns.
    """

    swap_ab_heads: str
    shared_runs_and: str
    and_shared_runs: str
    over_unions: str
    warm_heads: str
    can_run: str
    per_page: str
    kv_rows: str
    kv_strides: str
    kv_page: str
    kv_unit: str
    q_rope_bits: str


@dataclass(frozen=True)
class Wrappers(AttentionWrappers, CallTable, Text):
    """Context of the wrappers' template.

    Attributes:
        wrappers: the package's wrappers.
        has_sink, sink_required: whether attention may take a sink, and whether it must.
        length_required: whether it must take lengths of index lists.
        merge_import, merge_sources: text for merges; empty without.
        scale_type, scale_said, scale_else: text for the softmax scale.
        paged, page_rows: whether rows lie in pages, and rows of a page.
        optional: every choice of optional tensors that a kernel is compiled for, as text.
        warm_tensors: definitions of the optional tensors of the calls that launch every variant.
        sparse: the family's plan.
        out_rope, out_quant: the rotation and the quantisation of the output; None without.
        sm90, union: plans of the sm90 kernel and of index unions; None without.
        sm90_kernels: names and modules of the sm90 kernels.
        kv_shape: shape of kv, for docstrings.
        options: options of a call.
    """

    wrappers: Sequence[str]
    has_sink: bool
    sink_required: bool
    length_required: bool
    merge_import: str
    merge_sources: str
    scale_type: str
    scale_said: str
    scale_else: str
    paged: bool
    page_rows: int
    optional: Sequence[str]
    warm_tensors: Sequence[str]
    sparse: SparseFwdPlan
    out_rope: OutRope | None
    out_quant: QuantisedOut | None
    sm90: Sm90Plan | None
    sm90_kernels: Sequence[tuple[str, str]]
    union: IndexUnionPlan | None
    kv_shape: str
    options: Sequence[Field]


def _given(plan: Plan) -> tuple[list[str], list[str]]:
    """Return the possible values of topk_length and attn_sink in wrappers, as text."""
    attention = plan.sparse_attention
    lengths, sinks = values_of(attention.topk_length, "length"), values_of(attention.attn_sink, "sink")
    if "flash_mla_sparse_fwd" not in plan.spec.wrappers:  # the other wrapper leaves out optional tensors
        return lengths[:1], sinks[:1]
    return lengths, sinks


def _kernels(plan: Plan, sparse: SparseFwdPlan) -> Kernels:
    """Context of the kernels' template."""
    chunks = blocks_of(sparse.chunks)
    v_chunks = [chunk for chunk in chunks if chunk.acc]
    return Kernels(
        **attention_context(plan, Kernels),
        paged=plan.rows_block_size is not None,
        page_rows=plan.rows_block_size or 1,
        chunks=chunks,
        v_chunks=v_chunks,
        angle_arguments=ANGLE_ARGUMENTS if plan.out_rope else "",
        quant_arguments=QUANT_ARGUMENTS if plan.out_quant else "",
        rotated=rotated(plan, v_chunks),
        union=sparse.sm90_shared,
    )


def _wrappers(plan: Plan, sparse: SparseFwdPlan) -> Wrappers:
    """Context of the wrappers' template."""
    (lengths, sinks), rows = _given(plan), plan.rows_block_size
    said_sm90, said_union = "the sm90 kernels support the call's", "the index-union kernels support the call's"
    return Wrappers(
        **attention_context(plan, Wrappers),
        **vars(_call(plan, paged=rows is not None)),
        **vars(_text(plan, sparse, paged=rows is not None)),
        paged=rows is not None,
        page_rows=rows or 1,
        optional=[f"{length}, {sink}" for length in lengths for sink in sinks],
        warm_tensors=[
            *(["given = (positions, cos_sin_cache, out, scales)"] if plan.out_quant else []),
            *(text for name, text in WARM_TENSORS.items() if name in (*lengths, *sinks)),
        ],
        sparse=sparse,
        sm90=sparse.sm90,
        sm90_kernels=list(sparse.sm90_kernels.items()),
        union=sparse.sm90_shared,
        kv_shape=f"[pages, {rows}, {plan.d_qk}]" if rows is not None else f"[s_kv, 1, {plan.d_qk}]",
        options=given(
            Field("can_sm90", said=f"{said_sm90} addresses and scale.") if sparse.sm90 else None,
            Field("can_share", said=f"{said_union} kv.") if sparse.sm90_shared else None,
        ),
    )


def _call(plan: Plan, *, paged: bool) -> CallTable:
    """Return the table of a call's attributes: the constructor's arguments, and sizes and strides."""
    quant = plan.out_quant
    pair, heads = plan.takes_pair, "self.tokens, self.num_heads, self.q_token_stride, self.q_head_stride"
    inputs = (
        Field("q", rows="tokens"),
        Field("q_rope", rows="tokens") if pair else None,
        Field("kv"),
        Field("indices", rows="tokens"),
        Field("sm_scale"),
        Field("topk_length", of_batch="length"),
        Field("attn_sink"),
        Field("positions", rows="tokens") if plan.out_rope else None,
        Field("cos_sin_cache") if plan.out_rope else None,
        Field("out", rows="tokens"),
        None if quant is None else Field("out_scales"),
        Field("max_logits", rows="tokens"),
        Field("lse", rows="tokens"),
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
        Field("self.out_token_stride, self.out_head_stride, _", "out.stride()") if quant is None else None,
        None
        if quant is None
        else Field("self.out_token_stride, self.out_group_stride, self.out_head_stride, _", "out.stride()"),
        None if quant is None else Field("self.num_tokens", "self.tokens", said="of a whole call"),
        Field("self.num_positions, self.cos_sin_stride", "cos_sin_cache.shape[0], cos_sin_cache.stride(0)")
        if plan.out_rope
        else None,
        Field("self.num_splits, self.split_size", "schedule.num_splits, schedule.split_size"),
        Field("self.num_rows", "self.tokens * self.num_heads * self.num_splits"),
    )
    return CallTable(given(*inputs), given(*sizes))


def _text(plan: Plan, sparse: SparseFwdPlan, *, paged: bool) -> Text:
    """Text of the wrappers for pages, a separate RoPE and sm90 kernels."""
    shared_runs = '"sm90_shared" not in _tiles.SPARSE_FWD_LEFT_OUT' if sparse.left_out else ""
    return Text(
        swap_ab_heads=tuple_text(one.block_h for one in sparse.sm90_swap_ab),
        shared_runs_and=f"{shared_runs} and " if shared_runs else "",
        and_shared_runs=f" and {shared_runs}" if shared_runs else "",
        over_unions="over index unions or " if sparse.sm90_shared else "",
        warm_heads="(1, *(heads + 1 for heads in SWAP_AB_HEADS))" if sparse.sm90 else "(1,)",
        can_run="can_sm90, can_share" if sparse.sm90_shared else "can_sm90",
        per_page=" * PAGE_SIZE" if paged else "",
        kv_rows="PAGE_SIZE" if paged else "1",
        kv_strides="kv_page, kv_row, _" if paged else "kv_row, _, _",
        kv_page="kv_page | " if paged else "",
        kv_unit="pages" if paged else "rows",
        q_rope_bits="q_rope_token | q_rope_head | " if rope_aligned(plan) else "",
    )


def private_files(plan: Plan, family: SparseFwdPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    return [tiles.file(plan), splits.file(plan), generated("_sparse_fwd_kernels", vars(_kernels(plan, family)))]


def modules(plan: Plan, family: SparseFwdPlan) -> list[Module]:
    """The module of the family's wrappers."""
    wrappers = family.wanted(plan.spec)
    return [Module(generated(MODULE, vars(_wrappers(plan, family))), sorted([*wrappers, "workspace_size"]))]
