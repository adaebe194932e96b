"""Peers of multi-head attention and of merges: FlashAttention-3, and vLLM's kernels in Triton and in CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mlagen.bench.peers.cache import CUDA_LIBRARY
from mlagen.bench.peers.sparse_fwd import first_module, flash_attention_3_interface, load_packed_library
from mlagen.bench.trial import Call

MERGE_OPS = ("vllm.v1.attention.ops.triton_merge_attn_states",)


def flash_attention_3(inputs: Any) -> Call:
    """A call of FlashAttention-3's varlen prefill, which computes the LSE too and gives out alone."""
    attention = flash_attention_3_interface().flash_attn_varlen_func
    arguments = {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "cu_seqlens_q": inputs.cu_seqlens,
        "cu_seqlens_k": inputs.cu_seqlens,
        "max_seqlen_q": inputs.longest,
        "max_seqlen_k": inputs.longest,
        "softmax_scale": inputs.scale,
        "causal": True,
        "fa_version": 3,
    }
    return lambda: attention(**arguments)


def triton_merge() -> Callable[..., Any]:
    """vLLM's merge in Triton. Raises ImportError where it is not installed."""
    return first_module(MERGE_OPS).merge_attn_states  # type: ignore[no-any-return]


def cuda_merge() -> Callable[..., Any]:
    """vLLM's merge in CUDA, with the signature of that in Triton. Raises ImportError where it is not installed."""
    load_packed_library(*CUDA_LIBRARY)
    merge = getattr(torch.ops._C, "merge_attn_states", None)
    if merge is None:
        raise ImportError("vLLM's library has no merge_attn_states")

    def call(out: Any, prefix: Any, prefix_lse: Any, suffix: Any, suffix_lse: Any, out_lse: Any) -> None:
        merge(out, out_lse, prefix, prefix_lse, suffix, suffix_lse)

    return call
