"""Requests cut into calls that save states and compress them, against one call of all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.family import Run
from mlagen.verify.call.memory import NAN
from mlagen.verify.call.results import Figure
from mlagen.verify.compressor.cases import CompressCase
from mlagen.verify.compressor.inputs import CompressInputs, moved
from mlagen.verify.compressor.side import COMPRESS, SAVE
from mlagen.verify.paged.pages import CacheMemory

DRAFTS = 3  # tokens of a step, of which the first is kept


def _steps(case: CompressCase) -> Iterator[list[tuple[int, int, int]]]:
    """Calls as (request, first position, tokens); with drafts, a later call replaces all but a call's first token."""
    longest = max(length for _, length in case.chunks)
    sizes = {"chunks": (5, 1, 9, 2), "single": (1,), "drafts": (7, 1)}[case.steps]
    first, number = 0, 0
    while first < longest:
        size = sizes[min(number, 1)] if case.steps == "drafts" else sizes[number % len(sizes)]
        taken = DRAFTS if case.steps == "drafts" and number else size
        each = [(request, first, min(taken, length - first)) for request, (_, length) in enumerate(case.chunks)]
        yield [one for one in each if one[2] > 0]
        first, number = first + size, number + 1


def _tokens(case: CompressCase) -> list[tuple[int, int, int]]:
    return [(request, 0, length) for request, (_, length) in enumerate(case.chunks)]


class _Requests:
    """Requests with the kv, scores and states of their tokens."""

    def __init__(self, run: Run[CompressCase, CompressInputs]) -> None:
        case, arguments = run.case, run.inputs.arguments
        self.run, self.case = run, case
        generator = torch.Generator().manual_seed(7)
        self.width = arguments["state_width"]
        lengths = [length for _, length in case.chunks]
        shape = (len(lengths), max(lengths), self.width)
        self.kv = torch.randn(shape, generator=generator)
        self.scores = torch.randn(shape, generator=generator)
        self.ape = torch.randn(case.ratio, self.width, generator=generator).to(arguments["state_cache"].device)
        self.table = arguments["block_table"].cpu()
        self.most = max(lengths)

    def call(self, inputs: CompressInputs, states: torch.Tensor, tokens: list[tuple[int, int, int]]) -> dict[str, Any]:
        """Saves the states of tokens, drafts being wrong, and compresses; returns arguments of the latter."""
        case, device, size = self.case, states.device, self.case.block
        rows: list[tuple[int, int, int]] = []  # request, position, and how many tokens after the call's first
        for request, first, count in tokens:
            rows += [(request, first + number, number) for number in range(count)]
        kv = torch.stack([self._of(self.kv, row) for row in rows]).to(device)
        scores = torch.stack([self._of(self.scores, row) for row in rows]).to(device)
        positions = torch.tensor([at for _, at, _ in rows], device=device)
        pages = [int(self.table[request, at // size]) * size + at % size for request, at, _ in rows]
        # A request's rows lie one after another, each request's from a place of its own on.
        slots = [
            request * (self.most // case.ratio + 1) + at // case.ratio if (at + 1) % case.ratio == 0 else -1
            for request, at, _ in rows
        ]
        given: dict[str, Any] = {
            **inputs.arguments,
            "state_cache": states,
            "num_actual": len(rows),
            "token_to_req_indices": torch.tensor([one for one, _, _ in rows], dtype=torch.int32, device=device),
            "positions": positions,
            "slot_mapping": torch.tensor(pages, device=device),
            "k_cache_metadata": torch.tensor(slots, device=device),
        }
        where = (positions, states, given["slot_mapping"])
        self.run.subject.call(SAVE, kv, scores, self.ape, *where, size, self.width, case.ratio)
        self.run.subject.call(COMPRESS, **given)
        return given

    def _of(self, values: torch.Tensor, row: tuple[int, int, int]) -> torch.Tensor:
        request, at, number = row
        is_draft = self.case.steps == "drafts" and number > 0 and self.drafting
        return values[request, at] + (3.0 if is_draft else 0.0)

    drafting = False


def chained(run: Run[CompressCase, CompressInputs]) -> list[Figure]:
    """Calls of chunks, of single tokens and of drafts leave the bytes of one call, whose rows are the reference's."""
    inputs, requests = run.inputs, _Requests(run)
    memory, shape = inputs.memory, inputs.arguments["state_cache"].shape
    device = memory.buffer.device
    states = torch.full(shape, NAN, device=device)
    given = requests.call(inputs, states, _tokens(run.case))
    CompressInputs(inputs.side, run.case, given, memory, inputs.before).compare({})
    buffer = inputs.before.to(device)
    other = CacheMemory(memory.in_buffer(buffer).view(memory.tensor.dtype), buffer, memory.pages)
    again, states = moved(inputs, other), torch.full(shape, NAN, device=device)
    for number, tokens in enumerate(_steps(run.case)):
        requests.drafting = number > 0
        requests.call(again, states, tokens)
    if not torch.equal(buffer, memory.buffer):
        raise CaseFailedError(f"{int((buffer != memory.buffer).sum())} bytes depend on how requests are cut into calls")
    return []
