"""The tensors of a call, and their expected values after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mlagen.layout.codec import decode, planes_of, write
from mlagen.verify import tolerance
from mlagen.verify.call import family
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.memory import GARBAGE, LAYOUTS, Placed, place, place_vector, seeded
from mlagen.verify.call.patterns import INT32
from mlagen.verify.indexer_cache.cases import KeysCase, KeysGatherCase, QueryCase
from mlagen.verify.indexer_cache.reference import normalised_keys
from mlagen.verify.indexer_cache.side import CACHE_ARGUMENT, SLOTS_ARGUMENT, WRITE, IndexerSide
from mlagen.verify.paged.angles import draw_angles, draw_positions
from mlagen.verify.paged.pages import CacheMemory, draw_slots, random_pages
from mlagen.verify.paged.rope import MOST_OFF, codes
from mlagen.verify.paged.values import VALUES

EPS = 1e-6
SCALES = (0.0883, 0.125)  # softmax_scale and head_scale


@dataclass
class Inputs(family.Inputs):
    """A call's arguments by name, in the order of the wrapper's signature."""

    side: IndexerSide
    arguments: dict[str, Any]

    def tensor(self, name: str) -> torch.Tensor:
        """An argument on the CPU."""
        found = self.arguments[name].cpu()
        assert isinstance(found, torch.Tensor)
        return found


@dataclass
class KeysInputs(Inputs):
    """A call of a writer.

    Attributes:
        case: the case.
        memory: the cache.
        before: its bytes before the call, on the CPU; of a far cache nothing.
    """

    case: KeysCase
    memory: CacheMemory
    before: torch.Tensor

    def _written(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys as they are quantised, and their slots, -1 where a token writes none."""
        slots = self.tensor(SLOTS_ARGUMENT[self.case.wrapper])
        if self.case.wrapper == WRITE:
            return self.tensor("k"), slots
        ratio = self.arguments.get("compress_ratio", self.side.compress_ratio)
        angles = self.tensor("cos_sin_cache") if self.side.rope else torch.zeros(1, 0)
        positions, weight = self.tensor("positions"), self.tensor("rms_norm_weight")
        k, bias = self.tensor("k_pre"), self.tensor("norm_bias") if "norm_bias" in self.arguments else None
        rows, ends = normalised_keys(self.side, k, positions[: len(k)], angles, weight, EPS, ratio, bias)
        return rows, torch.where(ends[: len(slots)], slots, -1)

    def compare(self) -> None:
        """Raise CaseFailedError unless the cache equals the reference's result from the cache before the call."""
        size, memory, layout = self.case.pages.block_size, self.memory, self.side.layout
        rows, slots = self._written()
        inside = (slots >= 0) & (slots < memory.pages * size)
        where = slots[inside]
        if self.case.pages.far:
            pages = memory.in_buffer(memory.buffer)
            got = [
                plane[where // size, where % size].cpu()[None].clone()
                for plane in planes_of(layout, pages, size)  # the pages that are written alone
            ]
            page = torch.zeros(1, layout.page_bytes(max(len(where), 1)), dtype=torch.uint8)
            write(layout, page, max(len(where), 1), torch.arange(len(where)), rows[: len(slots)][inside])
            want = [plane[:, : len(where)] for plane in planes_of(layout, page, max(len(where), 1))]
            self._require(got, want)
            return
        expected = self.before.clone()
        if len(where):
            write(layout, memory.in_buffer(expected), size, slots, rows)
        got_buffer = memory.buffer.cpu()
        got = [plane[where // size, where % size] for plane in planes_of(layout, memory.in_buffer(got_buffer), size)]
        planes = planes_of(layout, memory.in_buffer(expected), size)
        want = [plane[where // size, where % size] for plane in planes]
        self._require(got, want)
        for plane, found in zip(planes, got, strict=True):
            plane[where // size, where % size] = found
        if not torch.equal(got_buffer, expected):
            raise CaseFailedError("bytes outside the keys that are written changed")

    def _turned(self, got: list[torch.Tensor], want: list[torch.Tensor]) -> torch.Tensor:
        """Where keys differ by at most a norm rounded to the next number, which RoPE turns. [N, columns]"""
        layout = self.side.layout
        have, need = (decode(layout, tuple(one.flatten(0, -2) for one in planes)) for planes in (got, want))
        largest = need.abs().amax(1, keepdim=True) if len(need) else need
        return (have - need).abs() <= 2 * tolerance.UNIT_ROUNDOFF[self.side.dtype] * largest

    def _require(self, got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
        values, scales = self.side.values, self.side.scales
        for field_ in self.side.layout.fields:
            part = slice(field_.offset, field_.offset + field_.nbytes)
            left, right = got[field_.plane][..., part].contiguous(), want[field_.plane][..., part].contiguous()
            wrong = left != right
            if self.case.wrapper != WRITE and field_ is values:
                packed = self.side.packed
                off = (codes(left, packed) - codes(right, packed)).abs()
                if bool((off > 1).any()):
                    off = torch.where(self._turned(got, want).view(off.shape), off.clamp(max=1), off)
                wrong = off > 1 if float((off == 1).float().mean() if off.numel() else 0) <= MOST_OFF else off > 0
            elif self.case.wrapper != WRITE and field_ is scales and scales.dtype == "fp32":
                one, other = left.view(torch.float32), right.view(torch.float32)
                least = 2.0**-7 if scales.rule.rounding == "nearest" else 0.0  # rounding error of amax in its dtype
                wrong = ((one - other).abs() > other.abs() * least) & (one != other)
            if bool(wrong.any()):
                raise CaseFailedError(
                    f"{int(wrong.sum())} of {wrong.numel()} {field_.name} differ from the reference's"
                )

    def renew(self) -> Iterator[None]:
        """The cache as it was, and the rows in another order."""
        self.memory.buffer.copy_(self.before)
        source = self.arguments["k" if self.case.wrapper == WRITE else "k_pre"]
        source.copy_(source.flip(0))
        yield


@dataclass
class GatherInputs(Inputs):
    """A call of the gather.

    Attributes:
        case: the case.
        memory: the cache.
        out: buffers of values and scales.
        slots: of each row that is to be written; -1: it becomes 0. Further rows stay as they are.
    """

    case: KeysGatherCase
    memory: CacheMemory
    out: dict[str, Placed]
    slots: list[int] = field(default_factory=list)

    def compare(self) -> None:
        """Raise CaseFailedError unless the outputs have the cache's bytes, and the memory around them is unchanged."""
        size = self.case.pages.block_size
        planes = planes_of(self.side.layout, self.memory.in_buffer(self.memory.buffer), size)
        slots = torch.tensor(self.slots, dtype=torch.int64, device=self.memory.buffer.device)
        there = slots >= 0
        where = slots[there]
        for name, one in (("dst_k", self.side.values), ("dst_scale", self.side.scales)):
            placed = self.out[name]
            assert placed.before is not None
            expected = placed.before.clone().view(torch.uint8)
            itemsize = placed.buffer.element_size()
            strides = (placed.view.stride(0) * itemsize, 1)
            offset = placed.view.storage_offset() * itemsize
            rows = expected.as_strided((len(slots), one.nbytes), strides, offset)
            rows.zero_()
            if len(where):
                part = slice(one.offset, one.offset + one.nbytes)
                rows[there] = planes[one.plane][where // size, where % size][:, part]
            wrong = placed.buffer.view(torch.uint8) != expected
            if bool(wrong.any()):
                raise CaseFailedError(f"{int(wrong.sum())} bytes of {name} and around it differ from the cache's")

    def renew(self) -> Iterator[None]:
        """The outputs as they were, and other bytes in the cache."""
        for placed in self.out.values():
            assert placed.before is not None
            placed.buffer.copy_(placed.before)
        self.memory.buffer.copy_(self.memory.buffer.roll(16 * self.side.layout.row_bytes))
        yield


def _cache(side: IndexerSide, memory: CacheMemory, heads: bool) -> torch.Tensor:
    return memory.tensor[:, :, None] if heads else memory.tensor


def build_keys(case: KeysCase, side: IndexerSide, device: str, seed: int) -> KeysInputs:
    """The inputs of a writer. Raises CaseSkippedError: the device has too little memory."""
    generator = seeded(seed)
    values = VALUES[case.values](side, case.tokens, generator)
    tokens, size = len(values), case.pages.block_size
    memory = random_pages(side, case.pages, max(3, -(-2 * tokens // size)), device, generator)
    slots = draw_slots(case, tokens, memory.pages * size, generator)
    rows = place(values.to(device), LAYOUTS[case.source], 0.0)
    placed = {"rows": rows, "slots": place_vector(slots.to(device), 0)}
    arguments: dict[str, Any]
    if case.wrapper == WRITE:
        arguments = {"k": rows.view, "kv_cache": _cache(side, memory, case.heads), "slot_mapping": placed["slots"].view}
        if case.named:
            rounding = side.scales.rule.rounding == "power_of_two"
            tile = side.scales.tile if side.scales.count > 1 else side.layout.columns
            arguments |= {"quant_block_size": tile, "scale_fmt": "ue8m0" if rounding else None}
    else:
        positions = draw_positions(case.positions, tokens, generator)
        weight = torch.randn(side.layout.columns, generator=generator).to(side.dtype)
        placed["positions"] = place_vector(positions.to(device), 0)
        tables = LAYOUTS[case.tables]
        placed["weight"] = place((weight.float() if case.wide else weight)[None].to(device), tables, 0.0)
        table = None
        if side.rope:
            placed["angles"] = place(draw_angles(side, case.wide, generator).to(device), tables, 0.0)
            table = placed["angles"].view
        arguments = {
            "k_pre": rows.view,
            "positions": placed["positions"].view,
            "cos_sin_cache": table,
            "rms_norm_weight": placed["weight"].view[0],
            "rms_norm_eps": EPS,
            CACHE_ARGUMENT[case.wrapper]: _cache(side, memory, case.heads),
            "kv_slot_mapping": placed["slots"].view,
        }
        if case.ratio is not None:
            arguments["compress_ratio"] = case.ratio
        if case.named:
            arguments["use_fp4_cache"] = side.packed
    before = memory.buffer[:0] if case.pages.far else memory.buffer.cpu().clone()
    return KeysInputs(side, arguments, case, memory, before, placed=placed)


def build_query(case: QueryCase, side: IndexerSide, device: str, seed: int) -> Inputs:
    """The inputs of a call that quantises the query."""
    generator = seeded(seed)
    rows = None if case.tokens is None else case.tokens * case.heads
    values = VALUES[case.values](side, rows, generator)
    if case.tokens is None:
        values = values[: len(values) // case.heads * case.heads] if len(values) >= case.heads else values
    heads = case.heads if case.tokens is not None else min(case.heads, len(values))
    q = values.reshape(-1 if heads else case.tokens or 0, heads, side.layout.columns)
    tokens = len(q)
    weights = torch.randn(tokens, heads, generator=generator).to(side.dtype)
    placed = {
        "q": place(q.to(device), LAYOUTS[case.q], 0.0),
        "weights": place(
            (weights.float() if case.wide in (True, "weights") else weights).to(device), LAYOUTS[case.weights], 0.0
        ),
        "positions": place_vector(draw_positions(case.positions, tokens, generator).to(device), 0),
    }
    table = None
    if side.rope:
        placed["angles"] = place(
            draw_angles(side, case.wide in (True, "angles"), generator).to(device), LAYOUTS[case.angles], 0.0
        )
        table = placed["angles"].view
    arguments: dict[str, Any] = {
        "positions": placed["positions"].view,
        "index_q": placed["q"].view,
        "index_q_cos_sin_cache": table,
        "index_weights": placed["weights"].view,
        "index_weights_softmax_scale": SCALES[0],
        "index_weights_head_scale": SCALES[1],
    }
    if case.named:
        arguments |= {"use_fp4": side.packed, "weights_out_dtype": torch.float32}
    return Inputs(side, arguments, placed=placed)


def _table(case: KeysGatherCase, pages: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Block table i64 [requests, columns]. Entries that no token needs are garbage, after the case's pattern."""
    size = case.pages.block_size
    free = (pages - 1 - torch.randperm(min(pages, 4096), generator=generator)).tolist()
    pages_of = [[GARBAGE] * columns for _ in range(len(case.requests) + case.rows)]
    for number, count in enumerate(case.requests):
        for column in range(min(columns, -(-count // size))):
            pages_of[number][column] = free.pop() if len(free) > 1 else free[0]
    table = torch.tensor(pages_of, dtype=torch.int64).view(-1, columns)
    if case.table == "short":
        table = torch.where(table == GARBAGE, torch.randint(0, pages, table.shape, generator=generator), table)
    if case.table == "outside":
        wrong = torch.tensor([-1, pages, INT32.max, INT32.min, pages + 1])
        for number, (row, column) in enumerate((table != GARBAGE).nonzero().tolist()[::2]):
            table[row, column] = wrong[number % len(wrong)]
    return table


def _outputs(case: KeysGatherCase, side: IndexerSide, rows: int, device: str) -> dict[str, Placed]:
    """Buffers of values and scales, which hold poison."""
    layout = LAYOUTS[case.out]
    values = torch.full((rows, side.values.nbytes), 0x5A, dtype=torch.uint8, device=device)
    if case.form == "float8":
        values = values.view(torch.float8_e4m3fnuz if side.fnuz else torch.float8_e4m3fn)
    found = {"dst_k": place(values, layout, 0)}
    scales = torch.full((rows, side.scales.nbytes), 0x5A, dtype=torch.uint8, device=device)
    found["dst_scale"] = place(scales.view(torch.float32) if case.form == "floats" else scales, layout, 0)
    return found


def build_gather(case: KeysGatherCase, side: IndexerSide, device: str, seed: int) -> GatherInputs:
    """The inputs of a gather. Raises CaseSkippedError: the device has too little memory."""
    generator = seeded(seed)
    size = case.pages.block_size
    needed = [-(-count // size) for count in case.requests]
    columns = max(1, max(needed, default=0) + (-1 if case.table == "short" else 2))
    memory = random_pages(side, case.pages, sum(needed) + 3, device, generator)
    table = _table(case, memory.pages, columns, generator)
    if case.pages.far:
        for page in sorted({int(one) for one in table.flatten() if 0 <= one < memory.pages}):
            for plane in planes_of(side.layout, memory.in_buffer(memory.buffer), size):
                plane[page] = torch.randint(0, 256, plane[page].shape, generator=generator, dtype=torch.uint8).to(
                    device
                )
    tokens = sum(case.requests)
    out = _outputs(case, side, tokens + case.spare, device)
    slots, pages_of = [], table.tolist()
    for request, count in enumerate(case.requests):
        for place_ in range(count):
            page = pages_of[request][place_ // size] if place_ // size < columns else -1
            slots.append(page * size + place_ % size if 0 <= page < memory.pages else -1)
    slots = slots[: tokens + case.spare]
    bounds = torch.tensor([0, *case.requests]).cumsum(0).int()
    placed = {
        "block_table": place(table.int().to(device), LAYOUTS[case.memory], GARBAGE),
        "cu_seq_lens": place_vector(bounds.to(device), GARBAGE),
    }
    if not case.pages.far:
        placed["cache"] = Placed(memory.tensor, memory.buffer, memory.buffer.clone())
    scale = out["dst_scale"].view
    arguments = {
        "kv_cache": _cache(side, memory, case.heads),
        "dst_k": out["dst_k"].view,
        "dst_scale": scale[:, 0] if case.form == "floats" and side.scales.count == 1 else scale,
        "block_table": placed["block_table"].view,
        "cu_seq_lens": placed["cu_seq_lens"].view,
    }
    return GatherInputs(side, arguments, case, memory, out, slots, placed=placed)
