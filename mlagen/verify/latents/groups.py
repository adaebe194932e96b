"""The tensors of a call that makes latents, and their expected values after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.verify import tolerance
from mlagen.verify.call import family
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.memory import GARBAGE, LAYOUTS, NAN, Placed, bits, place, place_vector, seeded
from mlagen.verify.call.patterns import INT32, INT64
from mlagen.verify.call.results import Figure
from mlagen.verify.latents.cases import PoolCase
from mlagen.verify.latents.reference import LAST_POSITION, Groups, pooled
from mlagen.verify.latents.side import LatentsSide

EPS = 0.25  # which shows in latents
OTHERS = 3  # rings of no request


@dataclass
class PoolInputs(family.Inputs):
    """A call that makes latents.

    Attributes:
        side: the cache's.
        case: the case.
        arguments: by name, in the order of the wrapper's signature.
        latents: in their buffer.
        states: in their buffer; None for groups of one token.
        first_states: their values before any call, on the CPU; None likewise.
    """

    side: LatentsSide
    case: PoolCase
    arguments: dict[str, Any]
    latents: Placed
    states: Placed | None
    first_states: torch.Tensor | None

    def reset(self) -> None:
        """Put back latents and states as they were before any call."""
        for one in (self.latents, self.states):
            if one is not None and one.before is not None:
                one.buffer.copy_(one.before)
        if self.states is not None and self.first_states is not None:
            self.states.view.copy_(self.first_states)

    def renew(self) -> Iterator[None]:
        """The same tokens, then others."""
        for factor in (1.0, 0.5):
            self.arguments["kv_score"].mul_(factor)
            self.reset()
            yield

    def compare(self, results: family.Results) -> list[Figure]:
        """Figures of latents. Raises CaseFailedError unless states are the reference's, and all else as it was."""
        groups = Groups.of(self.arguments, self.first_states)
        self._compare_states(groups)
        ends, want, sizes = pooled(groups, self.arguments["rms_norm_weight"].cpu(), EPS)
        if bool(want.isnan().any()):
            raise CaseFailedError("the reference has a NaN, which the case should not have")
        got = self.latents.view.cpu()[ends]
        assert self.latents.before is not None
        expected = self.latents.before.cpu().clone()
        view = self.latents.view
        expected.as_strided(view.shape, view.stride(), view.storage_offset())[ends] = got
        if not torch.equal(bits(self.latents.buffer.cpu()), bits(expected)):
            raise CaseFailedError("rows of latents that end no group, or memory around them, changed")
        # A sum of squares is off by a step a term at most, its root by half of that; then the softmax and products.
        steps = (want.shape[-1] / 2 + 16 + 16 * self.case.ratio) * tolerance.FP32_STEP
        allowed = tolerance.UNIT_ROUNDOFF[self.side.dtype] * want.abs() * (1 + 2.0**-16) + steps * sizes
        allowed = allowed + tolerance.SMALLEST[self.side.dtype] / 2
        return [tolerance.worst("latents", (got.double() - want).abs(), allowed)]

    def _compare_states(self, groups: Groups) -> None:
        if self.states is None or self.first_states is None:
            return
        want, view = self.first_states.clone(), self.states.view
        for token, ring, place_in in groups.saved():
            want[ring, place_in] = groups.kv_score[token]
        if self.states.before is None:
            if not torch.equal(bits(view.cpu().contiguous()), bits(want)):
                raise CaseFailedError("states differ from the reference's")
            return
        expected = self.states.before.cpu().clone()
        expected.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(want)
        wrong = int((bits(self.states.buffer.cpu()) != bits(expected)).sum())
        if wrong:
            raise CaseFailedError(f"{wrong} floats of the states or around them differ from the reference's")


def _scores(case: PoolCase, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Scores of a pattern. Of -inf, the tokens that begin a group have some, and those that end one none."""
    scores = 2 * torch.randn(shape, generator=generator)
    if case.scores == "equal":
        scores.fill_(-7.0)
    elif case.scores == "large":
        signs = torch.randint(0, 3, shape, generator=generator) - 1.0
        scores = scores * 1e4 + signs * 2.0**100
    return scores


def _tokens(case: PoolCase, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Positions, requests and slots of the tokens, and the first token of each request."""
    rings = torch.randperm(len(case.chunks) + OTHERS, generator=generator).tolist()
    chunks = case.chunks
    if case.positions == "last":
        chunks = tuple((LAST_POSITION - 160 + begin % 40, length) for begin, length in chunks)
    rows = [(request, begin + number) for request, (begin, length) in enumerate(chunks) for number in range(length)]
    slots = [rings[request] * case.capacity + at % case.capacity for request, at in rows]
    found = {
        "positions": torch.tensor([at for _, at in rows], dtype=torch.int64),
        "requests": torch.tensor([request for request, _ in rows], dtype=torch.int32),
        "slots": torch.tensor(slots, dtype=torch.int64),
        "starts": torch.tensor([0, *(length for _, length in case.chunks)]).cumsum(0).int(),
    }
    if case.ratio == 1:
        found["slots"] = torch.randint(0, 2**40, (len(rows),), generator=generator)
    return found


def _broken(case: PoolCase, found: dict[str, torch.Tensor], num_states: int) -> None:
    """Changes tokens as the case asks."""
    slots, positions = found["slots"], found["positions"]
    if case.slots == "negative":
        slots[::3] = -1
        slots[1::6] = INT64.min
    elif case.slots == "beyond":
        slots[::3] = num_states
        slots[1::6] = INT64.max
        slots[4::12] = 2**32 + torch.arange(len(slots[4::12]))
    elif case.slots == "shorter":
        found["slots"] = slots[: len(slots) // 2]
    elif case.slots == "none":
        found["slots"] = slots[:0]
    if case.positions == "garbage":
        wrong = torch.tensor([-1, INT64.min + 1, INT64.max, 2**32 + 1, -(2**32) - 1, INT32.max + 2])
        mine = found["requests"] == 1
        positions[mine] = wrong[torch.arange(int(mine.sum())) % len(wrong)]
    elif case.positions == "longer":
        found["positions"] = torch.cat([positions, torch.full((5,), GARBAGE)])
    if case.requests == "garbage":
        wrong = torch.tensor([-1, len(case.chunks) + 1, INT32.min, INT32.max, len(case.chunks)], dtype=torch.int32)
        found["requests"][1::3] = wrong[torch.arange(len(found["requests"][1::3])) % len(wrong)]


def _rings(
    case: PoolCase, side: LatentsSide, found: dict[str, torch.Tensor], generator: torch.Generator
) -> torch.Tensor:
    """States of earlier tokens that groups of the call have; each other float is NaN."""
    states = torch.full((len(case.chunks) + OTHERS, case.capacity, 2 * side.columns), NAN, device="cpu")
    for start, (_, length) in zip(found["starts"].tolist(), case.chunks, strict=False):
        if length == 0:
            continue
        first, ring = int(found["positions"][start]), int(found["slots"][start]) // case.capacity
        for at in range(first - first % case.ratio, first):
            kv = torch.randn(side.columns, generator=generator)
            scores = _scores(case, (side.columns,), generator)
            if case.scores == "infinite":
                scores[::7] = -torch.inf
            states[ring, at % case.capacity] = torch.cat([kv, scores])
    return states


def _values(case: PoolCase, side: LatentsSide, positions: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """kv of tokens, and scores if groups have several."""
    tokens = len(positions)
    kv = torch.randn(tokens, side.columns, generator=generator)
    if case.ratio == 1:
        return kv
    scores = _scores(case, (tokens, side.columns), generator)
    if case.scores == "infinite":
        scores[(positions + 1) % case.ratio != 0, ::7] = -torch.inf
    return torch.cat([kv, scores], 1)


def build(case: PoolCase, side: LatentsSide, device: str, seed: int) -> PoolInputs:
    """The inputs of a case, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = seeded(seed)
    tokens = _tokens(case, generator)
    values = _values(case, side, tokens["positions"], generator)
    first_states = None if case.ratio == 1 else _rings(case, side, tokens, generator)
    _broken(case, tokens, (len(case.chunks) + OTHERS) * case.capacity)
    weight = (1 + torch.randn(side.columns, generator=generator) / 4).to(side.dtype)
    placed: dict[str, Placed] = {
        "kv_score": place(values.to(device), LAYOUTS[case.rows], NAN),
        "weight": place_vector(weight.to(device), NAN),
        **{name: place_vector(one.to(device), 0) for name, one in tokens.items()},
    }
    poison = torch.full((len(values), side.columns), NAN, dtype=side.dtype, device=device)
    latents = place(poison, LAYOUTS[case.rows], NAN)
    states = None if first_states is None else place(first_states.to(device), LAYOUTS[case.states], NAN)
    views = {name: one.view for name, one in placed.items()}
    pools = states is not None
    arguments = {
        "kv_score": views["kv_score"],
        "positions": views["positions"],
        "state_cache": states.view if states is not None else None,
        "slot_mapping": views["slots"],
        "query_start_loc": views["starts"] if pools else None,
        "token_to_req_indices": views["requests"] if pools else None,
        "rms_norm_weight": views["weight"],
        "rms_norm_eps": EPS,
        "compress_ratio": case.ratio,
        "latent_out": latents.view,
    }
    return PoolInputs(side, case, arguments, latents, states, first_states, placed=placed)
