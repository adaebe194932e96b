"""How callers of other versions of the same interfaces bind: docs/signatures.md, form by form."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlagen.compile.worker import load_package

GENERATED = Path(__file__).parents[2] / "generated"
# A package that has the wrapper.
PACKAGES = {
    "flash_attn_varlen_func": "minicpm3_prefill",
    "flash_mla_with_kvcache": "dsv32_fp8",
    "flash_mla_sparse_fwd": "dsv32",
    "triton_mla_sparse_attention": "dsv32",
    "decode_attention_fwd": "dsv3",
    "merge_attn_states": "dsv3_prefill",
}
VARLEN = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
CACHED = ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits")
CACHED += ("softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache")
CACHED += ("extra_indices_in_kvcache", "topk_length", "extra_topk_length", "out")
DECODE = ("q", "k_buffer", "v_buffer", "o", "lse", "req_to_token", "b_seq_len", "attn_logits", "num_kv_splits")
DECODE += ("sm_scale", "page_size", "logit_cap", "k_scale", "v_scale", "is_mla")
MERGED = ("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output_lse")
MERGED += ("prefill_tokens_with_context",)
# (wrapper, caller): what it passes by position, each under the name that it has there, and by name.
CALLS: dict[tuple[str, str], tuple[Sequence[str], Sequence[str]]] = {
    ("flash_attn_varlen_func", "FlashAttention"): (VARLEN, ("softmax_scale", "causal", "window_size", "softcap")),
    ("flash_attn_varlen_func", "vLLM 0.24 and 0.33"): (
        (),
        (*VARLEN, "softmax_scale", "causal", "return_softmax_lse", "fa_version", "num_splits", "s_aux", "block_table"),
    ),
    ("flash_mla_with_kvcache", "FlashMLA, vLLM 0.24"): (CACHED, ()),
    ("flash_mla_with_kvcache", "FlashMLA, vLLM 0.33"): ((*CACHED, "enable_batch_invariant"), ()),
    ("flash_mla_sparse_fwd", "FlashMLA, vLLM 0.24 and 0.33"): (
        ("q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length", "out"),
        (),
    ),
    ("triton_mla_sparse_attention", "vLLM"): (("q", "kv", "indices", "sm_scale", "num_kv_splits", "sm_count"), ()),
    ("decode_attention_fwd", "vLLM 0.24 and 0.33"): (DECODE, ()),
    ("decode_attention_fwd", "vLLM's triton_mla"): (DECODE[:11], DECODE[12:]),
    ("merge_attn_states", "vLLM 0.24"): (MERGED, ()),
}
# What these versions pass at the position behind, which has another meaning here.
REFUSED = {
    ("flash_attn_varlen_func", "FlashAttention 2: dropout_p"): (*VARLEN, "dropout_p"),
    ("flash_attn_varlen_func", "FlashAttention 3: seqused_q"): (*VARLEN, "seqused_q", "seqused_k", "softmax_scale"),
    ("flash_attn_varlen_func", "FlashMLA: dropout_p"): (*VARLEN, "dropout_p", "softmax_scale", "causal"),
}


def signature(wrapper: str) -> inspect.Signature:
    return inspect.signature(getattr(load_package(GENERATED / PACKAGES[wrapper]), wrapper))


@pytest.mark.parametrize(("wrapper", "caller"), CALLS, ids=" - ".join)
def test_a_call_of_another_version_binds_each_argument_to_its_own_name(wrapper, caller):
    by_position, by_name = CALLS[wrapper, caller]
    bound: dict[str, Any] = signature(wrapper).bind(*by_position, **{name: name for name in by_name}).arguments
    assert bound == {name: name for name in (*by_position, *by_name)}


@pytest.mark.parametrize(("wrapper", "caller"), REFUSED, ids=" - ".join)
def test_a_position_that_means_something_else_there_does_not_bind(wrapper, caller):
    with pytest.raises(TypeError, match="too many positional arguments"):
        signature(wrapper).bind(*REFUSED[wrapper, caller])
