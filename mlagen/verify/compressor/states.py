"""The tensors of a call that saves states, and their expected values after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.verify.call import family
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.memory import GARBAGE, LAYOUTS, NAN, Placed, bits, place, place_vector, seeded
from mlagen.verify.call.patterns import INT32, INT64
from mlagen.verify.call.results import Figure
from mlagen.verify.compressor.cases import SaveCase
from mlagen.verify.compressor.side import CompressorSide
from mlagen.verify.paged.pages import draw_slots


@dataclass
class StatesInputs(family.Inputs):
    """A call that saves states.

    Attributes:
        case: the case.
        arguments: by name, in the order of the wrapper's signature.
        states: the states in their buffer.
    """

    case: SaveCase
    arguments: dict[str, Any]
    states: Placed

    def reset(self) -> None:
        """Put back the states as they were before any call."""
        if self.states.before is not None:
            self.states.buffer.copy_(self.states.before)

    def renew(self) -> Iterator[None]:
        """The same values, then others."""
        for turned in (False, True):
            if turned:
                self.arguments["kv"].copy_(self.arguments["kv"].flip(0))
            self.reset()
            yield

    def compare(self, results: family.Results) -> list[Figure]:
        """Nothing. Raises CaseFailedError unless the states, and the memory around them, are the reference's."""
        given = {name: one.cpu() for name, one in self.arguments.items() if isinstance(one, torch.Tensor)}
        width, ratio, size = (self.arguments[name] for name in ("state_width", "compress_ratio", "block_size"))
        columns, pages = given["kv"].shape[1], given["state_cache"].shape[0]
        far = self.states.before is None
        want = None if self.states.before is None else self.states.before.cpu().clone()
        view, got = self.states.view, given["state_cache"]
        for token, slot in enumerate(given["slot_mapping"].tolist()):
            position = int(given["positions"][token])
            if not 0 <= slot < pages * size or not 0 <= position <= INT32.max:
                continue
            state = torch.cat(
                [given["kv"][token].float(), given["score"][token].float() + given["ape"][position % ratio]]
            )
            places = torch.cat([torch.arange(columns), width + torch.arange(columns)])
            if far:
                found = got[slot // size, slot % size][places]
                if not torch.equal(bits(found), bits(state)):
                    raise CaseFailedError(f"the state of token {token} differs from the reference's")
            elif want is not None:
                inside = want.as_strided(view.shape, view.stride(), view.storage_offset())
                inside[slot // size, slot % size, places] = state
        if want is not None and not torch.equal(bits(self.states.buffer.cpu()), bits(want)):
            wrong = int((bits(self.states.buffer.cpu()) != bits(want)).sum())
            raise CaseFailedError(f"{wrong} floats of the states or around them differ from the reference's")
        return []


def _positions(case: SaveCase, generator: torch.Generator) -> torch.Tensor:
    found = torch.randint(0, 2**20, (case.tokens + (5 if case.positions == "longer" else 0),), generator=generator)
    if case.positions == "zero":
        found.zero_()
    elif case.positions == "garbage":
        wrong = torch.tensor([-1, INT64.min, INT64.max, 2**32 + 1, -(2**32), INT32.max, INT32.max + 1])
        found[::3] = wrong[torch.arange(len(found[::3])) % len(wrong)]
    elif case.positions == "longer":
        found[case.tokens :] = GARBAGE
    return found


def build(case: SaveCase, side: CompressorSide, device: str, seed: int) -> StatesInputs:
    """The inputs of a case, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = seeded(seed)
    columns = case.columns * side.columns - case.without or 37
    width, pages = columns + case.further, 2 if case.states == "far" else max(3, -(-2 * case.tokens // case.block))
    dtype = torch.float32 if case.wide else side.dtype
    states = place(torch.full((pages, case.block, 2 * width), NAN, device=device), LAYOUTS[case.states], NAN)
    placed: dict[str, Placed] = {}
    for name, rows in (("kv", case.tokens), ("score", case.tokens), ("ape", case.ratio)):
        values = torch.randn(rows, columns, generator=generator).to(torch.float32 if name == "ape" else dtype)
        placed[name] = place(values.to(device), LAYOUTS[case.rows], NAN)
    placed["positions"] = place_vector(_positions(case, generator).to(device), 0)
    slots = draw_slots(case, case.tokens, pages * case.block, generator)
    placed["slot_mapping"] = place_vector(slots.to(device), 0)
    views = {name: one.view for name, one in placed.items()}
    arguments = {
        **{name: views[name] for name in ("kv", "score", "ape", "positions")},
        "state_cache": states.view,
        "slot_mapping": views["slot_mapping"],
        "block_size": case.block,
        "state_width": width,
        "compress_ratio": case.ratio,
    }
    return StatesInputs(case, arguments, states, placed=placed)
