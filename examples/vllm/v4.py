"""What a tiny DeepSeek V4 with random weights needs of vLLM that vLLM does not do by itself.

Its layers call TileLang for the streams around attention and CuTe DSL for the rows of the compressed cache. Where these
libraries are not installed, vLLM's own code in torch and in Triton stands in for both engines alike.

And its layers quantise what attention gives to e4m3 before they project it, behind which one step of bf16 is a step of
e4m3, 16 times as large, in some places: two attentions that round otherwise are not told from two that differ. Here it
is projected as it is, in float32, by both engines alike.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from typing import Any

import torch
from calls import count

HEAD = 3 / 64  # of the last matrix's weights: norms keep sizes, so that logits were 20 times the other models' else
SINKS = torch.tensor([-1.0, 0.0, 1.0, 2.0])
MODEL = "vllm.models.deepseek_v4.nvidia.model"
COMPRESSOR = "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"


def finish(module: Any) -> None:
    """Sets what random weights do not, in a module that has just got them: norms that keep sizes, sinks, logits' size.

    A layer of attention gets another projection of its output, before vLLM captures graphs of it.
    """
    for name, weight in module.state_dict().items():
        if "norm" in name:
            weight.fill_(1)
        if name.endswith("attn_sink"):  # of each head, however many a class pads to
            weight.copy_(SINKS.to(weight.device).repeat(-(-len(weight) // len(SINKS)))[: len(weight)])
    if "Norm" in type(module).__name__:
        module.weight.data.fill_(1)
    if type(module).__name__ == "ParallelLMHead":
        module.weight.data.mul_(HEAD)
    if hasattr(module, "_o_proj"):
        module._o_proj = functools.partial(project, module)
    if hasattr(module, "finalize_mhc_broadcast_weights"):  # what loading a checkpoint ends in
        stand_in()
        module.finalize_mhc_broadcast_weights()


def project(layer: Any, o: Any, positions: Any) -> Any:
    """What a layer's `_o_proj` does, without e4m3: heads turned back by their RoPE, `wo_a` in float32, `wo_b` in bf16.

    All of it runs on the device, from tensors that stay where they are, so that a CUDA graph holds it.

    Args:
        layer: vLLM's attention of DeepSeek V4, whose `wo_a` is not quantised.
        o: bf16 [T, h_q, d], what attention gave.
        positions: int64 [T].

    Returns:
        bf16 [T, hidden_size].
    """
    count("projected")
    rows = o.to(torch.float32, copy=True)
    rotated = rows[..., layer.nope_head_dim :].unflatten(-1, (-1, 2))  # [T, h_q, rope / 2, 2]
    cos, sin = layer.rotary_emb.cos_sin_cache[positions][:, None].float().chunk(2, -1)  # [T, 1, rope / 2] each
    even, odd = rotated.unbind(-1)
    rotated.copy_(torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1))
    groups = rows.reshape(len(rows), layer.n_local_groups, -1)  # [T, groups, heads of a group x d]
    matrix = layer.wo_a.weight.float().view(layer.n_local_groups, layer.o_lora_rank, -1)
    return layer.wo_b(torch.einsum("tgd,grd->tgr", groups, matrix).to(o.dtype).flatten(1))


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
    flat = x.flatten(1).float()
    mixes = flat @ fn.t() * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    return ((torch.sigmoid(mixes * scale + base) + eps)[..., None] * x.float()).sum(1).to(x.dtype)
