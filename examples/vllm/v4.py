"""What a tiny DeepSeek V4 with random weights needs of vLLM that vLLM does not do by itself.

Its layers call TileLang for the streams around attention and CuTe DSL for the rows of the compressed cache. Where these
libraries are not installed, vLLM's own code in torch and in Triton stands in for both engines alike.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

MODEL = "vllm.models.deepseek_v4.nvidia.model"
COMPRESSOR = "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"


def finish(module: Any) -> None:
    """Sets what random weights do not, in a module that has just got them: norms that keep sizes, scales of 1."""
    for name, weight in module.state_dict().items():
        if "norm" in name or name.endswith("weight_scale_inv"):
            weight.fill_(1)
    if "Norm" in type(module).__name__:
        module.weight.data.fill_(1)
    if hasattr(module, "finalize_mhc_broadcast_weights"):  # what loading a checkpoint ends in
        stand_in()
        module.finalize_mhc_broadcast_weights()


def stand_in() -> None:
    """Puts vLLM's own slower code where a library is missing."""
    if importlib.util.find_spec("tilelang") is None:
        model = importlib.import_module(MODEL)
        for function in (
            mhc_pre_broadcast_tilelang,
            mhc_pre_tilelang,
            mhc_fused_post_pre_tilelang,
            mhc_post_tilelang,
            hc_head_fused_kernel_tilelang,
        ):
            setattr(model, function.__name__, function)
    if importlib.util.find_spec("cutlass") is None:
        from vllm.models.deepseek_v4.common.ops import fused_compress_quant_cache as triton_code

        def compress_norm_rope_store_cutedsl(
            *, store_full_kv: bool, store_full_fp8: bool, fp8_scale: Any, **options: Any
        ) -> None:
            triton_code.compress_norm_rope_store_triton(**options)

        sys.modules[COMPRESSOR] = module = types.ModuleType(COMPRESSOR)
        vars(module).update(compress_norm_rope_store_cutedsl=compress_norm_rope_store_cutedsl)


def _normed(x: Any, weight: Any, eps: float) -> Any:
    import torch

    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def mhc_pre_tilelang(
    residual: Any, fn: Any, scale: Any, base: Any, rms_eps: float, pre_eps: float, sinkhorn_eps: float,
    post_mult: float, repeat: int, n_splits: int = 1, norm_weight: Any = None, norm_eps: float = 1e-6, **_: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """What goes into a layer, of all streams, and how its output goes back into them."""
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_torch

    options = (rms_eps, pre_eps, sinkhorn_eps, post_mult, repeat)
    post, mix, x = mhc_pre_torch(residual, fn, scale, base, *options)
    return post, mix, x if norm_weight is None else _normed(x, norm_weight, norm_eps)


def mhc_pre_broadcast_tilelang(
    x: Any, fn: Any, *options: Any, fn_broadcast: Any = None, **more: Any
) -> tuple[Any, ...]:
    """The same of the first layer, whose streams are all alike."""
    residual = x[:, None].expand(-1, fn.shape[1] // x.shape[1], -1).contiguous()
    return residual, *mhc_pre_tilelang(residual, fn, *options, **more)


def mhc_post_tilelang(x: Any, residual: Any, post: Any, mix: Any) -> Any:
    """The streams behind a layer."""
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    return mhc_post_torch(x, residual, post, mix)


def mhc_fused_post_pre_tilelang(
    x: Any, residual: Any, post: Any, mix: Any, *options: Any, n_splits: int = 1, tile_n: int = 1, **more: Any
) -> tuple[Any, ...]:
    """The streams behind a layer, and what goes into the next."""
    residual = mhc_post_tilelang(x, residual, post, mix)
    return residual, *mhc_pre_tilelang(residual, *options, **more)


def hc_head_fused_kernel_tilelang(x: Any, fn: Any, scale: Any, base: Any, rms_eps: float, eps: float) -> Any:
    """One stream of all, behind the last layer."""
    import torch

    flat = x.flatten(1).float()
    mixes = flat @ fn.t() * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    return ((torch.sigmoid(mixes * scale + base) + eps)[..., None] * x.float()).sum(1).to(x.dtype)


def beside(layer: Any, found: dict[str, float]) -> None:
    """Has vLLM's own attention compute what a layer of the plugin's does, from the same query and caches.

    `found` gets, by kind of layer and of tokens, the largest difference of a head's output by its largest column.
    """
    import torch
    from vllm.forward_context import get_forward_context
    from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

    theirs, ours = DeepseekV4FlashMLAAttention, layer.forward_mqa
    name = {1: "window", 4: "C4A", 128: "C128A"}[layer.compress_ratio]
    wide = theirs.get_padded_num_q_heads(layer.n_local_heads)
    sink = torch.full((wide,), -torch.inf, device=layer.attn_sink.device)
    sink[: layer.padded_heads] = layer.attn_sink.data
    sinks = torch.nn.Parameter(sink, requires_grad=False), layer.attn_sink

    def forward_mqa(q: Any, kv: Any, positions: Any, output: Any) -> None:
        ours(q, kv, positions, output)
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return
        padded = q.new_zeros(q.shape[0], wide, q.shape[2])
        padded[:, : q.shape[1]] = q
        other = torch.empty_like(padded)
        layer.attn_sink = sinks[0]
        theirs.forward_mqa(layer, padded, kv, positions, other)
        layer.attn_sink = sinks[1]
        window = metadata[layer.swa_cache_layer.prefix]
        ends = (0, window.num_decode_tokens, window.num_decode_tokens + window.num_prefill_tokens)
        for what, first, end in zip(("decode", "prefill"), ends, ends[1:], strict=False):
            if end > first:
                a, b = output[first:end].float(), other[first:end, : q.shape[1]].float()
                error = ((a - b).abs().amax(2) / b.abs().amax(2).clamp(min=1e-9))[:, : layer.n_local_heads]
                key = f"{name} {what}"
                found[key] = max(found.get(key, 0.0), error.nan_to_num(nan=torch.inf).max().item())

    layer.forward_mqa = forward_mqa
