"""Positions of tokens and the table of angles, for attention that rotates its output back; and their reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mlagen.verify.call.facts import Facts
from mlagen.verify.call.invalid import Invalid, constant
from mlagen.verify.call.memory import LAYOUTS, NAN, Placed, place, place_vector
from mlagen.verify.reference import Attention

NAMES = ("positions", "cos_sin_cache")
TABLE = 97  # positions of the table
INT64_MAX = 2**63 - 1
Draw = Callable[[int, torch.Generator], torch.Tensor]


def _any(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Positions in any order; among them the first and the last one, and repeated ones."""
    found = torch.randint(0, TABLE, (tokens,), generator=generator)
    found[:2] = torch.tensor([TABLE - 1, 0])[:tokens]
    found[3::5] = TABLE - 1
    return found


def _outside(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Positions on both sides of the table, also far away, beside one in it."""
    edges = torch.tensor([-1, TABLE, 5, -(2**63), INT64_MAX, 2**31, 2**32 + 5, -(2**32)])
    return edges.repeat(tokens // len(edges) + 1)[:tokens]


PATTERNS: dict[str, tuple[Draw, str]] = {
    "any": (_any, "each token is rotated by its own position"),
    "zero": (lambda tokens, _: torch.zeros(tokens, dtype=torch.int64), "position 0 rotates nothing"),
    "last": (lambda tokens, _: torch.full((tokens,), TABLE - 1), "the last row of the table"),
    "repeated": (lambda tokens, _: torch.arange(tokens) // 2 + 3, "tokens of different requests share a position"),
    "falling": (lambda tokens, _: torch.arange(tokens).flip(0) % TABLE, "positions need not rise"),
    "outside": (_outside, "a token whose position is outside the table is not rotated"),
}


@dataclass(frozen=True)
class Rotation:
    """Positions and angles of a call.

    Attributes:
        tokens: number of tokens.
        positions: i64 [tokens or more].
        table: f32 [TABLE, columns], cosines then sines.
        start: the first column of the output that rotates.
    """

    tokens: int
    positions: torch.Tensor
    table: torch.Tensor
    start: int

    def arguments(self) -> dict[str, torch.Tensor]:
        """Arguments of a wrapper, by name."""
        return dict(zip(NAMES, (self.positions, self.table), strict=True))

    def pick(self, tokens: Sequence[int]) -> Rotation:
        """The positions of some tokens, in another order."""
        at = torch.tensor(tokens, dtype=torch.int64, device=self.positions.device)
        return replace(self, tokens=len(tokens), positions=self.positions[at])

    def renew(self) -> None:
        """Changes positions and angles in place, as a captured call finds them."""
        own = self.positions[: self.tokens]
        own.copy_(own.flip(0))
        self.table.copy_(torch.where(self.table.isnan(), self.table, -self.table))

    def turned(self, found: Attention) -> Attention:
        """Attention with its output rotated by minus each token's position, as a product of complex numbers.

        Errors of a pair's two columns may have one origin, the weights. So they are added, not their squares.
        """
        half, positions = self.table.shape[1] // 2, self.positions[: self.tokens]
        known = (positions >= 0) & (positions < len(self.table))
        angles = self.table[torch.where(known, positions, 0)].double()
        ones = torch.tensor([1.0, 0.0], dtype=torch.float64, device=angles.device).repeat_interleave(half)
        angles = torch.where(known[:, None], angles, ones)
        factor = torch.complex(angles[:, :half], -angles[:, half:])[:, None]  # conjugate
        out = found.out.clone()
        pairs = out[..., self.start :].unflatten(-1, (-1, 2)).contiguous()  # type: ignore[no-untyped-call]
        out[..., self.start :] = torch.view_as_real(torch.view_as_complex(pairs) * factor).flatten(-2)
        cos, sin = factor.real.abs(), factor.imag.abs()

        def mixed(sizes: torch.Tensor) -> torch.Tensor:
            sizes = sizes.clone()
            first, second = sizes[..., self.start :].unflatten(-1, (-1, 2)).unbind(-1)  # type: ignore[no-untyped-call]
            both = (cos * first + sin * second, sin * first + cos * second)
            sizes[..., self.start :] = torch.stack(both, -1).flatten(-2)
            return sizes

        weighted = (found.noise.square() - found.out.square()).clamp(min=0.0).sqrt()
        noise = (mixed(weighted).square() + out.square()).sqrt()
        return found._replace(out=out, noise=noise, spread=mixed(found.spread))


def draw(
    facts: Facts, pattern: str, tokens: int, device: str, generator: torch.Generator
) -> tuple[Rotation | None, dict[str, Placed]]:
    """Positions and angles of a call, and their buffers; None and no buffers where attention does not rotate.

    Rows of the table lie apart, and those of no token are NaN. Positions behind the last token lead to such rows.
    """
    if not facts.out_rope:
        return None, {}
    positions = PATTERNS[pattern][0](tokens, generator)
    half = facts.out_rope // 2
    angle = 6.3 * torch.rand(TABLE, half, generator=generator)
    if pattern == "zero":
        angle[0] = 0.0
    table = torch.cat([angle.cos(), angle.sin()], 1)
    named = torch.zeros(TABLE, dtype=torch.bool)
    named[positions[(positions >= 0) & (positions < TABLE)]] = True
    table[~named] = NAN
    unnamed = int((~named).nonzero()[0]) if not bool(named.all()) else -1
    behind = torch.cat([positions, torch.full((tokens % 2,), unnamed)])
    placed_table = place(table.to(device)[None], LAYOUTS["slice"], NAN)
    placed = {
        "positions": place_vector(behind.to(device), unnamed),
        "cos_sin_cache": replace(placed_table, view=placed_table.view[0]),
    }
    views = (placed["positions"].view, placed["cos_sin_cache"].view)
    return Rotation(tokens, *views, facts.d_v - facts.out_rope), placed


def invalid(facts: Facts) -> Iterator[Invalid]:
    """Positions and angles that wrappers must refuse."""
    if not facts.out_rope:
        return
    yield Invalid("positions", "None", constant(None))
    yield Invalid("positions", "dtype int32", lambda positions: positions.int())
    yield Invalid("positions", "one too few", lambda positions: positions[:-1])
    yield Invalid("positions", "two dimensions", lambda positions: positions[:, None])
    yield Invalid("cos_sin_cache", "None", constant(None))
    yield Invalid("cos_sin_cache", "dtype float64", lambda table: table.double())
    yield Invalid("cos_sin_cache", "the model's dtype", lambda table: table.to(getattr(torch, facts.dtype)))
    yield Invalid("cos_sin_cache", "wider", lambda table: torch.cat([table, table], 1))
    yield Invalid("cos_sin_cache", "no positions", lambda table: table[:0])
    yield Invalid("cos_sin_cache", "columns apart", lambda table: table.repeat_interleave(2, 1)[:, ::2])
