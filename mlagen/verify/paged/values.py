"""Patterns of the rows that a writer takes: every bit pattern, scales at their edges, NaN and infinity."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mlagen.verify.paged.side import Side

# Magnitudes of tiles at which a scale's rounding and its floor change. A sixth of each is an e4m3 number.
AMAX = (
    *(0.0, 1e-5, 1e-4, 0.0447, 0.0448, 447.0, 448.0, 449.0),
    *(448.0 * 2.0**k for k in range(-22, 7)),
    *(6.0 * sixth for sixth in (1.0, 1.125, 1.375, 1.625, 1.875)),
)


def _random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(dtype)


def _every_bit_pattern(side: Side, tokens: int | None, generator: torch.Generator) -> torch.Tensor:
    columns = side.layout.columns
    count = -(-(2**16) // columns) * columns
    return torch.arange(count).to(torch.int16).view(-1, columns).view(side.dtype)


def _random_rows(side: Side, tokens: int | None, generator: torch.Generator) -> torch.Tensor:
    """Ordinary rows, each of another magnitude; of an unquantised cache any bits, NaN with their payloads."""
    shape = (tokens or 0, side.layout.columns)
    if not side.layout.quantised:
        return _random_bits(shape, side.dtype, generator)
    magnitude = torch.exp(3 * torch.randn(shape[0], 1, generator=generator))
    return (torch.randn(shape, generator=generator) * magnitude).to(side.dtype)


def _tiles(side: Side) -> tuple[int, int]:
    """Columns of the widest tile, and how many hold a row."""
    scales = [one for field in side.layout.data if (one := side.layout.scales_of(field))]
    tile = max([one.tile for one in scales], default=64)
    return tile, -(-side.layout.columns // tile)


def _tiled_rows(side: Side, patterns: list[torch.Tensor]) -> torch.Tensor:
    """Rows of tiles that follow the patterns in turn: a vector that is cut or repeated."""
    tile, each = _tiles(side)
    rows = torch.zeros(-(-len(patterns) // each), each * tile)
    for number, pattern in enumerate(patterns):
        token, first = number // each, number % each * tile
        rows[token, first : first + tile] = pattern.repeat(-(-tile // len(pattern)))[:tile]
    return rows[:, : side.layout.columns].to(side.dtype)


def _tiles_of_magnitudes(side: Side, tokens: int | None, generator: torch.Generator) -> torch.Tensor:
    """Tiles with each of AMAX as their largest magnitude, of either sign, and values at simple fractions of it."""
    patterns: list[torch.Tensor] = []
    for amax in AMAX:
        for sign in (1.0, -1.0):
            values = torch.randint(-64, 65, (512,), generator=generator) / 64 * amax
            values[1::2] = torch.tensor([3, -5, 7, -10, 14, -20, 1, -22] * 32) * (amax / 24)  # ties of e2m1 among them
            values[torch.randint(0, 16, (1,), generator=generator) :: 16] = sign * amax
            patterns.append(values)
    return _tiled_rows(side, patterns)


def _not_finite(side: Side, tokens: int | None, generator: torch.Generator) -> torch.Tensor:
    """In each tile of a row, in one row or another, a value that is no number or a zero of either sign."""
    inf, nan = math.inf, math.nan
    patterns = [
        [nan],
        [-nan],
        [nan, 3.0, -nan, -0.25],
        [inf, 1.0],
        [-inf, -2.0, 0.0],
        [inf, -inf, nan],
        [0.0],
        [-0.0],
        [0.0, -0.0, 1e-30],
        [65504.0, -1e-3],
    ]
    count, (_, each) = len(patterns), _tiles(side)
    numbers = [(row + tile) % count for row in range(count) for tile in range(each)]
    return _tiled_rows(side, [torch.tensor(patterns[number]) for number in numbers])


VALUES: dict[str, Callable[[Side, int | None, torch.Generator], torch.Tensor]] = {
    "random": _random_rows,
    "bits": _every_bit_pattern,
    "tiles": _tiles_of_magnitudes,
    "not finite": _not_finite,
}
