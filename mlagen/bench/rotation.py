"""Attention that rotates its output back: positions and angles of calls, and the rotation in a launch of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import triton
import triton.language as tl

from mlagen.verify.call.facts import Facts

POSITIONS = 64 << 10  # of the table
ROTATED_APART = "ours, rotated by another launch"
HEADS = 8  # of a program
Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class Angles:
    """Positions of a call's tokens and the table of angles.

    Attributes:
        positions: i64 [tokens].
        table: f32 [POSITIONS, columns], cosines then sines.
    """

    positions: torch.Tensor
    table: torch.Tensor

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        """Arguments of a wrapper, by name."""
        return {"positions": self.positions, "cos_sin_cache": self.table}

    @property
    def nowhere(self) -> Angles:
        """The same with positions outside the table, for which attention rotates nothing."""
        return replace(self, positions=torch.full_like(self.positions, -1))

    def turned(self, out: torch.Tensor) -> torch.Tensor:
        """out [tokens, heads, columns] in float64, rotated by minus the positions, as complex numbers."""
        half = self.table.shape[1] // 2
        angles = self.table[self.positions].double()
        factor = torch.complex(angles[:, :half], -angles[:, half:])[:, None]
        left, right = out[..., : -2 * half], out[..., -2 * half :]
        pairs = torch.view_as_complex(right.unflatten(-1, (-1, 2)).contiguous())  # type: ignore[no-untyped-call]
        return torch.cat([left, torch.view_as_real(pairs * factor).flatten(-2)], -1)


def angle_table(positions: int, columns: int, device: torch.device) -> torch.Tensor:
    """Angles of positions, f32 [positions, columns]: cosines, then sines."""
    half = columns // 2
    angle = torch.arange(positions, device=device)[:, None] * 1e4 ** (-torch.arange(half, device=device) / half)
    return torch.cat([angle.cos(), angle.sin()], 1).float()


def make_angles(facts: Facts, tokens: int, device: torch.device) -> Angles | None:
    """Random positions and a table; None where attention does not rotate its output."""
    if not facts.out_rope:
        return None
    table = angle_table(POSITIONS, facts.out_rope, device)
    return Angles(torch.randint(0, POSITIONS, (tokens,), device=device), table)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    out_ptr, positions_ptr, table_ptr, num_heads, token_stride, head_stride,
    START: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Rotates BLOCK_H heads of a token in place. Grid: (tokens, cdiv(num_heads, BLOCK_H))."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    pairs = tl.arange(0, HALF)
    angles_ptr = table_ptr + tl.load(positions_ptr + token) * (2 * HALF) + pairs
    cos, sin = tl.load(angles_ptr)[None, :], tl.load(angles_ptr + HALF)[None, :]
    rows = out_ptr + token * token_stride + heads[:, None] * head_stride
    pointers = rows + START + tl.arange(0, 2 * HALF)[None, :]
    mask = (heads < num_heads)[:, None]
    values = tl.load(pointers, mask=mask).to(tl.float32)
    first, second = tl.split(values.reshape(BLOCK_H, HALF, 2))
    turned = tl.interleave(first * cos + second * sin, second * cos - first * sin)
    tl.store(pointers, turned.to(out_ptr.dtype.element_ty), mask=mask)


def rotate(out: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotate out [..., heads, columns] in place, in a launch of its own, and return it."""
    rows = out.flatten(0, -3)
    tokens, heads, columns = rows.shape
    half = angles.table.shape[1] // 2
    grid = (tokens, triton.cdiv(heads, HEADS))
    sizes = (heads, *rows.stride()[:2], columns - 2 * half, half, HEADS)
    _rotate_kernel[grid](rows, angles.positions, angles.table, *sizes, num_warps=1)
    return out


def rotated_after(
    prepare: Callable[[Inputs], Callable[[], torch.Tensor]], angles: Callable[[Inputs], Angles | None], inputs: Inputs
) -> Callable[[], torch.Tensor]:
    """A call of someone else's kernel, followed by the rotation where the package rotates."""
    call, found = prepare(inputs), angles(inputs)
    return call if found is None else lambda: rotate(call(), found)
