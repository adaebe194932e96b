"""Attention of Hugging Face models by a generated package, through transformers' AttentionInterface.

    use_multi_head(model, package)   flash_attn_varlen_func: DeepSeek V2 and V3, MiniCPM3 as they are
    use_sparse(model, package)       flash_mla_sparse_fwd: DeepSeek V3.2, absorbed, its cache holding latent rows

A package's dims have to be those of the model's attention; the number of heads may be any.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask, sdpa_mask


def use_multi_head(model: torch.nn.Module, package: Any) -> None:
    """Lets a model attend by the package's `flash_attn_varlen_func`."""

    def attend(module, query, key, value, attention_mask, scaling, **_):
        # query [b, h, s, d_qk], key [b, h, t, d_qk], value [b, h, t, d_v]; the mask [b, t] is False for padding.
        b, _, s, _ = query.shape
        t = key.shape[2]
        keep = torch.ones(b, t, dtype=torch.bool, device=query.device)
        if attention_mask is not None:
            keep = attention_mask.bool()
        keep_q = keep[:, t - s :]
        packed, _ = package.flash_attn_varlen_func(
            query.transpose(1, 2)[keep_q],
            key.transpose(1, 2)[keep],
            value.transpose(1, 2)[keep],
            _offsets(keep_q),
            _offsets(keep),
            s,
            t,
            softmax_scale=scaling,
            causal=True,
        )
        out = packed.new_zeros(b, s, *packed.shape[1:])
        out[keep_q] = packed
        return out, None

    _select(model, package, attend, flash_attention_mask)


def use_sparse(model: torch.nn.Module, package: Any) -> None:
    """Lets a model with an indexer attend by the package's `flash_mla_sparse_fwd`, to latent rows.

    A head's keys and values are products of a token's latent row. So q takes the keys' weights in place of the row, the
    output takes the values', and what is cached is the row alone: [ latent | RoPE ], once for all heads.
    """

    def latent_rows(module, latent, rope):
        # Both [b, 1, s, d]; transformers caches what this returns, so the values, which the row holds, are left out.
        return torch.cat((latent, rope), dim=-1), latent[..., :0]

    def attend(module, query, key, value, attention_mask, scaling, indices, **_):
        b, h, s, _ = query.shape
        t = key.shape[2]
        weights = module.kv_b_proj.weight.view(h, -1, module.kv_lora_rank)
        of_keys, of_values = weights.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
        nope, rope = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        latent_q = torch.einsum("bhsd,hdc->bshc", nope, of_keys)
        q = torch.cat((latent_q, rope.transpose(1, 2)), dim=-1).view(b * s, h, -1)
        # The indexer names tokens that a query does not see where it sees fewer than index_topk.
        seen = attention_mask[:, 0].gather(-1, indices.long())
        first = torch.arange(0, b * t, t, dtype=torch.int32, device=indices.device).view(b, 1, 1)
        rows = torch.where(seen, indices + first, -1).view(b * s, 1, -1)
        out, _, _ = package.flash_mla_sparse_fwd(q, key.reshape(b * t, 1, -1), rows, scaling, module.kv_lora_rank)
        return torch.einsum("bshc,hdc->bshd", out.view(b, s, h, -1), of_values), None

    for module in model.modules():
        if hasattr(module, "indexer"):
            module.expand_kv = types.MethodType(latent_rows, module)
    _select(model, package, attend, sdpa_mask)


def _offsets(keep: torch.Tensor) -> torch.Tensor:
    """int32 [b + 1]: where the kept tokens of each request begin, packed."""
    return torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0)).to(torch.int32)


def _select(model: torch.nn.Module, package: Any, attend: Any, mask: Any) -> None:
    name = f"mlagen_{package.SPEC['spec']['name']}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)
