"""Requirements of each wrapper on its spec, and conventions of attention that it cannot keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Needs(NamedTuple):
    """Requirements of a wrapper on its spec.

    Attributes:
        attention: kinds of attention that it computes; empty if it computes none.
        rows: needs latent rows: model.kv_lora_rank and model.v_head_dim.
        cache: needs the layout of the cache.
        tensors: also takes a cache with fields in several tensors.
        rope: needs the pairs of columns that RoPE rotates.
        gptj: needs pairs of neighbours, 2i and 2i + 1, also of the row.
        multi_head: needs the dims of multi-head attention.
        values: needs the columns of V, of multi-head attention or of latent rows.
        whole_values: needs a V of all columns of a row, a power of two from 128 on.
        indexer: needs the indexer's dims.
        indexer_rope: needs columns of the indexer that RoPE rotates.
        indexer_cache: dtypes of the indexer's keys that it supports; empty if it reads no keys.
        candidates: needs the size of candidate blocks.
        hadamard: needs keys of 128 columns without RoPE, which a Hadamard transform mixes.
        beside: groups of wrappers. It launches the kernels of one of each group, which the spec must name.
    """

    attention: tuple[str, ...] = ()
    rows: bool = False
    cache: bool = False
    tensors: bool = False
    rope: bool = False
    gptj: bool = False
    multi_head: bool = False
    values: bool = False
    whole_values: bool = False
    indexer: bool = False
    indexer_rope: bool = False
    indexer_cache: tuple[str, ...] = ()
    candidates: bool = False
    hadamard: bool = False
    beside: tuple[tuple[str, ...], ...] = ()


FP8 = ("e4m3", "e4m3fnuz")
QUANTISED = (*FP8, "e2m1")
FLAT_LOGITS = ("fp8_fp4_mqa_logits", "fp8_mqa_logits")
PAGED_LOGITS = ("fp8_fp4_paged_mqa_logits", "fp8_paged_mqa_logits")
SCHEDULE = ("get_paged_mqa_logits_metadata",)
SELECTS = ("top_k_per_row_prefill", "top_k_per_row_decode", "persistent_topk", "top_k_page_table_transform")
FLAT_PICKS, PAGED_PICKS = ("indexer_topk",), ("paged_indexer_topk",)
CANDIDATES = Needs(indexer=True, candidates=True, indexer_cache=QUANTISED)
POOLED = Needs(indexer=True, indexer_cache=FP8, hadamard=True)
NEEDS: dict[str, Needs] = {
    "triton_mla_sparse_attention": Needs(("sparse",), rows=True, cache=True),
    "flash_mla_sparse_fwd": Needs(("sparse",), rows=True, cache=True),
    "flash_mla_with_kvcache": Needs(("sparse", "dense"), rows=True, cache=True, tensors=True),
    "decode_attention_fwd": Needs(("dense",), rows=True, cache=True, tensors=True),
    "flash_attn_varlen_func": Needs(multi_head=True),
    "merge_attn_states": Needs(values=True),
    "merge_attn_parts": Needs(values=True),
    "concat_and_cache_mla": Needs(rows=True, cache=True, tensors=True),
    "quantize_and_insert_k_cache": Needs(rows=True, cache=True),
    "dequantize_and_gather_k_cache": Needs(rows=True, cache=True),
    "gather_and_maybe_dequant_cache": Needs(rows=True, cache=True, tensors=True),
    "fused_deepseek_v4_qnorm_rope_kv_insert": Needs(rows=True, cache=True, rope=True),
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": Needs(rows=True, cache=True, rope=True),
    "concat_and_cache_mla_rope_fused": Needs(rows=True, cache=True, rope=True),
    "save_partial_states": Needs(rows=True, cache=True, rope=True, gptj=True),
    "compress_norm_rope_store": Needs(rows=True, cache=True, rope=True, gptj=True),
    "fused_save_compress_norm": Needs(rows=True),
    "rope_quant_insert": Needs(rows=True, cache=True, rope=True),
    "fused_inv_rope_fp8_quant": Needs(rows=True, rope=True, gptj=True, whole_values=True),
    "compute_global_topk_indices_and_lens": Needs(),
    "combine_topk_swa_indices": Needs(),
    "triton_convert_req_index_to_global_index": Needs(),
    "indexer_k_quant_and_cache": Needs(indexer=True, indexer_cache=QUANTISED),
    "cp_gather_indexer_k_quant_cache": Needs(indexer=True, indexer_cache=QUANTISED),
    "fused_indexer_q_rope_quant": Needs(indexer=True, indexer_cache=QUANTISED),
    "indexer_k_norm_rope_store": Needs(indexer=True, indexer_cache=QUANTISED),
    "indexer_qk_rope_quant_and_cache": Needs(indexer=True, indexer_rope=True, indexer_cache=QUANTISED),
    "fwht128_quant_fp8": POOLED,
    "kpool_compress_and_write_cache": POOLED,
    "kpool_seed_tail_cache": POOLED,
    "kpool_decode_update_and_maybe_write_cache_batched": POOLED,
    "expand_pools_and_append_tail": Needs(),
    "fp8_mqa_logits": Needs(indexer=True, indexer_cache=FP8),
    "fp8_fp4_mqa_logits": Needs(indexer=True, indexer_cache=QUANTISED),
    "get_paged_mqa_logits_metadata": Needs(indexer=True, indexer_cache=QUANTISED),
    "fp8_paged_mqa_logits": Needs(indexer=True, indexer_cache=FP8),
    "fp8_fp4_paged_mqa_logits": Needs(indexer=True, indexer_cache=QUANTISED),
    "top_k_per_row_prefill": Needs(),
    "top_k_per_row_decode": Needs(),
    "persistent_topk": Needs(),
    "top_k_page_table_transform": Needs(),
    "topk_merge": Needs(),
    "indexer_topk": Needs(indexer=True, indexer_cache=QUANTISED, beside=(FLAT_LOGITS, SELECTS)),
    "paged_indexer_topk": Needs(indexer=True, indexer_cache=QUANTISED, beside=(PAGED_LOGITS, SCHEDULE, SELECTS)),
    "select_candidate_blocks": Needs(indexer=True, candidates=True, beside=(SELECTS,)),
    "candidate_mqa_logits": CANDIDATES._replace(beside=(FLAT_LOGITS,)),
    "paged_candidate_mqa_logits": CANDIDATES._replace(beside=(PAGED_LOGITS,)),
    "candidate_indexer_topk": CANDIDATES._replace(beside=(FLAT_LOGITS, FLAT_PICKS, SELECTS)),
    "paged_candidate_indexer_topk": CANDIDATES._replace(beside=(PAGED_LOGITS, PAGED_PICKS, SELECTS)),
}

# Like FlashAttention's function, these always return a natural LSE and take no sink.
NATURAL = ("flash_attn_varlen_func",)
MERGES = ("merge_attn_states", "merge_attn_parts")


def lacks(name: str, parts: Mapping[str, Any]) -> str | None:
    """Return a wrapper's missing requirement in words, or None. Invalid parts of the spec are not checked."""
    missing = _missing(NEEDS[name], parts)
    return missing and f"needs {missing}"


def _missing(needs: Needs, parts: Mapping[str, Any]) -> str | None:
    if needs.rows and "model" in parts and not parts["model"].kv_lora_rank:
        return "latent rows; the spec has no model.kv_lora_rank"
    if needs.rope and "model" in parts and parts["model"].rope is None:
        return "model.rope, the pairs of columns that RoPE rotates; the spec has none"
    if needs.gptj and "model" in parts and (parts["model"].rope != "gptj" or parts["model"].kv_lora_rank % 2):
        found = f"{parts['model'].rope} and {parts['model'].kv_lora_rank}"
        return f"model.rope gptj and an even model.kv_lora_rank; the spec has {found}"
    if "multi_head" in parts and parts["multi_head"] is None:
        if needs.multi_head:
            return "multi_head; the spec has none"
        if needs.values and "model" in parts and not parts["model"].kv_lora_rank:
            return "columns of V; the spec has neither multi_head nor model.kv_lora_rank"
    if needs.whole_values and "model" in parts and (lacking := _missing_columns(parts["model"])):
        return lacking
    if needs.attention and "attention" in parts:
        attention = parts["attention"]
        if attention is None or attention.kind not in needs.attention:
            got = "no attention" if attention is None else f"attention of kind {attention.kind}"
            return f"attention of kind {' or '.join(needs.attention)}; the spec has {got}"
    if needs.cache and "cache" in parts and parts["cache"] is None:
        return "a cache; the spec has none"
    if needs.cache and not needs.tensors and parts.get("cache") and parts["cache"].layout.tensors:
        return f"a cache in one tensor; cache.layout has fields in {' and '.join(parts['cache'].layout.tensors)}"
    if needs.indexer and "indexer" in parts and parts["indexer"] is None:
        return "indexer; the spec has none"
    if needs.indexer_rope and parts.get("indexer") and not parts["indexer"].rope_head_dim:
        return "indexer.rope_head_dim above 0; the spec has 0"
    if needs.candidates and parts.get("indexer") and parts["indexer"].candidates is None:
        return "indexer.candidates; the spec has none"
    if needs.hadamard and parts.get("indexer"):
        columns, rope = parts["indexer"].head_dim, parts["indexer"].rope_head_dim
        if (columns, rope) != (128, 0):
            return f"keys of 128 columns without RoPE; indexer.head_dim is {columns} and indexer.rope_head_dim {rope}"
    if needs.indexer_cache and "indexer_cache" in parts:
        return _missing_keys(needs.indexer_cache, parts["indexer_cache"])
    return None


def _missing_columns(model: Any) -> str | None:
    """Return the requirement on V's columns that a model does not meet, or None."""
    v, row = model.v_head_dim, model.d_qk
    if v == row and v >= 128 and v & (v - 1) == 0:
        return None
    return f"a V of all columns of a row, a power of two from 128 on; V has {v} of {row}"


def _missing_keys(dtypes: Sequence[str], cache: Any) -> str | None:
    """Return a wrapper's missing requirement on the cache of the indexer's keys, or None."""
    if cache is None:
        return "indexer_cache; the spec has none"
    fields = (*cache.layout.fields, *cache.layout.planar_fields)
    stored = next(field.dtype for field in fields if field.kind in ("row", "latent"))
    if stored not in dtypes:
        return f"keys in {' or '.join(dtypes)}; indexer_cache stores {stored}"
    return None


def runs_alone(name: str, wrappers: Sequence[str]) -> str | None:
    """Return the wrappers that a wrapper launches and the spec does not name, in words, or None."""
    for group in NEEDS[name].beside:
        if not set(group) & set(wrappers):
            return f"needs one of {' or '.join(group)} in wrappers; the spec has none"
    return None


def at_odds(name: str, wrappers: Sequence[str], parts: Mapping[str, Any]) -> str | None:
    """Return the convention of the spec's attention that a wrapper cannot keep, in words, or None.

    The LSE of an empty row is not checked: merges take either infinity.
    """
    attention = parts.get("attention")
    if name in MERGES and getattr(attention, "out_quant", None) is not None:
        return "merges results of model.dtype, but attention.out_quant quantises them"
    if attention is None or name not in NATURAL:
        return None
    if attention.lse_base != "e":
        return f"returns a natural LSE, but attention.lse_base is '{attention.lse_base}'; takes 'e'"
    if getattr(attention, "attn_sink", None) == "required" and not set(MERGES) & set(wrappers):
        return f"takes no sink, but attention.attn_sink is 'required'; add {' or '.join(MERGES)} to wrappers"
    return None
