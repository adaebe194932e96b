"""Runs of a gather: inputs, the call, and the gathered rows against the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mlagen.layout.codec import planes_of, read
from mlagen.verify.cache.cases import GatherCase
from mlagen.verify.cache.sides import CACHE_ARGUMENT, REQUESTS
from mlagen.verify.call import family
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.memory import GARBAGE, LAYOUTS, Placed, bits, place, place_vector, seeded
from mlagen.verify.call.patterns import INT32
from mlagen.verify.paged.pages import TENSOR_SCALE, CacheMemory, alias, random_pages, scale_argument
from mlagen.verify.paged.side import Side

FAR_LAST = 900  # pages of a far cache, which has at least 1,000 past 2^31 bytes
UNWRITTEN = 77.0  # initial value of an output

Index = tuple[int, ...]  # of a row of the output


@dataclass
class GatherInputs(family.Inputs):
    """A call of a gather.

    Attributes:
        side: the cache's.
        case: the case.
        arguments: by name.
        memory: the cache.
        out: the output's buffer, and its contents before the call.
        rows: (index in the output, slot) of each row that is to be written.
    """

    side: Side
    case: GatherCase
    arguments: dict[str, Any]
    memory: CacheMemory
    out: Placed
    rows: list[tuple[Index, int]]

    @property
    def before(self) -> torch.Tensor:
        """The contents of the output's buffer before the call."""
        assert self.out.before is not None
        return self.out.before

    def compare(self) -> None:
        """Raise CaseFailedError unless the output and the memory around it equal the reference."""
        expected = self.before.cpu().clone()
        view = expected.as_strided(self.out.view.shape, self.out.view.stride(), self.out.view.storage_offset())
        if self.rows:
            pages = self.memory.pages_in(self.memory.buffer)
            slots = torch.tensor([slot for _, slot in self.rows], device=self.memory.buffer.device)
            values = read(self.side.layout, pages, self.case.pages.block_size, slots, TENSOR_SCALE)
            for (index, _), row in zip(self.rows, values.to(self.side.dtype).cpu(), strict=True):
                view[index] = row
        got = self.out.buffer.cpu()
        wrong = (bits(got) != bits(expected)) & ~(got.isnan() & expected.isnan())
        if bool(wrong.any()):
            raise CaseFailedError(f"{int(wrong.sum())} elements of the output and around it differ from the reference")

    def renew(self) -> Iterator[None]:
        """The output as it was, and other bytes in the cache."""
        self.out.buffer.copy_(self.before)
        self.memory.buffer.copy_(self.memory.buffer.roll(16 * self.side.layout.row_bytes))
        yield


def _table(
    case: GatherCase, side: Side, pages: int, columns: int, requests: list[tuple[int, int]], generator: torch.Generator
) -> torch.Tensor:
    """Block table i32 [requests, columns]. Entries that no token needs are garbage, after the case's pattern."""
    size = case.pages.block_size
    last = FAR_LAST if case.pages.far else 4096  # only pages past 2^31 bytes
    free = (pages - 1 - torch.randperm(min(pages, last), generator=generator)).tolist()
    pages_of = [[GARBAGE] * columns for _ in requests]
    for number, (first, count) in enumerate(requests):
        for column in range(first // size, min(columns, -(-(first + count) // size)) if count > 0 else 0):
            pages_of[number][column] = free.pop() if len(free) > 1 else free[0]
    table = torch.tensor(pages_of, dtype=torch.int64).view(len(requests), columns)
    if case.table == "short":
        table = torch.where(table == GARBAGE, torch.randint(0, pages, table.shape, generator=generator), table)
    if case.table == "outside":
        wrong = torch.tensor([-1, pages, INT32.max, INT32.min, pages + 1])
        used = (table != GARBAGE).nonzero()
        for number, (row, column) in enumerate(used.tolist()[::2]):
            table[row, column] = wrong[number % len(wrong)]
    return table


def _spans(case: GatherCase) -> list[tuple[int, int]]:
    """(first position, tokens) of each request."""
    from_zero = (case.lens if case.wrapper == REQUESTS else case.starts) == "none"
    found = [(0 if from_zero else first, count) for first, count in case.requests]
    if not case.pages.single:
        return found
    size = case.pages.block_size
    found = [(first, min(count, size)) for first, count in found]
    return [(0 if from_zero else min(first, size - count), count) for first, count in found]


def _randomise(side: Side, memory: CacheMemory, size: int, table: torch.Tensor, generator: torch.Generator) -> None:
    """Gives the pages that a table names random bytes."""
    planes = planes_of(side.layout, memory.pages_in(memory.buffer), size)
    for page in table[(table >= 0) & (table < memory.pages)].tolist():
        for plane in planes:
            values = torch.randint(0, 256, plane[page].shape, generator=generator, dtype=torch.uint8)
            plane[page] = values.to(plane.device)


def _lens(case: GatherCase, spans: list[tuple[int, int]]) -> list[int]:
    """Tokens that are asked for of each request."""
    lens = [count for _, count in spans]
    if case.odd == "gathers too many":
        lens = [first + count + 3 for first, count in spans]
    if case.odd == "negative lengths":
        lens[::2] = [-1, INT32.min, *lens][: len(lens[::2])]
    return lens


def _i32(values: list[int], device: str, around: int = 0) -> torch.Tensor:
    """A vector in a buffer of `around`."""
    return place_vector(torch.tensor(values, dtype=torch.int32, device=device), around).view


def _output(case: GatherCase, side: Side, shape: tuple[int, ...], device: str) -> Placed:
    return place(
        torch.full((*shape, side.layout.columns), UNWRITTEN).to(side.dtype).to(device), LAYOUTS[case.out], UNWRITTEN
    )


class Output(NamedTuple):
    """A gather's output, the arguments that select its tokens, and (index, request, position) of each such token."""

    out: Placed
    arguments: dict[str, Any]
    tokens: list[tuple[Index, int, int]]


def _by_request(case: GatherCase, side: Side, spans: list[tuple[int, int]], requests: int, device: str) -> Output:
    lens = _lens(case, spans)
    ends = [first + count for first, count in spans]
    room = case.offset + max(*lens, 0) + case.spare
    if case.odd == "ends of int32":
        ends = [INT32.max, INT32.min, -5, 5, INT32.max]
        lens = [9, *[INT32.max] * 4]
    out = _output(case, side, (requests, room), device)
    tokens: list[tuple[Index, int, int]] = [
        ((request, case.offset + number), request, end - length + number)
        for request, (end, length) in enumerate(zip(ends, lens, strict=True))
        for number in range(min(length, room - case.offset))
    ]
    arguments = {
        "out": out.view,
        "seq_lens": _i32(ends, device),
        "gather_lens": None if case.lens == "none" else _i32(lens, device),
        "block_size": case.pages.block_size,
        "offset": case.offset,
    }
    if case.expected is not None:
        arguments |= {"use_fnuz": side.fnuz, "max_gather_len": case.expected}
    return Output(out, arguments, tokens)


def _by_token(case: GatherCase, side: Side, spans: list[tuple[int, int]], device: str) -> Output:
    lens = _lens(case, spans)
    bounds = [sum(lens[:number]) for number in range(len(lens) + 1)]
    token_to_seq = [number for number, length in enumerate(lens) for _ in range(length)]
    num_tokens = len(token_to_seq)
    if case.odd == "past the end":
        token_to_seq += [len(lens) - 1] * 5
        num_tokens += 5
    elif case.odd == "no request":
        for number, one in enumerate(token_to_seq[::3]):
            token_to_seq[3 * number] = (one - 64, one + 64, -1, len(lens), INT32.max, INT32.min)[number % 6]
    elif case.odd == "fewer tokens":
        num_tokens -= 3
    out = _output(case, side, (len(token_to_seq) + max(0, case.spare),), device)
    starts = [first for first, _ in spans]
    if case.odd == "ends of int32":
        starts = [INT32.max, INT32.min, INT32.max - 3, INT32.min + 4, 3]
    tokens: list[tuple[Index, int, int]] = [
        ((token,), request, token - bounds[request] + starts[request])
        for token, request in enumerate(token_to_seq[:num_tokens])
        if 0 <= request < len(lens) and token < bounds[request + 1]
    ]
    arguments = {
        "dst": out.view,
        "cu_seq_lens": _i32(bounds, device, GARBAGE),
        "token_to_seq": _i32(token_to_seq, device),
        "num_tokens": num_tokens,
        "kv_cache_dtype": alias(side.layout),
        "seq_starts": None if case.starts == "none" else _i32(starts, device, bounds[-1]),
    }
    return Output(out, arguments, tokens)


def _slots(
    tokens: list[tuple[Index, int, int]], table: torch.Tensor, memory: CacheMemory, size: int
) -> Iterator[tuple[Index, int]]:
    """(index, slot) of the tokens with pages in the block table and in the cache."""
    pages_of = table.tolist()
    for index, request, position in tokens:
        if 0 <= position < table.shape[1] * size:
            page = pages_of[request][position // size]
            if 0 <= page < memory.pages:
                yield index, page * size + position % size


def build_gather(case: GatherCase, side: Side, device: str, seed: int) -> GatherInputs:
    """The inputs of a case, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = seeded(seed)
    size, spans = case.pages.block_size, _spans(case)
    needed = [-(-(first + count) // size) for first, count in spans]
    columns = max(1, max(needed) - 1 if case.table == "short" else max(needed) + 2)
    memory = random_pages(side, case.pages, sum(needed) + 3, device, generator)
    table = _table(case, side, memory.pages, columns, spans, generator)
    if case.pages.far:
        _randomise(side, memory, size, table, generator)
    requests = len(spans) + (2 if case.odd == "fewer requests" else 0)
    spare = torch.full((requests - len(spans), columns), GARBAGE)
    # Past the last request everything looks well, if it is looked at.
    around = 0 if case.odd == "no request" else GARBAGE
    placed = {"block_table": place(torch.cat([table, spare]).int().to(device), LAYOUTS[case.memory], around)}
    if not case.pages.far:
        placed["cache"] = Placed(memory.tensor, memory.buffer, memory.buffer.clone())
    if case.wrapper == REQUESTS:
        output = _by_request(case, side, spans, requests, device)
    else:
        output = _by_token(case, side, spans, device)
    arguments = {
        CACHE_ARGUMENT[case.wrapper]: memory.tensor,
        **memory.others,
        "block_table": placed["block_table"].view,
        **scale_argument(side, device),
        **output.arguments,
    }
    rows = list(_slots(output.tokens, table, memory, size))
    return GatherInputs(side, case, arguments, memory, output.out, rows, placed=placed)
