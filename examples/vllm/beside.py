"""Attention of DeepSeek V4's layers in vLLM beside vLLM's own, of the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention


def own(layer: Any) -> Callable[[Any, Any, Any], Any]:
    """vLLM's own attention of a layer of the plugin's, from the same query and caches: bf16 [T, h_q, d]."""
    theirs = DeepseekV4FlashMLAAttention
    wide = theirs.get_padded_num_q_heads(layer.n_local_heads)
    sink = torch.full((wide,), -torch.inf, device=layer.attn_sink.device)
    sink[: layer.padded_heads] = layer.attn_sink.data
    sinks = torch.nn.Parameter(sink, requires_grad=False), layer.attn_sink

    def attention(q: Any, kv: Any, positions: Any) -> Any:
        padded = q.new_zeros(q.shape[0], wide, q.shape[2])
        padded[:, : q.shape[1]] = q
        output = torch.empty_like(padded)
        layer.attn_sink = sinks[0]
        theirs.forward_mqa(layer, padded, kv, positions, output)
        layer.attn_sink = sinks[1]
        return output[:, : q.shape[1]]

    return attention


def compare(layer: Any, found: dict[str, list[float]]) -> None:
    """Has vLLM's own attention compute what a layer of the plugin's does.

    `found` gets, by kind of layer and of tokens, the largest difference of a head's output by its largest column, the
    sum of all squared differences, and that of the squares.
    """
    ours, theirs = layer.forward_mqa, own(layer)
    name = {1: "window", 4: "C4A", 128: "C128A"}[layer.compress_ratio]

    def forward_mqa(q: Any, kv: Any, positions: Any, output: Any) -> None:
        ours(q, kv, positions, output)
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return
        other = theirs(q, kv, positions)
        window = metadata[layer.swa_cache_layer.prefix]
        ends = (0, window.num_decode_tokens, window.num_decode_tokens + window.num_prefill_tokens)
        for what, first, end in zip(("decode", "prefill"), ends, ends[1:], strict=False):
            if end > first:
                a, b = (one[first:end, : layer.n_local_heads].float() for one in (output, other))
                error = (a - b).abs().amax(2) / b.abs().amax(2).clamp(min=1e-9)
                most, *sums = found.get(f"{name} {what}", [0.0, 0.0, 0.0])
                most = max(most, error.nan_to_num(nan=torch.inf).max().item())
                seen = ((a - b).square().sum().item(), b.square().sum().item())
                found[f"{name} {what}"] = [most, *(x + y for x, y in zip(sums, seen, strict=True))]

    layer.forward_mqa = forward_mqa
