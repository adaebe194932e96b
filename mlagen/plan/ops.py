"""Wrappers as operators of torch: facts that a wrapper's signature does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mlagen.plan.indexer import indexer_rows_of
from mlagen.spec import DenseAttention, Spec

NOTHING: Mapping[str, str | None] = MappingProxyType({})


@dataclass(frozen=True)
class Op:
    """Facts of an operator's schema beyond the wrapper's signature.

    Attributes:
        writes: arguments that the wrapper writes to if they are given, besides those that take a result.
        results: the results in order, each with the argument that takes it if there is one.
        leaves_out: arguments that no operator takes: they settle how many results there are, or are no schema's type.
        nested: the wrapper returns a pair in place of a result. Its operator returns two results instead.
    """

    writes: tuple[str, ...] = ()
    results: Mapping[str, str | None] = field(default_factory=lambda: NOTHING)
    leaves_out: tuple[str, ...] = ()
    nested: bool = False

    @property
    def written(self) -> tuple[str, ...]:
        """Every argument that the wrapper writes to."""
        takers = dict.fromkeys(taker for taker in self.results.values() if taker is not None)
        return (*takers, *self.writes)


OPS: Mapping[str, Op] = {
    "triton_mla_sparse_attention": Op(("lse", "workspace"), {"out": "out"}),
    "flash_mla_sparse_fwd": Op(("workspace",), {"out": "out", "max_logits": "max_logits", "lse": "lse"}),
    "flash_mla_with_kvcache": Op(
        ("workspace",), {"out": "out", "lse": None}, ("tile_scheduler_metadata", "num_splits")
    ),
    "decode_attention_fwd": Op(("o", "lse", "workspace")),
    "flash_attn_varlen_func": Op(
        (), {"out": "out", "lse": None}, ("return_softmax_lse", "return_attn_probs", "window_size")
    ),
    "merge_attn_states": Op(("output", "output_lse")),
    "merge_attn_parts": Op((), {"out": "out", "output_lse": "output_lse"}),
    "concat_and_cache_mla": Op(("kv_cache",)),
    "quantize_and_insert_k_cache": Op(("k_cache",)),
    "dequantize_and_gather_k_cache": Op(("out",)),
    "gather_and_maybe_dequant_cache": Op(("dst",)),
    "compute_global_topk_indices_and_lens": Op((), {"slots": None, "lens": None}),
    "combine_topk_swa_indices": Op((), {"indices": "out", "lens": "out"}),
    "triton_convert_req_index_to_global_index": Op(("valid_counts_out",), {"slots": "out"}, ("return_valid_counts",)),
    "fp8_mqa_logits": Op((), {"logits": None}),
    "fp8_fp4_mqa_logits": Op((), {"logits": None}, ("logits_dtype",)),
    "get_paged_mqa_logits_metadata": Op((), {"schedule": None}),
    "fp8_paged_mqa_logits": Op((), {"logits": None}),
    "fp8_fp4_paged_mqa_logits": Op((), {"logits": None}, ("logits_dtype",)),
    "top_k_per_row_prefill": Op(("indices", "scores")),
    "top_k_per_row_decode": Op(("indices", "scores")),
    "persistent_topk": Op(("indices", "scores")),
    "top_k_page_table_transform": Op(("out_raw_indices", "scores"), {"slots": "out"}),
    "topk_merge": Op((), {"ids": "out", "scores": "out_scores"}),
    "indexer_topk": Op(("scores", "slots", "workspace"), {"indices": "out"}),
    "paged_indexer_topk": Op(("scores", "slots", "workspace"), {"indices": "out"}),
    "indexer_k_quant_and_cache": Op(("kv_cache",)),
    "cp_gather_indexer_k_quant_cache": Op(("dst_k", "dst_scale")),
    "fused_indexer_q_rope_quant": Op((), {"q": None, "weights": None}, ("use_fp4", "weights_out_dtype")),
    "indexer_k_norm_rope_store": Op(("k_cache",), leaves_out=("use_fp4_cache",)),
}
# The same of wrappers that return a pair in place of a tensor where two columns share a byte.
PACKED_OPS: Mapping[str, Op] = {
    "fused_indexer_q_rope_quant": Op(
        (), {"q": None, "q_scale": None, "weights": None}, ("use_fp4", "weights_out_dtype"), nested=True
    ),
}


@dataclass(frozen=True)
class OpsPlan:
    """The operators of a package.

    Attributes:
        namespace: `torch.ops.<namespace>`, the spec's name.
        constants: values of constants that stand in signatures, by their text there.
        ops: the facts of each wrapper's operator, by the wrapper's name.
    """

    namespace: str
    constants: Mapping[str, int | None]
    ops: Mapping[str, Op] = field(default_factory=lambda: OPS)


def make_ops(spec: Spec) -> OpsPlan | None:
    """The operators of a spec; None where it asks for none."""
    if not spec.ops:
        return None
    window = spec.attention.window if isinstance(spec.attention, DenseAttention) else None
    rows = indexer_rows_of(spec)
    ops = {**OPS, **PACKED_OPS} if rows and rows.packed else OPS
    return OpsPlan(spec.name, {"D_V.value": spec.model.v_head_dim, "WINDOW": window}, ops)
