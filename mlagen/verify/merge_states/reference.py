"""Reference of a merge of parts, in plain torch and float64, and how far a kernel may be off."""

from __future__ import annotations

import math

import torch

from mlagen.verify.call.results import Figure
from mlagen.verify.tolerance import FP32_STEP, SMALLEST, UNIT_ROUNDOFF, worst

WEIGHT_STEPS = 32  # fp32 roundings of a weight: of a difference of LSE, its product, exp2, the sum, and of a term

SINK_LIMIT = 256  # natural; of larger ones either the sink or the rest weighs nothing
SMALLEST_WEIGHT = 2.0**-120  # of a value of a few units
LARGEST = {torch.float8_e4m3fn: 448.0}  # at which results saturate

Merged = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def merge(
    outputs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None = None, empty_row_lse: str = "-inf"
) -> Merged:
    """The whole of parts, in plain torch and float64.

    Args:
        outputs: [parts, tokens, heads, d_v]; values of an empty part do not count.
        lses: [parts, heads, tokens], natural; +inf and -inf: an empty part.
        sink: f32 [heads], natural logits that join the sum of weights only for `out`; None: no sink.
        empty_row_lse: of a row without keys, "+inf" or "-inf".

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
    weights = weights / torch.where(total == 0, 1.0, total)
    if sink is not None:  # exp(lse) / (exp(lse) + exp(sink)), without the overflow
        weights = weights * torch.where(total == 0, 0.0, torch.sigmoid(lse - sink.double()[:, None]))
    weights = weights.transpose(1, 2)[..., None]
    terms = weights * torch.where(empty.transpose(1, 2)[..., None], 0.0, outputs.double())
    return terms.sum(0), torch.where(total == 0, float(empty_row_lse), lse), terms.abs().sum(0)


def figures(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    expected: Merged,
    unit: float = 1.0,
    sink: torch.Tensor | None = None,
    scale: float = 1.0,
) -> list[Figure]:
    """Figures of results against `merge`.

    Args:
        out, lse: the results.
        expected: of `merge`.
        unit: natural logarithm of the LSE's base.
        sink: of the call.
        scale: unit of `out`.
    """
    want, want_lse, size = expected
    want, size = want / scale, size / scale
    limit = LARGEST.get(out.dtype, math.inf)
    want = torch.where(want.isnan(), want, want.clamp(-limit, limit))
    error = (out.double() - want).abs().nan_to_num(nan=math.inf)
    steps = torch.full((), float(WEIGHT_STEPS), dtype=torch.float64, device=out.device)
    least = (size > 0) * SMALLEST[out.dtype]
    if sink is not None:  # a logit is off by its own steps, and a weight below fp32's range is 0
        steps = steps + 4 * sink.double().abs().clamp(max=SINK_LIMIT)[:, None]
        least = least + SMALLEST_WEIGHT / scale
    allowed = UNIT_ROUNDOFF[out.dtype] * want.abs() + steps * FP32_STEP * size + least
    both = want.isnan() & out.isnan()
    found = [worst("out", torch.where(both, 0.0, error), torch.where(both, 1.0, allowed))]
    if lse is not None:
        want_lse = want_lse / unit
        same = (lse.double() == want_lse) | (want_lse.isnan() & lse.isnan())
        error = torch.where(same, 0.0, (lse.double() - want_lse).abs().nan_to_num(nan=math.inf))
        lse_steps = FP32_STEP * (8 + 4 * want_lse.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        found.append(worst("lse", error, lse_steps))
    return found
