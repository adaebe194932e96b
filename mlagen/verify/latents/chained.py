"""Requests cut into calls that make latents, rows and keys of the indexer, against one call of all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mlagen.layout import CacheLayout
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.family import Run
from mlagen.verify.call.memory import NAN
from mlagen.verify.call.results import Figure
from mlagen.verify.latents.cases import PoolCase
from mlagen.verify.latents.groups import EPS, PoolInputs
from mlagen.verify.latents.side import INSERT, KEYS, POOL
from mlagen.verify.paged.pages import TENSOR_SCALE

DRAFTS = 3  # tokens of a step; the first one is kept
SIZE = 16  # rows of a page
WRONG = 3.0  # added to kv and scores of a draft

Step = list[tuple[int, int, int]]  # request, first position and tokens of each request in a call


def _steps(case: PoolCase) -> Iterator[Step]:
    """Calls; with drafts, a later call replaces all but a call's first token."""
    longest = max(length for _, length in case.chunks)
    sizes = {"chunks": (5, 1, 9, 2), "single": (1,), "drafts": (7, 1)}[case.steps]
    first, number = 0, 0
    while first < longest:
        size = sizes[min(number, 1)] if case.steps == "drafts" else sizes[number % len(sizes)]
        taken = DRAFTS if case.steps == "drafts" and number else size
        each = [(request, first, min(taken, length - first)) for request, (_, length) in enumerate(case.chunks)]
        yield [one for one in each if one[2] > 0]
        first, number = first + size, number + 1


class _Requests:
    """Requests with the kv and scores of their tokens, and caches for latents, rows and keys."""

    def __init__(self, run: Run[PoolCase, PoolInputs]) -> None:
        self.run, self.case, self.side = run, run.case, run.inputs.side
        self.device = run.inputs.arguments["kv_score"].device
        generator = torch.Generator().manual_seed(7)
        shape = (len(self.case.chunks), max(length for _, length in self.case.chunks), 2 * self.side.columns)
        self.values = torch.randn(shape, generator=generator)
        self.rows = -(-shape[1] // self.case.ratio)
        angle = 2 * torch.pi * torch.rand(shape[1], self.side.rope // 2, generator=generator)
        self.angles = torch.cat([angle.cos(), angle.sin()], 1).to(self.device)
        self.weight = run.inputs.arguments["rms_norm_weight"]
        self.latents = torch.full((*shape[:2], self.side.columns), NAN, dtype=self.side.dtype, device=self.device)
        self.states = torch.full((shape[0], self.case.capacity, shape[2]), NAN, device=self.device)
        self.cache = self._cache(self.side.layout)
        self.keys = self._cache(self.side.keys) if self.side.keys is not None else None

    def _cache(self, layout: CacheLayout) -> torch.Tensor:
        """Pages of zeros [pages, SIZE, row], in elements of the cache tensor."""
        pages = -(-len(self.values) * self.rows // SIZE)
        memory = torch.zeros(pages, layout.page_bytes(SIZE), dtype=torch.uint8, device=self.device)
        memory = memory if layout.quantised else memory.view(self.side.dtype)
        row = layout.row_bytes // (1 if layout.quantised else self.side.dtype.itemsize)
        return memory.as_strided((pages, SIZE, row), (memory.shape[1], row, 1))

    def call(self, step: Step, *, drafting: bool) -> None:
        """Makes latents of tokens, drafts being wrong, their rows, and keys of a projection of them."""
        ratio, case, call = self.case.ratio, self.case, self.run.subject.call
        tokens = [(request, first + number, number) for request, first, count in step for number in range(count)]
        wrong = [WRONG if drafting and number else 0.0 for _, _, number in tokens]
        values = torch.stack([self.values[request, at] for request, at, _ in tokens]) + torch.tensor(wrong)[:, None]
        requests = [row for row, (_, _, count) in enumerate(step) for _ in range(count)]
        positions = torch.tensor([at for _, at, _ in tokens], device=self.device)
        slots = [request * self.rows + at // ratio if (at + 1) % ratio == 0 else -1 for request, at, _ in tokens]
        rings = [request * case.capacity + at % case.capacity for request, at, _ in tokens]
        where = torch.tensor(slots, device=self.device)
        given: dict[str, Any] = {"state_cache": None, "query_start_loc": None, "token_to_req_indices": None}
        if ratio > 1:
            starts = torch.tensor([0, *(count for _, _, count in step)]).cumsum(0)
            given = {"state_cache": self.states, "query_start_loc": starts.int().to(self.device)}
            given["token_to_req_indices"] = torch.tensor(requests, dtype=torch.int32, device=self.device)
        made = torch.full((len(tokens), self.side.columns), NAN, dtype=self.side.dtype, device=self.device)
        call(
            POOL,
            kv_score=values[:, : self.side.columns * (2 if ratio > 1 else 1)].contiguous().to(self.device),
            positions=positions,
            slot_mapping=torch.tensor(rings, device=self.device) if ratio > 1 else where,
            rms_norm_weight=self.weight,
            rms_norm_eps=EPS,
            compress_ratio=ratio,
            latent_out=made,
            **given,
        )
        scale = torch.tensor([TENSOR_SCALE], device=self.device) if self.side.layout.tensor_scale else None
        call(INSERT, made, positions, self.angles, self.cache, where, ratio, scale)
        if self.side.keys is not None:  # the first columns of a latent stand for its projection
            columns, half = self.side.keys.columns, self.side.key_rope // 2
            turns = self.angles[:, :half], self.angles[:, self.side.rope // 2 :][:, :half]
            packed = self.side.keys.data[0].dtype == "e2m1"
            key, angles = made[:, :columns].nan_to_num().contiguous(), torch.cat(turns, 1).contiguous()
            call(KEYS, key, positions, angles, self.weight[:columns].contiguous(), EPS, self.keys, where, ratio, packed)
        for row, (request, at, _) in enumerate(tokens):
            self.latents[request, at] = made[row]


def chained(run: Run[PoolCase, PoolInputs]) -> list[Figure]:
    """Calls of chunks, of single tokens and of drafts leave the latents, rows and keys of one call."""
    whole, parts = _Requests(run), _Requests(run)
    whole.call([(request, 0, length) for request, (_, length) in enumerate(run.case.chunks)], drafting=False)
    for number, step in enumerate(_steps(run.case)):
        parts.call(step, drafting=run.case.steps == "drafts" and number > 0)
    if not bool(whole.cache.any()) or not bool((whole.latents == whole.latents).any()):
        raise CaseFailedError("one call of all tokens made nothing")
    for name in ("latents", "cache", "keys"):
        one, other = getattr(whole, name), getattr(parts, name)
        if one is not None and not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            raise CaseFailedError(f"{name} depend on how requests are cut into calls")
    return []
