"""Reference of attention's prologue, in plain torch."""

from __future__ import annotations

import torch

from mlagen.verify.paged.rope import rotate
from mlagen.verify.prologue.side import PrologueSide


def normalise(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm of the last dimension, in x's precision."""
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return scaled if weight is None else scaled * weight.to(x.dtype)


def table_of(angles: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of tokens [T, rope] in angles' dtype, and which positions the table has."""
    known = (positions >= 0) & (positions < len(angles))
    return angles[torch.where(known, positions, 0)], known


def turned_queries(
    side: PrologueSide, q: torch.Tensor, angles: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Q [T, H, columns], its last columns rotated where the table has the position; and the sizes of its terms, added.

    Computed in q's precision: float64 for a reference of any table, float32 for exact products.
    """
    table, known = table_of(angles.to(q.dtype), positions)
    table = table[:, None].expand(-1, q.shape[1], -1)
    half = table.shape[-1] // 2
    sign = torch.cat([table.new_ones(half), -table.new_ones(half)])
    rows = torch.nn.functional.pad(q, (side.layout.columns - q.shape[-1], 0))
    added = [rotate(side, rows.abs(), each).abs() for each in (table.abs(), table.abs() * sign)]
    turned, sizes = (one[..., -q.shape[-1] :] for one in (rotate(side, rows, table), torch.maximum(*added)))
    known = known[:, None, None]
    return torch.where(known, turned, q), torch.where(known, sizes, q.abs())


def turned_rows(
    side: PrologueSide,
    rows: torch.Tensor,
    angles: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, columns] as they are quantised, in their dtype, and which of them have angles.

    A weight of fewer columns normalises the leading ones. Rows are rounded after the norm and after RoPE.
    """
    if weight is not None:
        leading = normalise(rows[:, : len(weight)].float(), weight, eps).to(rows.dtype)
        rows = torch.cat([leading, rows[:, len(weight) :]], 1)
    table, known = table_of(angles.float(), positions)
    turned = rotate(side, rows.float(), table).to(rows.dtype)
    return torch.where(known[:, None], turned, rows), known
