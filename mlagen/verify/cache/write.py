"""Runs of a writer: inputs, the call, and the cache against the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.layout.codec import Pages, parts_of, planes_of, read, write
from mlagen.verify.cache.cases import WriteCase
from mlagen.verify.cache.sides import CACHE_ARGUMENT, INSERT
from mlagen.verify.call import family
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.memory import LAYOUTS, Placed, bits, place, seeded, unplaced
from mlagen.verify.paged.pages import TENSOR_SCALE, CacheMemory, alias, draw_slots, random_pages, scale_argument
from mlagen.verify.paged.side import Side
from mlagen.verify.paged.values import VALUES


@dataclass
class WriteInputs(family.Inputs):
    """A call of a writer.

    Attributes:
        side: the cache's.
        case: the case.
        arguments: by name.
        memory: the cache.
        before: its bytes before the call, on the CPU; of a far cache nothing.
        rows: the written rows, on the CPU.
    """

    side: Side
    case: WriteCase
    arguments: dict[str, Any]
    memory: CacheMemory
    before: torch.Tensor
    rows: torch.Tensor

    def compare(self) -> None:
        """Raise CaseFailedError unless the cache equals the reference's result from the cache before the call."""
        layout, size, memory = self.side.layout, self.case.pages.block_size, self.memory
        slots = self.arguments["slot_mapping"].cpu()
        if self.case.pages.far:
            count, number = len(slots), torch.arange(len(slots))
            got = read(layout, memory.pages_in(memory.buffer), size, slots.to(memory.buffer.device), TENSOR_SCALE)
            page = torch.zeros(1, layout.page_bytes(count), dtype=torch.uint8)
            whole = parts_of(layout, page, count)
            write(layout, whole, count, number, self.rows[:count], TENSOR_SCALE)
            want = read(layout, whole, count, number, TENSOR_SCALE)
            if not torch.equal(bits(got.cpu().nan_to_num(nan=1e9)), bits(want.nan_to_num(nan=1e9))):
                raise CaseFailedError("rows past 2^31 bytes differ from the reference")
            return
        expected = self.before.clone()
        if bool(((slots >= 0) & (slots < memory.pages * size)).any()):
            write(layout, memory.pages_in(expected), size, slots, self.rows, TENSOR_SCALE)
        got = memory.buffer.cpu()
        if not torch.equal(got, expected):
            self._say_where(memory.pages_in(got), memory.pages_in(expected))

    def _say_where(self, got: Pages, want: Pages) -> None:
        layout, size = self.side.layout, self.case.pages.block_size
        found = []
        planes = zip(planes_of(layout, got, size), planes_of(layout, want, size), strict=True)
        for number, (left, right) in enumerate(planes):
            for field in layout.fields:
                if field.plane == number:
                    part = slice(field.offset, field.offset + field.nbytes)
                    if wrong := int((left[..., part] != right[..., part]).sum()):
                        found.append(f"{wrong} bytes of {field.name}")
        where = ", ".join(found) or "bytes outside its rows"
        raise CaseFailedError(f"the cache differs from the reference: {where}")

    def renew(self) -> Iterator[None]:
        """The cache as it was, and the rows in another order."""
        self.memory.buffer.copy_(self.before)
        for source in [self.placed[name].view for name in ("k", "kv_c", "k_pe") if name in self.placed]:
            source.copy_(source.flip(0))
        self.rows = self.rows.flip(0)
        yield


def _sources(
    case: WriteCase, side: Side, values: torch.Tensor, device: str
) -> tuple[dict[str, Any], dict[str, Placed]]:
    """The arguments that hold the rows, and their buffers."""

    def source(columns: torch.Tensor) -> Placed:
        return place(columns.to(device), LAYOUTS[case.source], 0.0)

    if case.wrapper == INSERT:
        placed = {"k": source(values)}
        return {"k": placed["k"].view}, placed
    d_c = side.facts.d_c
    placed = {"kv_c": source(values[:, :d_c])}
    arguments: dict[str, Any] = {"kv_c": placed["kv_c"].view, "k_pe": None}
    if case.k_pe in ("2d", "3d"):
        placed["k_pe"] = source(values[:, d_c:])
        arguments["k_pe"] = placed["k_pe"].view if case.k_pe == "2d" else placed["k_pe"].view[:, None]
    elif case.k_pe == "empty":
        arguments["k_pe"] = torch.empty(len(values), 0, dtype=side.dtype, device=device)
    return arguments, placed


def build_write(case: WriteCase, side: Side, device: str, seed: int) -> WriteInputs:
    """The inputs of a case, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = seeded(seed)
    values = VALUES[case.values](side, case.tokens, generator)
    tokens, size = values.shape[0], case.pages.block_size
    memory = random_pages(side, case.pages, max(3, -(-2 * tokens // size)), device, generator)
    slots = draw_slots(case, tokens, memory.pages * size, generator).to(device)
    arguments, placed = _sources(case, side, values, device)
    arguments |= {"slot_mapping": slots, **scale_argument(side, device), CACHE_ARGUMENT[case.wrapper]: memory.tensor}
    arguments |= memory.others
    if case.wrapper == INSERT:
        arguments["block_size"] = size
    else:
        arguments["kv_cache_dtype"] = alias(side.layout) if case.values == "random" else side.layout.name
    if case.newer and case.wrapper == INSERT:
        arguments |= {"use_fnuz": side.fnuz, "bytes_per_token": side.layout.row_bytes}
    elif case.newer:
        arguments["skip_scale"] = not side.layout.tensor_scale
    before = memory.buffer[:0] if case.pages.far else memory.buffer.cpu().clone()
    return WriteInputs(
        side, case, arguments, memory, before, values.cpu(), placed={**placed, "slot_mapping": unplaced(slots)}
    )
