"""Reference of the kernels around the indexer's keys, in plain torch."""

from __future__ import annotations

from typing import Protocol

import torch

from mlagen.layout.codec import encode
from mlagen.verify.call.patterns import INT32
from mlagen.verify.indexer_cache.side import IndexerSide


class Rotates(Protocol):
    """Facts about RoPE: the columns that it rotates, whether in pairs i and i + half, and the first of them."""

    @property
    def rope(self) -> int:
        """Columns that it rotates."""

    @property
    def neox(self) -> bool:
        """Whether it rotates i and i + rope / 2 together."""

    @property
    def first(self) -> int:
        """The first column that it rotates."""


def rotate(side: Rotates, rows: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rows [..., columns] with RoPE's columns rotated by angles [..., rope], cosines then sines, of one dtype."""
    if not side.rope:
        return rows
    half, last = side.rope // 2, side.first + side.rope
    cos, sin = angles[..., :half], angles[..., half:]
    rope = rows[..., side.first : last]
    one, other = (rope[..., :half], rope[..., half:]) if side.neox else (rope[..., ::2], rope[..., 1::2])
    turned = one * cos - other * sin, other * cos + one * sin
    together = torch.cat(turned, -1) if side.neox else torch.stack(turned, -1).flatten(-2)
    return torch.cat([rows[..., : side.first], together, rows[..., last:]], -1)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [T, columns] in k's dtype, and which tokens write theirs: those that end a group of `ratio` tokens."""
    known = (positions >= 0) & (positions < (len(angles) if side.rope else INT32.max))
    x = k.float()
    rows = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()).to(k.dtype)
    table = angles.float()[torch.where(known, positions, 0) // ratio * ratio] if side.rope else angles
    return rotate(side, rows.float(), table).to(k.dtype), known & ((positions + 1) % ratio == 0)


def codes(stored: torch.Tensor, packed: bool) -> torch.Tensor:
    """Stored values as integers in the order of their values, equal for both zeros; NaN is beyond all."""
    one = torch.stack((stored & 15, stored >> 4), -1).flatten(-2).int() if packed else stored.int()
    sign = 8 if packed else 128
    return torch.where(one >= sign, sign - one, one)
