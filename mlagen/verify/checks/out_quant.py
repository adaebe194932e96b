"""Reference of an attention output in e4m3 with power-of-two scales of groups, in the memory of vLLM 0.33's results."""

from __future__ import annotations

from typing import NamedTuple

import torch

GROUP = 128  # columns of a scale
LARGEST = 448.0  # of e4m3
LEAST = 1e-10  # least amax of a group: smaller ones count as this
PAD = 4  # tokens that a column of scales is rounded up to
NAN_CODE, INFINITE = 0x7F, 0xFF  # bytes of NaN in e4m3, and of an infinite scale in ue8m0


class Quantised(NamedTuple):
    """A quantised output.

    Attributes:
        values: e4m3 [T, groups of heads, d], strides (d, T * d, 1).
        scales: fp32 [T, groups of heads, d / 128] or, packed, int32 [T, groups of heads, d / 512]: four ue8m0 bytes,
            the first one lowest. Strides (1, columns * P, P), where P is T rounded up to 4. Tokens T to P are zeros.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def padded(self) -> torch.Tensor:
        """Scales with their padding [P, groups of heads, columns]."""
        return padded(self.scales)


def padded(scales: torch.Tensor) -> torch.Tensor:
    """Scales in the memory of `Quantised`, with the tokens behind the last one."""
    tokens, groups, columns = scales.shape
    return scales.as_strided((-(-tokens // PAD) * PAD, groups, columns), scales.stride())


def scale_exponents(rows: torch.Tensor) -> torch.Tensor:
    """Biased exponents of the scales of fp32 rows [..., columns]: int32 [..., columns / 128], 255 of an infinity.

    NaN does not count. Divided by its scale, the least such power of two, no other value exceeds 448.
    """
    amax = torch.where(rows.isnan(), 0.0, rows.abs()).unflatten(-1, (-1, GROUP)).amax(-1)  # type: ignore[no-untyped-call]
    mantissa, exponent = torch.frexp(amax.double().clamp(min=LEAST) / LARGEST)
    exponent = exponent - (mantissa == 0.5).int() + 127
    return torch.where(amax.isinf(), INFINITE, exponent).int()


def quantised(rotated: torch.Tensor, heads_per_group: int, packed: bool) -> Quantised:
    """Quantises fp32 rows [T, H, columns]. Finite values of a group with an infinity are 0, and infinities are NaN."""
    tokens, heads, columns = rotated.shape
    groups, d = heads // heads_per_group, heads_per_group * columns
    exponents = scale_exponents(rotated)
    factors = torch.exp2(127 - exponents.double())
    factors[exponents == INFINITE] = 0.0
    quotients = rotated.double() * factors.repeat_interleave(GROUP, -1)
    codes = quotients.clamp(-LARGEST, LARGEST).float().to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(quotients.isnan(), NAN_CODE, codes.int()).to(torch.uint8)
    values = codes.reshape(tokens, groups, d).transpose(0, 1).contiguous().view(torch.float8_e4m3fn).transpose(0, 1)
    stored = (exponents << 23).reshape(tokens, groups, d // GROUP)
    if packed:
        parts = exponents.reshape(tokens, groups, d // (4 * GROUP), 4).long()
        stored = (parts << torch.tensor([0, 8, 16, 24], device=parts.device)).sum(-1).int()
    rows = -(-tokens // PAD) * PAD
    memory = torch.zeros(groups, stored.shape[2], rows, dtype=torch.int32, device=rotated.device)
    memory[:, :, :tokens] = stored.permute(1, 2, 0)
    scales = memory.permute(2, 0, 1)[:tokens]
    return Quantised(values, scales if packed else scales.view(torch.float32))
