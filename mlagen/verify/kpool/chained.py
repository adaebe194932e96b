"""Requests cut into calls that compress, seed and update, against one call with all pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.family import Run
from mlagen.verify.call.results import Figure
from mlagen.verify.kpool.cases import UpdateCase
from mlagen.verify.kpool.inputs import KpoolInputs
from mlagen.verify.kpool.reference import pooled
from mlagen.verify.kpool.side import COLUMNS, COMPRESS, SEED, UPDATE

DRAFTS = 3  # tokens of a step, of which the first is kept; also those of a step that are all kept
WRONG = 3.0  # added to a draft's key and score


class _Requests:
    """Requests with the keys and scores of their tokens; each has slots and a ring of its own."""

    def __init__(self, run: Run[UpdateCase, KpoolInputs]) -> None:
        side, memory = run.inputs.side, run.inputs.memory
        assert side is not None
        assert memory is not None
        self.run, self.case, self.side, self.memory = run, run.case, side, memory
        self.device, dtype = memory.buffer.device, side.dtype
        generator = torch.Generator().manual_seed(7)
        shape = (len(run.case.lengths), max(run.case.lengths), COLUMNS)
        self.keys = torch.randn(shape, generator=generator).to(dtype)
        self.scores = torch.randn(shape, generator=generator).to(dtype)
        self.ape = torch.randn(run.case.pool, COLUMNS, generator=generator)
        self.ring = run.case.pool * run.case.rings
        self.tail = torch.full((shape[0] + 1, 2, self.ring, COLUMNS), float("nan"), dtype=dtype, device=self.device)
        self.cache: dict[str, Any] = {
            "kv_cache": memory.tensor,
            "ape": self.ape.to(self.device),
            "round_scale": side.rounds,
        }

    def slot(self, request: int, position: int) -> int:
        """The slot of the pool that a token completes, else -1."""
        complete, remainder = divmod(position + 1, self.case.pool)
        return -1 if remainder else request + len(self.case.lengths) * (complete - 1)

    def prefill(self, request: int, first: int, end: int, *, seed: bool) -> None:
        """Compresses a chunk that begins with a pool, and seeds the ring with its last tokens."""
        size = self.case.pool
        whole = range(first, end - size + 1, size)
        if whole:
            k = torch.stack([self.keys[request, begin : begin + size] for begin in whole])
            scores = torch.stack([self.scores[request, begin : begin + size] for begin in whole])
            loc = torch.tensor([self.slot(request, begin + size - 1) for begin in whole], device=self.device)
            self.run.subject.call(
                COMPRESS,
                slot_k=k.to(self.device),
                slot_score=scores.to(self.device),
                loc=loc,
                pool_size=size,
                **self.cache,
            )
        if seed and end > first:
            tslot = torch.tensor([self.tail_slot(request, at) for at in range(first, end)], device=self.device)
            rows = [each[request, first:end].to(self.device) for each in (self.keys, self.scores)]
            self.run.subject.call(SEED, self.tail, *rows, tslot, size)

    def tail_slot(self, request: int, position: int) -> int:
        """The place of a token in its ring."""
        return (len(self.case.lengths) - request) * self.ring + position % self.ring

    def update(self, firsts: list[int], count: int, *, drafts: bool) -> None:
        """A step of `count` tokens of each request from its first on, the later ones wrong with `drafts`."""
        rows: dict[str, list[Any]] = {"tail": [], "slots": [], "positions": [], "key": [], "score": []}
        for request, first in enumerate(firsts):
            ats = [at if at < self.case.lengths[request] else -1 for at in range(first, first + count)]
            rows["positions"].append(ats)
            rows["tail"].append([-1 if at < 0 else self.tail_slot(request, at) for at in ats])
            rows["slots"].append([-1 if at < 0 else self.slot(request, at) for at in ats])
            wrong = torch.arange(count)[:, None].clamp(max=1) * (WRONG if drafts else 0.0)
            for name, values in (("key", self.keys), ("score", self.scores)):
                rows[name].append((values[request, ats] + wrong).to(self.side.dtype))
        integers = {name: torch.tensor(rows[name], device=self.device) for name in ("tail", "slots", "positions")}
        self.run.subject.call(
            UPDATE,
            tail_kv_cache=self.tail,
            tail_slot_mapping=integers["tail"],
            key=torch.stack(rows["key"]).to(self.device),
            slot_score=torch.stack(rows["score"]).to(self.device),
            slot_mapping=integers["slots"],
            positions=integers["positions"].int(),
            pool_size=self.case.pool,
            **self.cache,
        )

    def steps(self) -> Iterator[list[int]]:
        """Makes the calls of the case's steps; yields the first tokens of each step of decode."""
        case, size, lengths = self.case, self.case.pool, self.case.lengths
        prefilled = {"chunks": 5, "single": 0, "accepted": 1, "drafts": 2}[case.steps]
        for request, length in enumerate(lengths):
            if case.steps == "chunks":
                for first, end in ((0, size), (size, 3 * size), (3 * size, length)):
                    self.prefill(request, first, min(end, length - prefilled), seed=True)
            elif prefilled:
                self.prefill(request, 0, prefilled * size + 1, seed=True)
        start = {"chunks": 0, "single": 0, "accepted": size + 1, "drafts": 2 * size + 1}[case.steps]
        firsts = [length - prefilled if case.steps == "chunks" else start for length in lengths]
        while any(first < length for first, length in zip(firsts, lengths, strict=True)):
            yield firsts
            firsts = [first + (DRAFTS if case.steps == "accepted" else 1) for first in firsts]


def chained(run: Run[UpdateCase, KpoolInputs]) -> list[Figure]:
    """Calls of chunks, of single tokens, of several and of drafts leave the bytes of one call, the reference's keys."""
    inputs, requests = run.inputs, _Requests(run)
    memory, size = requests.memory, run.case.pool
    for request, length in enumerate(run.case.lengths):
        requests.prefill(request, 0, length, seed=False)
    inputs.check_keys(
        {
            requests.slot(request, begin + size - 1): pooled(
                requests.keys[request, begin : begin + size],
                requests.scores[request, begin : begin + size],
                requests.ape,
                requests.side.dtype,
            )
            for request, length in enumerate(run.case.lengths)
            for begin in range(0, length - size + 1, size)
        }
    )
    want = memory.buffer.clone()
    inputs.reset()
    for firsts in requests.steps():
        count = DRAFTS if run.case.steps in ("accepted", "drafts") else 1
        requests.update(firsts, count, drafts=run.case.steps == "drafts")
    if not torch.equal(want, memory.buffer):
        wrong = int((want != memory.buffer).sum())
        raise CaseFailedError(f"{wrong} bytes depend on how requests are cut into calls")
    return []
