"""The tensors of a call that quantises attention's output, and the results that it should have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.verify.call import family
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.memory import LAYOUTS, NAN, Placed, bits, place, place_vector, seeded
from mlagen.verify.call.results import Figure
from mlagen.verify.checks.out_quant import GROUP, LARGEST, PAD, padded, quantised
from mlagen.verify.out_quant.cases import PACKED, WIDE, OutQuantCase
from mlagen.verify.out_quant.side import OutSide
from mlagen.verify.paged.angles import draw_angles, draw_positions
from mlagen.verify.paged.rope import rotate

CHECKED = 64  # tokens at either end that are compared
NEARLY_ONE = 2.0**-7  # a sine with a cosine of 1: it moves a rotated 448 by an ulp of fp32


def _powers(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Groups with a largest magnitude of 448 times a power of two, or the next number on either side.

    In a head's last group the rotation by NEARLY_ONE adds an ulp of fp32 to 448, takes one off, or neither.
    """
    rows = rows.clamp(-1.0, 1.0)
    groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // GROUP, GROUP)
    power = 2.0 ** torch.randint(-60, 100, groups.shape[:-1], generator=generator).double()
    ulp = torch.finfo(rows.dtype).eps * 256.0
    most = LARGEST + ulp * torch.randint(-1, 2, groups.shape[:-1], generator=generator)
    groups[..., 0::2] = 0.0
    groups[..., 7] = most.to(rows.dtype)
    last = groups[..., -1, :]
    power[..., -1], last[..., 7] = 1.0, 0.0
    last[..., -2] = LARGEST
    last[..., -1] = (torch.arange(last.shape[0])[:, None] % 3 - 1) * 2.0**-8
    if rows.dtype == torch.float16:
        power = power.clamp(2.0**-6, 64.0)
    return (groups.double() * power[..., None]).flatten(-2).to(rows.dtype)


def _ties(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values in the middle of two e4m3 numbers, of scale 1."""
    exponent = torch.randint(-7, 9, rows.shape, generator=generator)
    whole = torch.randint(0, 8, rows.shape, generator=generator) + 0.5
    magnitude = torch.where(exponent < -6, whole * 2.0**-9, (8 + whole) * 2.0 ** (exponent - 3)).clamp(max=LARGEST)
    sign = torch.randint(0, 2, rows.shape, generator=generator) * 2 - 1
    magnitude[..., ::GROUP] = LARGEST
    return (sign * magnitude).to(rows.dtype)


def _some(value: float, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One value of 300 is `value` or its opposite; the first group has nothing else."""
    found = torch.rand(rows.shape, generator=generator) < 1 / 300
    found[:, 0, :GROUP] = True
    return torch.where(found, torch.where(rows > 0, value, -value).to(rows.dtype), rows)


def _zeros(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rows of zeros, and groups of them in others."""
    rows[::2] = 0.0
    rows[1::2, :, GROUP // 2 : GROUP] = -0.0
    rows[1::2, :, : GROUP // 2] = 0.0
    return rows


Draw = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
VALUES: dict[str, Draw] = {
    "random": lambda rows, _: rows,
    "zero": _zeros,
    "powers": _powers,
    "ties": _ties,
    "tiny": lambda rows, _: rows.clamp(-1.0, 1.0) * torch.finfo(rows.dtype).tiny,
    "large": lambda rows, _: rows.clamp(-1.0, 1.0) * torch.finfo(rows.dtype).max,
    "infinite": lambda rows, generator: _some(float("inf"), rows, generator),
    "NaN": lambda rows, generator: _some(NAN, rows, generator),
}


@dataclass
class OutQuantInputs(family.Inputs):
    """A call.

    Attributes:
        side: the output of a head.
        case: the case.
        arguments: by name, in the order of the wrapper's signature.
    """

    side: OutSide
    case: OutQuantCase
    arguments: dict[str, Any]

    def renew(self) -> Iterator[None]:
        """Other outputs and positions in the same memory."""
        for name in ("o", "positions"):
            tensor = self.arguments[name][: self.case.tokens]
            tensor.copy_(tensor.flip(0))
        yield

    def compare(self, results: family.Results) -> list[Figure]:
        """Nothing. Raises CaseFailedError unless results have the reference's bits and memory."""
        case, tokens = self.case, self.case.tokens
        d, wide = case.width * self.side.columns, case.scales == WIDE
        columns = 0 if wide else d // (4 * GROUP if case.scales == PACKED else GROUP)
        rows = -(-tokens // PAD) * PAD
        takes: dict[str, Any] = {"out": ((tokens, case.groups, d), (d, tokens * d, 1))}
        takes["scales"] = ((tokens, case.groups, columns), (1, columns * rows, rows))
        if wide:
            takes["scales"] = ((0,), (1,))
        dtypes = {"out": self.side.dtype if wide else torch.float8_e4m3fn}
        dtypes["scales"] = torch.int32 if case.scales == PACKED else torch.float32
        for name, got in results.items():
            shape, strides = takes[name]
            if (tuple(got.shape), got.dtype) != (shape, dtypes[name]) or (tokens and got.stride() != strides):
                found = f"{got.dtype} {list(got.shape)} of strides {got.stride()}"
                raise CaseFailedError(f"{name} is {found} instead of {dtypes[name]} {list(shape)} of {strides}")
        if tokens == 0:
            return []
        expected = self.expected()
        for name, want in expected.items():
            got = (padded(results[name]) if name == "scales" else results[name])[: len(want)].cpu()
            self._same(name, got, want)
        if tokens > CHECKED:
            for name, want in self.expected(slice(tokens - CHECKED, tokens)).items():
                self._same(name, results[name][tokens - CHECKED :].cpu(), want[:CHECKED])
        return []

    def _same(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        wrong = bits(got.contiguous()) != bits(want.contiguous())
        if name == "out" and self.case.scales == WIDE:
            wrong &= ~(got.isnan() & want.isnan())
        if bool(wrong.any()):
            raise CaseFailedError(f"{int(wrong.sum())} of {wrong.numel()} {name} differ from the reference's")

    def expected(self, some: slice = slice(CHECKED)) -> family.Results:
        """Results of some tokens; scales with the padding behind them."""
        rows = self.arguments["o"][some].cpu().float()
        positions, table = self.arguments["positions"], self.arguments["cos_sin_cache"]
        if positions is not None:
            positions, table = positions[: self.case.tokens][some].cpu(), table.cpu()
            known = (positions >= 0) & (positions < len(table))
            angles = table[torch.where(known, positions, 0)][:, None]
            half = self.side.rope // 2
            back = torch.cat([angles[..., :half], -angles[..., half:]], -1)
            rows = torch.where(known[:, None, None], rotate(self.side, rows, back), rows)
        if self.case.scales == WIDE:
            return {"out": rows.to(self.side.dtype).reshape(len(rows), self.case.groups, -1)}
        found = quantised(rows, self.case.width, self.case.scales == PACKED)
        whole = self.case.tokens <= CHECKED
        return {"out": found.values, "scales": found.padded() if whole else found.scales}


def build(case: OutQuantCase, side: OutSide, device: str, seed: int) -> OutQuantInputs:
    """The inputs of a case, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator, heads = seeded(seed), case.groups * case.width
    tokens = 1 if case.rows == "same" else case.tokens
    magnitude = torch.exp(2 * torch.randn(tokens, heads, 1, generator=generator))
    rows = torch.randn(tokens, heads, side.columns, generator=generator) * magnitude
    rows = VALUES[case.values](rows.clamp(-6e4, 6e4).to(side.dtype), generator)
    positions = draw_positions(case.positions, case.tokens, generator)
    table = draw_angles(side, True, generator)
    if case.values == "powers":
        table[:, side.rope // 2 - 1], table[:, -1] = 1.0, NEARLY_ONE
    placed: dict[str, Placed] = {"o": place(rows.to(device), LAYOUTS.get(case.rows, LAYOUTS["slice"]), NAN)}
    if case.positions:
        placed["positions"] = place_vector(positions.to(device), 0)
        placed["cos_sin_cache"] = place(table.to(device), LAYOUTS[case.tables], NAN)
    views: dict[str, Any] = {name: one.view for name, one in placed.items()}
    if case.rows == "same":
        views["o"] = views["o"].expand(case.tokens, -1, -1)
    arguments = {name: views.get(name) for name in ("o", "positions", "cos_sin_cache")}
    arguments |= {"n_groups": case.groups, "heads_per_group": case.width}
    if case.named:
        arguments |= {"nope_dim": side.first, "rope_dim": side.rope, "quant_group_size": GROUP}
    if case.scales == PACKED:
        arguments["tma_aligned_scales"] = True
    if case.scales == WIDE:
        arguments["quantize"] = False
    return OutQuantInputs(side, case, arguments, placed=placed)
