"""Tables of angles, and positions of tokens in them."""

from __future__ import annotations

from typing import Protocol

import torch

from mlagen.verify.call.memory import GARBAGE
from mlagen.verify.call.patterns import INT64

POSITIONS = 300  # of a table


class Turned(Protocol):
    """Facts about a model's rows: columns that RoPE rotates, and the model's dtype."""

    @property
    def rope(self) -> int:
        """Columns that it rotates."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""


def draw_angles(side: Turned, wide: bool, generator: torch.Generator) -> torch.Tensor:
    """A table of numbers in the model's dtype, so that products with them are exact in fp32. Position 0 turns none."""
    angle = 2 * torch.pi * torch.rand(POSITIONS, side.rope // 2, generator=generator)
    angle[0] = 0
    table = torch.cat([angle.cos(), angle.sin()], 1).to(side.dtype)
    return table.float() if wide else table


def draw_positions(pattern: str, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Positions i64 of a pattern."""
    found = torch.randint(0, POSITIONS, (tokens + (5 if pattern == "longer" else 0),), generator=generator)
    if pattern == "zero":
        found.zero_()
    elif pattern == "garbage":
        wrong = torch.tensor([-1, POSITIONS, INT64.min, INT64.max, 2**32, -(2**32)])
        found[::3] = wrong[torch.arange(len(found[::3])) % len(wrong)]
    elif pattern == "longer":
        found[tokens:] = GARBAGE
    return found
