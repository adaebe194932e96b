"""Keys of pools, logits over them, their top-k and its tokens one after the other, against plain torch."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.layout import CacheLayout
from mlagen.layout.codec import decode, encode
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.family import Run
from mlagen.verify.call.results import Figure
from mlagen.verify.kpool.cases import SelectCase
from mlagen.verify.kpool.inputs import KpoolInputs
from mlagen.verify.kpool.reference import expanded, pooled, transformed
from mlagen.verify.kpool.side import (
    COLUMNS,
    COMPRESS,
    DECODE,
    EXPAND,
    FLAT_PAIR,
    GATHER,
    PAGED_PAIR,
    PREFILL,
    QUERY,
    SCHEDULE,
    KpoolSide,
)

SIZE = 64  # keys of a page
RANGES = 4  # of a schedule
SHARE = 0.02  # of the largest logit: how far a pick may be below the best, since some codes are rounded otherwise


class _Step:
    """The last token of each request: its query, and the keys of the pools that it sees."""

    def __init__(self, run: Run[SelectCase, KpoolInputs], side: KpoolSide) -> None:
        self.case, self.side, self.call, self.device = run.case, side, run.subject.call, run.subject.device
        spec = run.subject.package.SPEC["spec"]
        self.heads = spec["indexer"]["num_heads"]
        generator = torch.Generator().manual_seed(7)
        lengths, size = self.case.lengths, self.case.pool
        self.pools = torch.tensor([length // size for length in lengths], dtype=torch.int32)
        needed = [-(-int(count) // SIZE) for count in self.pools]
        self.table = torch.full((len(lengths), max(needed)), -1, dtype=torch.int32)
        shuffled, first = torch.randperm(sum(needed), generator=generator).int(), 0
        for request, count in enumerate(needed):
            self.table[request, :count] = shuffled[first : first + count]
            first += count
        memory = torch.full((sum(needed), side.layout.page_bytes(SIZE)), 0xFF, dtype=torch.uint8, device=self.device)
        row = side.layout.row_bytes
        self.cache = memory.as_strided((len(memory), SIZE, row), (memory.shape[1], row, 1))
        ape = torch.randn(size, COLUMNS, generator=generator)
        self.keys: list[torch.Tensor] = []
        for request, count in enumerate(self.pools.tolist()):
            k, score = (torch.randn(count, size, COLUMNS, generator=generator).to(side.dtype) for _ in range(2))
            at = torch.arange(count)
            loc = self.table[request, at // SIZE].long() * SIZE + at % SIZE
            rows = [each.to(self.device) for each in (k, score, ape, loc)]
            self.call(COMPRESS, self.cache, *rows, size, round_scale=side.rounds)
            want = torch.stack([pooled(k[pool], score[pool], ape, side.dtype).row for pool in range(count)])
            self.keys.append(_stored(side.layout, want))
        self.q = torch.randn(len(lengths) * self.heads, COLUMNS, generator=generator).to(side.dtype)
        self.weights = torch.randn(len(lengths), self.heads, generator=generator)

    def query(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The package's query e4m3 [requests, heads, 128], and head weights with its scales."""
        values, scales = self.call(QUERY, self.q.to(self.device))
        shape = (len(self.keys), self.heads)
        return values.view(*shape, COLUMNS), self.weights.to(self.device) * scales.view(shape)

    def check(self, picks: torch.Tensor) -> None:
        """Raises CaseFailedError unless picks [requests, k] are the best pools, and expand to their tokens."""
        queries = _stored(self.side.query, transformed(self.q, self.side.dtype)).view(-1, self.heads, COLUMNS)
        for request, keys in enumerate(self.keys):
            logits = (self.weights[request].double()[:, None] * (queries[request] @ keys.T).relu()).sum(0)
            here = picks[request][picks[request] >= 0].long().cpu()
            count = min(self.case.picked, len(keys))
            if len(here) != count or len(set(here.tolist())) != count or bool((here >= len(keys)).any()):
                raise CaseFailedError(f"request {request} picks {here.tolist()} of {len(keys)} pools")
            least = logits.topk(count).values[-1:].sum() - SHARE * logits.abs().amax() if count else logits.sum()
            if bool((logits[here] < least).any()):
                raise CaseFailedError(f"request {request} picks pools that score less than others")
        lens = torch.tensor(self.case.lengths, dtype=torch.int32)
        tokens = self.call(EXPAND, picks, lens.to(self.device), self.case.pool)
        if not torch.equal(tokens.cpu(), expanded(picks.cpu(), lens, self.case.pool)):
            raise CaseFailedError("tokens are not those of the picked pools")


def _stored(layout: CacheLayout, rows: torch.Tensor) -> torch.Tensor:
    """Rows float64 as a layout stores them."""
    return decode(layout, encode(layout, rows)).double()


def selected(run: Run[SelectCase, KpoolInputs]) -> list[Figure]:
    """Pools that are picked over pages, and over gathered keys, are the best ones, and become their tokens."""
    assert run.inputs.side is not None
    step = _Step(run, run.inputs.side)
    device, pools, requests = step.device, step.pools.to(step.device), len(step.keys)
    q, weights = step.query()
    table = step.table.to(device)
    picks = torch.full((requests, run.case.picked), 7, dtype=torch.int32, device=device)
    schedule = step.call(SCHEDULE, pools, SIZE, RANGES)
    pages: tuple[Any, ...] = (step.cache[:, :, None], weights, pools, table, schedule, int(pools.max()))
    logits = step.call(PAGED_PAIR, (q[:, None], None), *pages, clean_logits=False)
    step.call(DECODE, logits, 1, pools, picks, requests, *logits.stride(), run.case.picked)
    step.check(picks)
    bounds = torch.cat([torch.zeros(1), step.pools.cumsum(0)]).int().to(device)
    total = int(step.pools.sum())
    keys = torch.zeros(total, COLUMNS, dtype=step.side.values_dtype, device=device)
    scales = torch.zeros(total, dtype=torch.float32, device=device)
    step.call(GATHER, step.cache, keys.view(torch.uint8), scales, table, bounds)
    ranges = bounds[:-1].contiguous(), bounds[1:].contiguous()
    logits = step.call(FLAT_PAIR, (q, None), (keys, scales), weights, *ranges, clean_logits=False)
    step.call(PREFILL, logits, *ranges, picks, requests, *logits.stride(), run.case.picked)
    step.check(picks)
    return []
