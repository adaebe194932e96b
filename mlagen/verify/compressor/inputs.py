"""The tensors of a call that compresses, and the rows that it should write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from mlagen.layout import DataField, Field, ScalesField
from mlagen.layout.codec import planes_of, write
from mlagen.verify.call import family
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.memory import GARBAGE, LAYOUTS, NAN, Placed, place, place_vector, seeded
from mlagen.verify.call.patterns import INT32, INT64
from mlagen.verify.call.results import Figure
from mlagen.verify.compressor.cases import CompressCase
from mlagen.verify.compressor.reference import Windows, compressed
from mlagen.verify.compressor.side import CompressorSide
from mlagen.verify.paged.pages import TENSOR_SCALE, CacheMemory, draw_slots, random_pages
from mlagen.verify.paged.rope import MOST_OFF, codes

POSITIONS = 400  # of a table of angles
EPS = 0.25  # which shows in rows
FEW_OFF = 4  # values that may be off in however few rows
CANCELLED = 2.0**-18  # of a row's largest column: by how much fp32 may be off where a rotation's products cancel


@dataclass
class CompressInputs(family.Inputs):
    """A call that compresses.

    Attributes:
        side: the cache's.
        case: the case.
        arguments: by name, in the order of the wrapper's signature.
        memory: the cache.
        before: its bytes before the call; of a far cache nothing.
    """

    side: CompressorSide
    case: CompressCase
    arguments: dict[str, Any]
    memory: CacheMemory
    before: torch.Tensor

    def reset(self) -> None:
        """Put back the cache as it was before any call."""
        if len(self.before):
            self.memory.buffer.copy_(self.before)

    def renew(self) -> Iterator[None]:
        """The same states, then others."""
        for factor in (1.0, 0.5):
            self.arguments["state_cache"].mul_(factor)
            self.reset()
            yield

    def windows(self) -> Windows:
        """The call's windows."""
        given = self.arguments
        slots = getattr(given["k_cache_metadata"], "slot_mapping", given["k_cache_metadata"])
        count = given["num_actual"]
        return Windows(
            states=given["state_cache"].cpu(),
            table=given["block_table"].cpu(),
            requests=given["token_to_req_indices"][:count].tolist(),
            positions=given["positions"][:count].tolist(),
            state_slots=given["slot_mapping"][:count].tolist(),
            slots=slots[:count].tolist(),
            ratio=given["compress_ratio"],
            overlap=given["overlap"],
        )

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows float64 [N, columns] that the call writes, and their slots."""
        angles, weight = self.arguments["cos_sin_cache"].cpu(), self.arguments["rms_norm_weight"].cpu()
        slots = self.memory.pages * self.case.pages.block_size
        return compressed(self.side, self.windows(), angles, weight, EPS, slots)

    def compare(self, results: family.Results) -> list[Figure]:
        """Nothing. Raises CaseFailedError unless the cache's rows are the reference's, and all else as it was."""
        rows, slots = self.rows()
        if bool(rows.isnan().any()):
            raise CaseFailedError("the reference has a NaN, which the case should not have")
        got, layout = self._planes(self.memory.buffer, slots), self.side.layout
        for field in layout.fields:
            part = slice(field.offset, field.offset + field.nbytes)
            want = _encoded(self.side, rows)[field.plane][:, part].contiguous()
            wrong = self._wrong(field, got[field.plane][:, part].contiguous(), want, rows)
            if bool(wrong.any()):
                raise CaseFailedError(f"{int(wrong.sum())} of {wrong.numel()} {field.name} differ from the reference's")
        if self.case.pages.far:
            return []
        expected, size = self.before.cpu().clone(), self.case.pages.block_size
        for plane, found in zip(planes_of(layout, self.memory.in_buffer(expected), size), got, strict=True):
            plane[slots // size, slots % size] = found
        if not torch.equal(self.memory.buffer.cpu(), expected):
            raise CaseFailedError("bytes outside the rows that are written changed")
        return []

    def _planes(self, buffer: torch.Tensor, slots: torch.Tensor) -> list[torch.Tensor]:
        """Bytes of the rows at slots, by plane, on the CPU."""
        size, where = self.case.pages.block_size, slots.to(buffer.device)
        planes = planes_of(self.side.layout, self.memory.in_buffer(buffer), size)
        return [plane[where // size, where % size].cpu() for plane in planes]

    def _wrong(self, field: Field, got: torch.Tensor, want: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Which values of a field are not the reference's, nor in few of them the next ones after another rounding."""
        if not isinstance(field, DataField | ScalesField) or field.dtype == "ue8m0":
            return got != want
        if field.dtype == "fp32":
            one, other = got.view(torch.float32), want.view(torch.float32)
            rounds = isinstance(field, ScalesField) and field.rule.rounding == "power_of_two"
            return (one - other).abs() > other.abs() * (0.0 if rounds else 2.0**-7)
        if field.dtype in ("bf16", "fp16"):
            one, other = got.view(self.side.dtype).double(), want.view(self.side.dtype).double()
            largest = rows.abs().amax(1, keepdim=True)
            step = (2.0**-7 if field.dtype == "bf16" else 2.0**-10) * other.abs() + CANCELLED * largest
            off, too_far = one != other, (one - other).abs() > step
        else:
            apart = (codes(got, field.dtype == "e2m1") - codes(want, field.dtype == "e2m1")).abs()
            off, too_far = apart > 0, apart > 1
        return too_far if int(off.sum()) <= max(FEW_OFF, MOST_OFF * off.numel()) else off


def _encoded(side: CompressorSide, rows: torch.Tensor) -> list[torch.Tensor]:
    """Bytes of rows as the codec stores them, by plane, once they are rounded to the model's dtype."""
    count = max(len(rows), 1)
    page = torch.zeros(1, side.layout.page_bytes(count), dtype=torch.uint8)
    write(side.layout, page, count, torch.arange(len(rows)), rows.to(side.dtype), TENSOR_SCALE)
    return [plane[0, : len(rows)] for plane in planes_of(side.layout, page, count)]


def angles_of(side: CompressorSide, count: int, wide: bool, generator: torch.Generator) -> torch.Tensor:
    """A table of cosines and sines in the model's dtype, or the same numbers in fp32."""
    angle = 2 * torch.pi * torch.rand(count, side.rope // 2, generator=generator)
    table = torch.cat([angle.cos(), angle.sin()], 1).to(side.dtype)
    return table.float() if wide else table


def _table(case: CompressCase, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """Pages i32 [requests, entries] of each request's states, garbage after its last, and the number of pages."""
    needed = [-(-(begin + length) // case.block) for begin, length in case.chunks]
    pages = sum(needed) + (0 if case.states == "far" else 3)
    free = torch.randperm(max(pages, 1), generator=generator).int()
    table = torch.full((max(len(needed), 1), max(needed, default=1)), GARBAGE, dtype=torch.int32)
    first = 0
    for request, count in enumerate(needed):
        table[request, :count] = free[first : first + count]
        first += count
    return table, max(pages, 1)


def _broken(case: CompressCase, table: torch.Tensor) -> torch.Tensor:
    """The block table with entries that name no page, or too few of them."""
    if case.table == "holes":
        table[:, ::3] = -1
    elif case.table == "garbage":
        wrong = torch.tensor([INT32.min, INT32.max, -2, GARBAGE], dtype=torch.int32)
        table[:, 1::3] = wrong[torch.arange(table[:, 1::3].shape[1]) % len(wrong)]
    elif case.table == "narrow":
        table = table[:, : table.shape[1] // 2]
    return table


def _drawn(case: CompressCase, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Scores of a pattern."""
    scores = 2 * torch.randn(shape, generator=generator)
    if case.scores == "equal":
        scores.fill_(-7.0)
    elif case.scores == "large":
        signs = torch.randint(0, 3, shape, generator=generator) - 1.0
        scores = scores * 1e4 + signs * 2.0**100
    elif case.scores == "infinite":
        scores[torch.rand(shape, generator=generator) < 0.4] = -torch.inf
    return scores


def _fill(states: torch.Tensor, windows: Windows, columns: int, case: CompressCase, generator: torch.Generator) -> None:
    """Writes the states that windows need; each other float stays NaN."""
    width = states.shape[2] // 2
    for request, position, _ in windows.working(POSITIONS, INT64.max):
        found = list(windows.window(request, position))
        kv = torch.randn(len(found), columns, generator=generator)
        scores = _drawn(case, (len(found), columns), generator)
        if case.scores == "infinite":  # of all first tokens in some columns, and nowhere of the last: none is NaN
            scores[: len(found) // 2, ::7] = -torch.inf
            scores[-1] = torch.randn(columns, generator=generator)
        for number, (page, place_in, half) in enumerate(found):
            begin = half * columns
            states[page, place_in, begin : begin + columns] = kv[number]
            states[page, place_in, width + begin : width + begin + columns] = scores[number]


def _tokens(case: CompressCase, table: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Requests, positions and slots of states of the call's tokens."""
    requests = [request for request, (_, length) in enumerate(case.chunks) for _ in range(length)]
    positions = [begin + number for begin, length in case.chunks for number in range(length)]
    slots = [
        int(table[request, at // case.block]) * case.block + at % case.block
        for request, at in zip(requests, positions, strict=True)
    ]
    found = {
        "requests": torch.tensor(requests, dtype=torch.int32),
        "positions": torch.tensor(positions, dtype=torch.int64),
        "slots": torch.tensor(slots, dtype=torch.int64),
    }
    if case.positions == "garbage":
        # Each is the last of a window, as far as a window of them may be.
        wrong = torch.tensor([-1, -(case.ratio) - 1, INT64.min + case.ratio - 1, INT64.max, 2**32 - 1, 2**31 - 1])
        found["positions"][::2] = wrong[torch.arange(len(positions[::2])) % len(wrong)]
    if case.positions == "longer":
        found["positions"] = torch.cat([found["positions"], torch.full((5,), 3)])
    if case.requests == "garbage":
        wrong = torch.tensor([-1, INT32.min, INT32.max, len(table), -2], dtype=torch.int32)
        found["requests"][1::2] = wrong[torch.arange(len(requests[1::2])) % len(wrong)]
    if case.state_slots == "skipped":
        found["slots"][3::8] = torch.tensor([-1, INT64.max])[torch.arange(len(found["slots"][3::8])) % 2]
    elif case.state_slots == "shorter":
        found["slots"] = found["slots"][: len(slots) // 2]
    return found


def build(case: CompressCase, side: CompressorSide, device: str, seed: int) -> CompressInputs:
    """The inputs of a case, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = seeded(seed)
    table, pages = _table(case, generator)
    tokens = _tokens(case, table, generator)
    table = _broken(case, table)
    width = (2 if case.overlap else 1) * side.columns + case.further
    states = torch.full((pages, case.block, 2 * width), NAN)
    count, size = len(tokens["positions"]) - (5 if case.positions == "longer" else 0), case.pages.block_size
    memory = random_pages(side, case.pages, max(3, -(-2 * count // size)), device, generator)
    slots = draw_slots(case, count, memory.pages * size, generator)
    known = 10 if case.positions == "past" else POSITIONS
    angles = angles_of(side, known, case.wide, generator)
    weight = (1 + torch.randn(side.columns, generator=generator) / 4).to(side.dtype)
    each = {name: values.tolist() for name, values in tokens.items()}
    windows = Windows(
        states, table, each["requests"], each["positions"], each["slots"], slots.tolist(), case.ratio, case.overlap
    )
    _fill(states, windows, side.columns, case, generator)
    placed: dict[str, Placed] = {
        "state_cache": place(states.to(device), LAYOUTS[case.states], NAN),
        "table": place(table.to(device), LAYOUTS[case.tables], 0),
        "angles": place(angles.to(device), LAYOUTS[case.tables], NAN),
        "weight": place_vector(weight.to(device), NAN),
        "slots": place_vector(slots.to(device), 0),
        **{f"tokens {name}": place_vector(values.to(device), 0) for name, values in tokens.items()},
    }
    views = {name: one.view for name, one in placed.items()}
    arguments = arguments_of(side, case, views, memory.tensor, count, width)
    before = memory.buffer[:0] if case.pages.far else memory.buffer.clone()
    return CompressInputs(side, case, arguments, memory, before, placed=placed)


def arguments_of(
    side: CompressorSide,
    case: CompressCase,
    views: Mapping[str, torch.Tensor],
    cache: torch.Tensor,
    count: int,
    width: int,
) -> dict[str, Any]:
    """Arguments by name, in the order of the wrapper's signature."""
    slots = views["slots"]
    scale = {"fp8_scale": torch.tensor([TENSOR_SCALE], device=cache.device)} if side.layout.tensor_scale else {}
    return {
        "state_cache": views["state_cache"],
        "num_actual": count,
        "token_to_req_indices": views["tokens requests"],
        "positions": views["tokens positions"],
        "slot_mapping": views["tokens slots"],
        "block_table": views["table"],
        "block_size": case.block,
        "state_width": width,
        "cos_sin_cache": views["angles"],
        "kv_cache": cache,
        "k_cache_metadata": SimpleNamespace(slot_mapping=slots) if case.in_metadata else slots,
        "pdl_kwargs": None,
        "head_dim": side.columns,
        "rope_head_dim": side.rope,
        "compress_ratio": case.ratio,
        "overlap": case.overlap,
        "use_fp4_cache": side.packed,
        "rms_norm_weight": views["weight"],
        "rms_norm_eps": EPS,
        **scale,
    }


def moved(inputs: CompressInputs, memory: CacheMemory) -> CompressInputs:
    """The same call into another cache."""
    return replace(inputs, arguments={**inputs.arguments, "kv_cache": memory.tensor}, memory=memory)
