"""Reference of latents, in plain torch, token by token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

LAST_POSITION = 2**31 - 1


@dataclass(frozen=True)
class Groups:
    """The tensors of a call that makes latents, on the CPU.

    Attributes:
        kv_score: fp32 [T, columns], or with scores [T, 2 * columns].
        positions, slots: of the tokens.
        ratio: tokens of a group.
        states: fp32 [rings, capacity, 2 * columns] before the call; None for groups of one token.
        starts, requests: first token of each request, and the request of each token; empty for groups of one token.
    """

    kv_score: torch.Tensor
    positions: list[int]
    slots: list[int]
    ratio: int
    states: torch.Tensor | None
    starts: list[int]
    requests: list[int]

    @classmethod
    def of(cls, arguments: Mapping[str, Any], states: torch.Tensor | None) -> Groups:
        """The groups of a call's arguments, with the states before it."""
        pools = arguments["compress_ratio"] > 1
        return cls(
            kv_score=arguments["kv_score"].cpu(),
            positions=arguments["positions"].tolist(),
            slots=arguments["slot_mapping"].tolist(),
            ratio=arguments["compress_ratio"],
            states=states,
            starts=arguments["query_start_loc"].tolist() if pools else [],
            requests=arguments["token_to_req_indices"].tolist() if pools else [],
        )

    def _inside(self, token: int) -> bool:
        """Whether a token's slot is in the states; for groups of one token whether it is a slot."""
        slot = self.slots[token]
        return slot >= 0 and (self.states is None or slot < self.states.shape[0] * self.states.shape[1])

    def _ends(self, token: int) -> bool:
        position = self.positions[token]
        return self._inside(token) and 0 <= position <= LAST_POSITION and (position + 1) % self.ratio == 0

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """Request, first token and end of each request that has tokens."""
        bounds = [min(max(start, 0), len(self.slots)) for start in self.starts]
        for request, (start, end) in enumerate(itertools.pairwise(bounds)):
            if start < end:
                yield request, start, end

    def members(self) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """The token that ends each group, and the rows of its tokens, earlier ones from the ring."""
        if self.states is None:
            yield from ((token, [self.kv_score[token]]) for token in range(len(self.slots)) if self._ends(token))
            return
        capacity = self.states.shape[1]
        for request, start, end in self._ranges():
            for token in filter(self._ends, range(start, end)):
                first = token + 1 - self.ratio
                if first >= start and self.requests[token] != request:
                    continue
                ring, rows = self.states[self.slots[token] // capacity], []
                for one in range(first, token + 1):
                    at = self.positions[token] - (token - one)
                    rows.append(ring[at % capacity] if one < start else self.kv_score[one])
                yield token, rows

    def saved(self) -> Iterator[tuple[int, int, int]]:
        """Token, ring and place of each state that the call stores."""
        assert self.states is not None
        capacity = self.states.shape[1]
        for _, start, end in self._ranges():
            for token in filter(self._inside, range(max(start, end - capacity), end)):
                yield token, self.slots[token] // capacity, self.slots[token] % capacity


def pooled(groups: Groups, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens that end groups i64 [N], their latents float64 [N, columns], and sizes of the terms of these."""
    columns, ends, latents, sizes = len(weight), [], [], []
    for token, members in groups.members():
        rows = torch.stack(members).double()
        kv, scores = rows[:, :columns], rows[:, columns:]
        latent = (torch.softmax(scores, 0) * kv).sum(0) if groups.states is not None else kv[0]
        factor = torch.rsqrt(latent.square().mean() + eps) * weight.double()
        ends.append(token)
        latents.append(latent * factor)
        sizes.append(kv.abs().amax(0) * factor.abs())
    empty = torch.zeros(0, columns, dtype=torch.float64)
    found = (torch.stack(latents), torch.stack(sizes)) if latents else (empty, empty)
    return torch.tensor(ends, dtype=torch.int64), *found
