"""Reference of the logits, in plain torch and float64, and tolerances."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlagen.verify.tolerance import FP8_PRODUCTS, FP8_STEP, FP32_STEP, UNIT_ROUNDOFF

SMALLEST = 2.0**-126
ROWS = 64  # tokens at a time


@dataclass(frozen=True)
class Logits:
    """Logits of all tokens over all keys.

    Attributes:
        values: f64 [tokens, keys].
        size: f64 [tokens, keys], the same of absolute products and weights.
    """

    values: torch.Tensor
    size: torch.Tensor


def mqa_logits(q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, weights: torch.Tensor) -> Logits:
    """Logits, all in f64: of q [tokens, heads, columns], k [keys, columns], k_scale [keys], weights [tokens, heads]."""
    values, sizes = [], []
    for first in range(0, len(q), ROWS):
        part, weight = q[first : first + ROWS], weights[first : first + ROWS, :, None]
        dots = torch.einsum("thd,kd->thk", part, k)
        products = torch.einsum("thd,kd->thk", part.abs(), k.abs())
        values.append((weight * dots.relu()).sum(1) * k_scale)
        sizes.append((weight.abs() * products).sum(1) * k_scale)
    empty = q.new_zeros(0, len(k))
    return Logits(torch.cat([empty, *values]), torch.cat([empty, *sizes]))


def tolerance(expected: Logits, heads: int, columns: int, dtype: torch.dtype, *, short: bool) -> torch.Tensor:
    """Largest errors of logits: fp32 sums of exact products, over columns and heads, and the result's own rounding.

    Args:
        expected: the reference.
        heads, columns: of the query.
        dtype: of the result.
        short: products of fp8 are added with fewer bits.
    """
    steps = FP32_STEP * (2 * columns / 16 + 8 + 2 * heads)
    if short:
        steps += FP8_STEP * -(-columns // FP8_PRODUCTS)
    rounding = UNIT_ROUNDOFF[dtype] if dtype != torch.float32 else 0.0
    return expected.size * steps + expected.values.abs() * rounding + SMALLEST
