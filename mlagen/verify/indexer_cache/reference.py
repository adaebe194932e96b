"""Reference of the kernels around the indexer's keys, in plain torch."""

from __future__ import annotations

import torch

from mlagen.layout.codec import encode
from mlagen.verify.call.patterns import INT32
from mlagen.verify.indexer_cache.side import IndexerSide
from mlagen.verify.paged.rope import rotate


def quantise_query(
    side: IndexerSide,
    q: torch.Tensor,
    positions: torch.Tensor,
    angles: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values and their scales u8 [T, H, bytes], and weights fp32 [T, H]; a position without angles turns none."""
    tokens, heads, columns = q.shape
    known = (positions >= 0) & (positions < len(angles))
    table = angles.float()[torch.where(known, positions, 0)]
    turned = rotate(side, q.float(), table[:, None].expand(-1, heads, -1))
    rows = torch.where(known[:, None, None], turned, q.float()).to(q.dtype)
    planes = encode(side.query, rows.reshape(-1, columns))
    width = side.query.data[0].nbytes
    values = planes[0][:, :width].reshape(tokens, heads, width)
    scales = planes[1].reshape(tokens, heads, side.query.plane_bytes[1])
    scaled = weights.float()
    if not side.packed:
        scaled = scaled * scales.view(torch.float32)[..., 0]
    return values, scales, scaled * softmax_scale * head_scale


def normalised_keys(
    side: IndexerSide,
    k: torch.Tensor,
    positions: torch.Tensor,
    angles: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ratio: int,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [T, columns] in k's dtype, and which tokens write theirs: those that end a group of `ratio` tokens.

    A LayerNorm with a bias, else an RMSNorm.
    """
    known = (positions >= 0) & (positions < (len(angles) if side.rope else INT32.max))
    x = k.float() if bias is None else k.float() - k.float().mean(-1, keepdim=True)
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    rows = (scaled if bias is None else scaled + bias.float()).to(k.dtype)
    table = angles.float()[torch.where(known, positions, 0) // ratio * ratio] if side.rope else angles
    return rotate(side, rows.float(), table).to(k.dtype), known & ((positions + 1) % ratio == 0)
