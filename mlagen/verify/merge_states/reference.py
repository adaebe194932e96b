"""What a merge of parts must compute, in plain torch and float64, and how far a kernel may be off."""

from __future__ import annotations

import math

import torch

from mlagen.verify.results import Figure
from mlagen.verify.tolerance import FP32_STEP, SMALLEST, UNIT_ROUNDOFF, worst

WEIGHT_STEPS = 32  # fp32 roundings of a weight: of a difference of LSE, its product, exp2, the sum, and of a term

Merged = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def merge(outputs: torch.Tensor, lses: torch.Tensor) -> Merged:
    """The whole of parts, in plain torch and float64.

    Args:
        outputs: [parts, tokens, heads, d_v], of which those of an empty part do not count.
        lses: [parts, heads, tokens], natural; +inf and -inf: an empty part.

    Returns:
        out [tokens, heads, d_v]; lse [heads, tokens]; and the sum of absolute terms behind each element of out.
    """
    empty = lses.isinf()
    logits = lses.double().masked_fill(empty, -math.inf)
    nothing = torch.full((1, *lses.shape[1:]), -math.inf, dtype=torch.float64, device=lses.device)
    largest = torch.cat([logits, nothing]).amax(0)
    weights = torch.where(empty, 0.0, (logits - torch.where(largest == -math.inf, 0.0, largest)).exp())
    total = weights.sum(0)
    lse = largest + total.log()
    weights = (weights / torch.where(total == 0, 1.0, total)).transpose(1, 2)[..., None]
    terms = weights * torch.where(empty.transpose(1, 2)[..., None], 0.0, outputs.double())
    return terms.sum(0), lse, terms.abs().sum(0)


def figures(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    expected: Merged,
    unit: float = 1.0,
) -> list[Figure]:
    """Figures of results against `merge`; `unit` is the natural logarithm of the LSE's base."""
    want, want_lse, size = expected
    error = (out.double() - want).abs().nan_to_num(nan=math.inf)
    allowed = UNIT_ROUNDOFF[out.dtype] * want.abs() + WEIGHT_STEPS * FP32_STEP * size + (size > 0) * SMALLEST[out.dtype]
    both = want.isnan() & out.isnan()
    found = [worst("out", torch.where(both, 0.0, error), torch.where(both, 1.0, allowed))]
    if lse is not None:
        want_lse = want_lse / unit
        same = (lse.double() == want_lse) | (want_lse.isnan() & lse.isnan())
        error = torch.where(same, 0.0, (lse.double() - want_lse).abs().nan_to_num(nan=math.inf))
        steps = FP32_STEP * (8 + 4 * want_lse.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        found.append(worst("lse", error, steps))
    return found
