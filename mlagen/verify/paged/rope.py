"""RoPE of rows in plain torch, and the order of stored values."""

from __future__ import annotations

from typing import Protocol

import torch

MOST_OFF = 0.01  # of a normalised row's columns, which other roundings may turn to the next code


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


def codes(stored: torch.Tensor, packed: bool) -> torch.Tensor:
    """Stored values as integers in the order of their values, equal for both zeros; NaN is beyond all."""
    one = torch.stack((stored & 15, stored >> 4), -1).flatten(-2).int() if packed else stored.int()
    sign = 8 if packed else 128
    return torch.where(one >= sign, sign - one, one)
