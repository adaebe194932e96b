"""Attention's output in e4m3 with a scale for each block of columns, against the reference.

A kernel's fp32 result x' lies within the tolerance t of the reference's x, as `tolerance.element_limits` has it.
Rounding keeps order. So the scale must lie between those of the block with each magnitude t less and t more, and a
code between the codes of x - t and of x + t. A code may only be another than that of x where a border of rounding
lies within t.

That many elements have a border so near says little about small errors of all. So they are also counted: an error with
the root mean square r crosses a border with probability r / step at most. Values that lie on a border, such as those of
a row with one key, are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from mlagen.verify import tolerance
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.invalid import Invalid
from mlagen.verify.call.memory import LAYOUTS, NAN, Placed, place
from mlagen.verify.call.results import Figure
from mlagen.verify.checks.out_quant import GROUP, LARGEST, NAN_CODE, padded, scale_exponents
from mlagen.verify.reference import Attention

SLACK = 2.0**-20  # relative, of this module's own arithmetic
ON_A_BORDER = 2.0**-12  # of a step
TAIL = 5.0  # standard deviations of a count
E4M3_BITS, SMALLEST_EXPONENT = 3, -6  # of the mantissa; of normal numbers


def scales_dtype(facts: Facts) -> torch.dtype:
    """Dtype of the tensor of scales."""
    return torch.int32 if facts.out_packed else torch.float32


def scale_columns(facts: Facts) -> int:
    """Elements of the tensor of scales for a group of heads."""
    return facts.out_heads * facts.d_v // (4 * GROUP if facts.out_packed else GROUP)


def shapes(facts: Facts, tokens: int, heads: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of out and of its scales, or of out alone if it is not quantised."""
    if not facts.out_heads:
        return {"out": (getattr(torch, facts.dtype), (tokens, heads, facts.d_v))}
    groups = heads // facts.out_heads
    out = (torch.float8_e4m3fn, (tokens, groups, facts.out_heads * facts.d_v))
    return {"out": out, "out_scales": (scales_dtype(facts), (tokens, groups, scale_columns(facts)))}


def named(facts: Facts, returned: Any) -> dict[str, torch.Tensor]:
    """The results that a wrapper returns in place of its output, by name.

    While a CUDA graph is captured nothing can be read, so that the calls outside of it check the padding.

    Raises:
        CaseFailedError: padding of scales is not 0.
    """
    if not facts.out_heads:
        return {"out": returned}
    out, scales = returned
    capturing = scales.is_cuda and torch.cuda.is_current_stream_capturing()
    if scales.numel() and not capturing and bool(padded(scales)[len(scales) :].view(torch.int32).any()):
        raise CaseFailedError("out_scales: padding behind the last token is not 0")
    return {"out": out, "out_scales": scales}


def by_head(facts: Facts, out: torch.Tensor) -> torch.Tensor:
    """An output [..., groups, columns] as [..., heads, d_v]; one that is not quantised as it is."""
    if not facts.out_heads:
        return out
    found: torch.Tensor = out.unflatten(-1, (facts.out_heads, facts.d_v)).flatten(-3, -2)  # type: ignore[no-untyped-call]
    return found


def place_given(facts: Facts, tokens: int, heads: int, layout: str, device: str) -> Placed:
    """A buffer for `out`, filled with NaN."""
    dtype, shape = shapes(facts, tokens, heads)["out"]
    return place(torch.full(shape, NAN, device=device).to(dtype), LAYOUTS[layout], NAN)


def exponents_of(facts: Facts, scales: torch.Tensor) -> torch.Tensor:
    """Biased exponents of the scales of blocks, [tokens, heads, blocks].

    Raises:
        CaseFailedError: a scale is no power of two.
    """
    stored = scales.contiguous().view(torch.int32)
    if facts.out_packed:
        stored = (stored[..., None] >> torch.tensor([0, 8, 16, 24], device=stored.device)) & 0xFF
    elif bool((stored & 0x807FFFFF).any()):
        raise CaseFailedError("out_scales: a scale is no power of two")
    else:
        stored = stored >> 23
    return stored.reshape(len(scales), scales.shape[1] * facts.out_heads, facts.d_v // GROUP)


def _places(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 bytes as integers in the order of their values; NaN is the last."""
    magnitudes = (codes & 0x7F).long()
    return torch.where(codes >= 0x80, -magnitudes, magnitudes) + 1000 * (magnitudes == NAN_CODE)


def _codes(values: torch.Tensor) -> torch.Tensor:
    """e4m3 bytes of float64 values, at most 448."""
    return values.clamp(-LARGEST, LARGEST).float().to(torch.float8_e4m3fn).view(torch.uint8)


def errors(
    facts: Facts, out: torch.Tensor, scales: torch.Tensor, expected: Attention, d_qk: int, k_error: float = 0.0
) -> list[Figure]:
    """Errors of out [tokens, groups, columns] and its scales; see above."""
    codes, exponents = by_head(facts, out).contiguous().view(torch.uint8), exponents_of(facts, scales)
    limits = tolerance.element_limits(getattr(torch, facts.dtype), expected, d_qk, k_error, facts.partials)
    sizes = expected.out.abs()
    least = scale_exponents(((sizes - limits).clamp(min=0.0) * (1 - SLACK)).float())
    most = scale_exponents(((sizes + limits) * (1 + SLACK)).float())
    apart = torch.maximum(least - exponents, exponents - most).clamp(min=0)
    factors = torch.exp2(127 - exponents.double()).repeat_interleave(GROUP, -1)
    values, room = expected.out * factors, limits * factors * (1 + SLACK)
    places = _places(codes)
    low, high = _places(_codes(values - room)), _places(_codes(values + room))
    outside = torch.maximum(low - places, places - high).clamp(min=0)
    zero = torch.zeros((), dtype=torch.float64, device=out.device)
    return [
        tolerance.worst("out scale", apart, zero),
        tolerance.worst("out element", outside, zero),
        _changed(places != _places(_codes(values)), values, factors, expected, d_qk, k_error, facts),
    ]


def _changed(
    differs: torch.Tensor,
    values: torch.Tensor,
    factors: torch.Tensor,
    expected: Attention,
    d_qk: int,
    k_error: float,
    facts: Facts,
) -> Figure:
    """The share of elements with another code than the reference's."""
    exponents = torch.frexp(values).exponent - 1
    steps = torch.exp2(exponents.clamp(min=SMALLEST_EXPONENT).double() - E4M3_BITS)
    halves = 2 * values / steps
    border = (halves - halves.round()).abs() < ON_A_BORDER
    counts = ~border & (expected.noise > 0)
    tokens, heads, d_v = values.shape
    size = tolerance.mean_limits(getattr(torch, facts.dtype), expected, d_qk, k_error, facts.partials)
    likely = torch.where(counts, (size * factors / steps).clamp(max=1.0), 0.0)
    count = max(1, int(counts.sum()))
    most = float(likely.sum()) / count
    found = int((differs & counts).sum()) / count
    return Figure(
        "out", found, min(1.0, most + TAIL * math.sqrt(most / count) + TAIL / count) if tokens * heads * d_v else 0.0
    )


def invalid(facts: Facts) -> Iterator[Invalid]:
    """Heads that wrappers must refuse."""
    if facts.out_heads and facts.sink != "required":  # one for each head would be too many
        yield Invalid("q", "heads of no whole groups", lambda q: q[..., :-1, :], "heads")


def invalid_out(facts: Facts) -> Iterator[Invalid]:
    """Quantised outputs that wrappers must refuse."""

    def out(q: torch.Tensor, dtype: torch.dtype, more: int = 0, step: int = 1) -> torch.Tensor:
        tokens, groups = q[..., 0, 0].numel(), q.shape[-2] // facts.out_heads
        columns = facts.out_heads * facts.d_v + more
        return torch.zeros(tokens, groups, columns * step, dtype=dtype, device=q.device)[..., ::step]

    e4m3 = torch.float8_e4m3fn
    yield Invalid("out", "the model's dtype", lambda q: out(q, q.dtype), like="q")
    yield Invalid("out", "too wide", lambda q: out(q, e4m3, 8), like="q")
    yield Invalid("out", "last dimension not contiguous", lambda q: out(q, e4m3, step=2), like="q")
