"""The tensors of a call that inserts latents, and the rows that it should write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.layout.codec import planes_of, write
from mlagen.verify.call import family
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.memory import LAYOUTS, NAN, Placed, place, place_vector, seeded
from mlagen.verify.call.results import Figure
from mlagen.verify.latents.cases import InsertCase
from mlagen.verify.latents.side import LatentsSide
from mlagen.verify.paged.angles import draw_angles, draw_positions
from mlagen.verify.paged.pages import TENSOR_SCALE, CacheMemory, draw_slots, random_pages
from mlagen.verify.paged.rope import rotate


@dataclass
class InsertInputs(family.Inputs):
    """A call that inserts latents.

    Attributes:
        side: the cache's.
        case: the case.
        arguments: by name, in the order of the wrapper's signature.
        memory: the cache.
        before: its bytes before the call; of a far cache nothing.
    """

    side: LatentsSide
    case: InsertCase
    arguments: dict[str, Any]
    memory: CacheMemory
    before: torch.Tensor

    def reset(self) -> None:
        """Put back the cache as it was before any call."""
        if len(self.before):
            self.memory.buffer.copy_(self.before)

    def renew(self) -> Iterator[None]:
        """The same latents, then others."""
        for factor in (1.0, 0.5):
            self.arguments["latent"].mul_(factor)
            self.reset()
            yield

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [N, columns] that the call writes, in the model's dtype, and their slots."""
        given = {name: self.arguments[name].cpu() for name in ("latent", "positions", "slot_mapping")}
        ratio = self.case.ratio
        angles, slots = self.arguments["cos_sin_cache"].cpu().float(), given["slot_mapping"]
        positions = given["positions"][: len(slots)]
        works = (positions >= 0) & (positions < len(angles)) & ((positions + 1) % ratio == 0)
        works &= (slots >= 0) & (slots < self.memory.pages * self.case.pages.block_size)
        latents, positions = given["latent"][: len(slots)][works], positions[works]
        turned = rotate(self.side, latents.float(), angles[positions // ratio * ratio])
        return turned.to(self.side.dtype), slots[works]

    def compare(self, results: family.Results) -> list[Figure]:
        """Nothing. Raises CaseFailedError unless the cache's rows are the reference's, and all else as it was."""
        rows, slots = self.rows()
        layout, size = self.side.layout, self.case.pages.block_size
        if not self.case.pages.far:
            expected = self.before.cpu().clone()
            write(layout, self.memory.in_buffer(expected), size, slots, rows, TENSOR_SCALE)
            wrong = int((self.memory.buffer.cpu() != expected).sum())
            if wrong:
                raise CaseFailedError(f"{wrong} bytes of the cache or around it differ from the reference's")
            return []
        count = max(len(rows), 1)
        page = torch.zeros(1, layout.page_bytes(count), dtype=torch.uint8)
        write(layout, page, count, torch.arange(len(rows)), rows, TENSOR_SCALE)
        found = planes_of(layout, self.memory.in_buffer(self.memory.buffer), size)
        for got, want in zip(found, planes_of(layout, page, count), strict=True):
            where = slots.to(got.device)
            if not torch.equal(got[where // size, where % size].cpu(), want[0, : len(rows)]):
                raise CaseFailedError("a row of the far cache differs from the reference's")
        return []


def build(case: InsertCase, side: LatentsSide, device: str, seed: int) -> InsertInputs:
    """The inputs of a case, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = seeded(seed)
    magnitude = torch.exp(2 * torch.randn(case.tokens, 1, generator=generator))
    latents = (torch.randn(case.tokens, side.columns, generator=generator) * magnitude).to(side.dtype)
    positions = draw_positions(case.positions, case.tokens, generator)
    latents[(positions[: case.tokens] + 1) % case.ratio != 0] = NAN  # of no group's end
    size = case.pages.block_size
    memory = random_pages(side, case.pages, max(3, -(-2 * case.tokens // size)), device, generator)
    slots = draw_slots(case, case.tokens, memory.pages * size, generator)
    placed: dict[str, Placed] = {
        "latent": place(latents.to(device), LAYOUTS[case.rows], NAN),
        "positions": place_vector(positions.to(device), 0),
        "cos_sin_cache": place(draw_angles(side, case.wide, generator).to(device), LAYOUTS[case.tables], NAN),
        "slot_mapping": place_vector(slots.to(device), 0),
    }
    views: dict[str, Any] = {name: one.view for name, one in placed.items()}
    scale = {"fp8_scale": torch.tensor([TENSOR_SCALE], device=device)} if side.layout.tensor_scale else {}
    arguments = {
        **{name: views[name] for name in ("latent", "positions", "cos_sin_cache")},
        "kv_cache": memory.tensor,
        "slot_mapping": views["slot_mapping"],
        "compress_ratio": case.ratio,
        **scale,
    }
    before = memory.buffer[:0] if case.pages.far else memory.buffer.clone()
    return InsertInputs(side, case, arguments, memory, before, placed=placed)
