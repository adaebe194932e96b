"""Reference of the compressor, in plain torch, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mlagen.verify.compressor.side import CompressorSide
from mlagen.verify.paged.rope import rotate


@dataclass(frozen=True)
class Windows:
    """The tensors of a call that compresses, on the CPU.

    Attributes:
        states: fp32 [pages, block, 2 * width].
        table: i32 [requests, any].
        requests, positions, state_slots, slots: of the tokens.
        ratio: tokens a row.
        overlap: a window is twice as long.
    """

    states: torch.Tensor
    table: torch.Tensor
    requests: list[int]
    positions: list[int]
    state_slots: list[int]
    slots: list[int]
    ratio: int
    overlap: bool

    def page_of(self, request: int, position: int) -> int | None:
        """The page with a token's state; None where it has none."""
        entry = position // self.states.shape[1]
        if position < 0 or entry >= self.table.shape[1]:
            return None
        page = int(self.table[request, entry])
        return page if 0 <= page < len(self.states) else None

    def working(self, num_positions: int, num_slots: int) -> Iterator[tuple[int, int, int]]:
        """Request, position and slot of each token that makes a row."""
        states = self.states.shape[0] * self.states.shape[1]
        each = zip(self.requests, self.positions, self.state_slots, self.slots, strict=False)
        for request, position, state_slot, slot in each:
            if not (0 <= position < num_positions and 0 <= request < len(self.table)):
                continue
            if not (0 <= slot < num_slots and 0 <= state_slot < states) or (position + 1) % self.ratio:
                continue
            if self.page_of(request, position) is not None:
                yield request, position, slot

    def window(self, request: int, position: int) -> Iterator[tuple[int, int, int]]:
        """Page, place and half of the state of each token of the window that ends at a position, if it has one."""
        length = self.ratio * (2 if self.overlap else 1)
        for number in range(length):
            at = position + 1 - length + number
            page = self.page_of(request, at)
            if page is not None:
                yield page, at % self.states.shape[1], int(number >= self.ratio)


def compressed(
    side: CompressorSide, call: Windows, angles: torch.Tensor, weight: torch.Tensor, eps: float, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows float64 [N, columns], and their slots i64 [N]; of a slot that two tokens write, the last one."""
    columns, width = side.columns, call.states.shape[2] // 2
    found: dict[int, torch.Tensor] = {}
    for request, position, slot in call.working(len(angles), num_slots):
        kv, scores = [], []
        for page, place, half in call.window(request, position):
            state, begin = call.states[page, place].double(), half * columns
            kv.append(state[begin : begin + columns])
            scores.append(state[width + begin : width + begin + columns])
        row = (torch.softmax(torch.stack(scores), 0) * torch.stack(kv)).sum(0)
        row = row * torch.rsqrt(row.square().mean() + eps) * weight.double()
        found[slot] = rotate(side, row, angles[position // call.ratio * call.ratio].double())
    rows = torch.stack([*found.values()]) if found else torch.zeros(0, columns, dtype=torch.float64)
    return rows, torch.tensor([*found], dtype=torch.int64)
