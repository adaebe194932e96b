"""The tensors of a call of the indexer's logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mlagen.layout.codec import planes_of
from mlagen.verify.call import family
from mlagen.verify.call.memory import GARBAGE, LAYOUTS, NAN, Placed, empty_pages, place, place_vector, seeded, unplaced
from mlagen.verify.call.patterns import INT32
from mlagen.verify.mqa_logits.cases import FlatCase, PagedCase, ScheduleCase
from mlagen.verify.mqa_logits.facts import DTYPES, FLAT_PAIR, PAGED, LogitsFacts, Rows, poison_byte
from mlagen.verify.mqa_logits.reference import Logits, mqa_logits

MOST_KEYS = 2**31 - 2**12  # that a request has
NAN_KEY, NAN_SCALE, NAN_TOKEN = 3, 5, 1


@dataclass
class Inputs(family.Inputs):
    """The tensors of one call.

    Attributes:
        facts: of the package.
        arguments: by name, in the order of the signature.
        q, weights: as the reference takes them, f64, where they were drawn.
        k, k_scale: keys of all requests, likewise.
        first: key at which a token's request begins, a list of tokens.
    """

    facts: LogitsFacts
    arguments: dict[str, Any]
    q: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    k: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    first: tuple[int, ...] = ()

    @cached_property
    def expected(self) -> Logits:
        """Logits of every token over every key."""
        assert self.q is not None
        assert self.weights is not None
        assert self.k is not None
        assert self.k_scale is not None
        return mqa_logits(self.q, self.k, self.k_scale, self.weights)


def bounds(case: FlatCase, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """First keys of tokens' ranges and their ends, i64 [tokens] each."""
    tokens, keys = case.tokens, case.keys
    at = torch.arange(tokens)
    start, end = torch.zeros(tokens, dtype=torch.int64), (keys - tokens + 1 + at).clamp(min=0)
    match case.ranges:
        case "context parallel":
            half = (tokens + 1) // 2
            order = torch.stack([at[:half], tokens - 1 - at[:half]], 1).flatten()[:tokens]
            start, end = order * 3, (keys // 2 + order * 5).clamp(max=keys)
        case "whole":
            end = torch.full_like(end, keys)
        case "empty":
            start = end = torch.full_like(end, keys // 2)
        case "some empty":
            end = torch.where(at % 3 == 0, start, end)
            start = torch.where(at % 3 == 1, end + 7, start)
        case "odd":
            one, other = torch.randint(0, keys + 1, (2, tokens), generator=generator)
            start, end = torch.minimum(one, other), torch.maximum(one, other)
        case "beyond":
            start = torch.where(at % 2 == 0, torch.where(at % 4 == 0, INT32.min, -1 - at), start)
            end = torch.where(at % 3 == 0, torch.where(at % 2 == 0, INT32.max, keys + at), end)
        case "one":
            start = (at * 37) % max(keys, 1)
            end = start + 1
        case "far apart":
            start = torch.where(at % 2 == 0, 1, keys - 2).clamp(min=0)
            end = start + 1
    return start, end


def _query(facts: LogitsFacts, shape: tuple[int, ...], case: FlatCase | PagedCase, generator: torch.Generator) -> Rows:
    count = torch.Size((*shape, facts.heads)).numel()
    return Rows.random(facts, count, case.contents, generator)


def _placed_query(
    facts: LogitsFacts, rows: Rows, tokens: int, case: FlatCase | PagedCase, device: str
) -> dict[str, Placed]:
    """q and its scales, of tokens, in memory."""
    values = rows.values.view(tokens, facts.heads, facts.keys.nbytes).to(device)
    placed = {"q": place(values, LAYOUTS[case.q], poison_byte(facts))}
    if facts.packed:
        scales = rows.scales.view(tokens, facts.heads, facts.scales.nbytes).to(device)
        placed["q_scale"] = unplaced(scales) if case.words else place(scales, LAYOUTS[case.q], 0xFF)
    return placed


def _typed(facts: LogitsFacts, values: torch.Tensor) -> torch.Tensor:
    """Stored columns as callers hold them."""
    return values.view(torch.int8) if facts.packed else values.view(DTYPES[facts.keys.dtype])


def _scales(facts: LogitsFacts, scales: torch.Tensor, words: bool) -> torch.Tensor:
    """Stored scales as callers hold them."""
    if not facts.packed:
        return scales.view(torch.float32)[..., 0]
    return scales.view(torch.int32)[..., 0] if words else scales


def _weights(shape: tuple[int, int], case: FlatCase | PagedCase, generator: torch.Generator) -> torch.Tensor:
    weights = torch.randn(shape, generator=generator) * 0.1
    if case.contents == "whole":
        weights = torch.randint(-2, 4, shape, generator=generator).float()
    if case.nan and shape[0] > NAN_TOKEN:
        weights[NAN_TOKEN, -1] = NAN
    return weights


def _spoil(facts: LogitsFacts, rows: Rows, first: int) -> None:
    """Puts NaN into two keys, where keys can be NaN."""
    if not facts.packed and len(rows.values) > first + NAN_SCALE:
        rows.values[first + NAN_KEY, -1] = 0x80 if facts.keys.dtype == "e4m3fnuz" else 0x7F
        rows.scales[first + NAN_SCALE] = 0xFF


def build_flat(case: FlatCase, facts: LogitsFacts, device: str, seed: int) -> Inputs:
    """The tensors of a case, the same for the same seed."""
    generator = seeded(seed)
    query = _query(facts, (case.tokens,), case, generator)
    keys = Rows.random(facts, case.keys, case.contents, generator)
    start, end = bounds(case, generator)
    if case.nan:
        _spoil(facts, keys, case.keys // 2)
    at = torch.arange(case.keys)[None, :]
    keys.poison(facts, ~((at >= start[:, None]) & (at < end[:, None])).any(0))
    weights = _weights((case.tokens, facts.heads), case, generator)
    placed = _placed_query(facts, query, case.tokens, case, device)
    words = case.words and facts.packed
    placed |= {
        "k": place(keys.values.to(device), LAYOUTS[case.k], poison_byte(facts)),
        "k_scale": unplaced(keys.scales.contiguous().to(device)),
        "weights": place(weights.to(device), LAYOUTS[case.weights], NAN),
        "start": place_vector(start.int().to(device), INT32.min),
        "end": place_vector(end.int().to(device), INT32.max),
    }
    q: Any = _typed(facts, placed["q"].view)
    if case.wrapper == FLAT_PAIR:
        q = (q, _scales(facts, placed["q_scale"].view, words) if facts.packed else None)
    arguments: dict[str, Any] = {
        "q": q,
        "kv": (_typed(facts, placed["k"].view), _scales(facts, placed["k_scale"].view, words)),
        "weights": placed["weights"].view,
        "cu_seq_len_k_start": placed["start"].view,
        "cu_seq_len_k_end": placed["end"].view,
    }
    if not case.clean or case.positional:
        arguments["clean_logits"] = case.clean
    if case.compressed or case.positional:
        arguments["max_seqlen_k"] = case.compressed
    if case.bf16:
        arguments["logits_dtype"] = torch.bfloat16
    found = query.decoded(facts)[0].view(case.tokens, facts.heads, facts.columns)
    k, k_scale = keys.decoded(facts)
    return Inputs(facts, arguments, found, weights.double(), k, k_scale, placed=placed)


def sees(case: PagedCase, context_lens: torch.Tensor) -> torch.Tensor:
    """Keys that each token sees, i64 [B * next_n]."""
    if context_lens.dim() == 2:
        return context_lens.long().flatten().clamp(min=0)
    behind = case.next_n - 1 - torch.arange(case.next_n, device=context_lens.device)
    return (context_lens.long()[:, None] - behind[None, :]).flatten().clamp(min=0)


def _lengths(lengths: tuple[int, ...], tokens: int) -> torch.Tensor:
    """Lengths i32 [B], or [B, tokens] with the longest at any token."""
    found = torch.tensor(lengths, dtype=torch.int32)
    if not tokens:
        return found
    less = (torch.arange(tokens)[None, :] * 3 + torch.arange(len(lengths))[:, None]) % (2 * tokens)
    return (found[:, None].long() - less).clamp(min=INT32.min).int()


def _pages(case: PagedCase, facts: LogitsFacts, device: str, generator: torch.Generator) -> tuple[Any, ...]:
    """(cache, block table, keys of all requests, key at which each request begins)."""
    size, keys = case.block_size, [max(length, 0) for length in case.lengths]
    needed = [-(-count // size) for count in keys]
    pages = sum(needed) + 2
    order = torch.randperm(pages, generator=generator)
    cache = empty_pages(facts.layout, (pages, size, 1), case.memory, torch.uint8, poison_byte(facts), device)
    table = torch.full((len(keys), max([0, *needed]) + 2), GARBAGE)
    rows = Rows.random(facts, sum(keys), case.contents, generator)
    views = planes_of(facts.layout, cache.view[:, :, 0], size)
    firsts, first, page = [], 0, 0
    for request, count in enumerate(keys):
        if case.nan:
            _spoil(facts, rows, first)
        table[request, : needed[request]] = order[page : page + needed[request]]
        at = torch.arange(count)
        where = (table[request, at // size].to(device), (at % size).to(device))
        for field, stored in ((facts.keys, rows.values), (facts.scales, rows.scales)):
            part = views[field.plane][..., field.offset : field.offset + field.nbytes]
            part[where] = stored[first : first + count].to(device)
        firsts.append(first)
        first, page = first + count, page + needed[request]
    if case.blocks == "outside":
        table[:, 0] = torch.tensor([-1, pages, INT32.min, INT32.max, pages + 1])[torch.arange(len(keys)) % 5]
    return Placed(cache.view, cache.buffer, None if case.memory == "far" else cache.buffer.clone()), table, rows, firsts


def build_paged(case: PagedCase, facts: LogitsFacts, device: str, seed: int) -> Inputs:
    """The tensors of a case, the same for the same seed."""
    generator = seeded(seed)
    requests, tokens = len(case.lengths), len(case.lengths) * case.next_n
    query = _query(facts, (requests, case.next_n), case, generator)
    weights = _weights((tokens, facts.heads), case, generator)
    cache, table, keys, firsts = _pages(case, facts, device, generator)
    context_lens = _lengths(case.context_lens or case.lengths, case.next_n if case.tokenwise else 0)
    placed = _placed_query(facts, query, tokens, case, device)
    placed |= {
        "cache": cache,
        "weights": place(weights.to(device), LAYOUTS[case.weights], NAN),
        "block_table": place(table.int().to(device), LAYOUTS[case.table], 0),
    }
    lens = context_lens.to(device)
    if case.tokenwise:
        placed["context_lens"] = place(lens, LAYOUTS["slice"], INT32.max)
    else:
        placed["context_lens"] = place_vector(lens, INT32.max)
    words = case.words and facts.packed

    def by_request(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(
            (requests, case.next_n, *tensor.shape[1:]),
            (case.next_n * tensor.stride(0), *tensor.stride()),
            tensor.storage_offset(),
        )

    values = by_request(_typed(facts, placed["q"].view))
    scales = by_request(_scales(facts, placed["q_scale"].view, words)) if facts.packed else None
    arguments: dict[str, Any] = {
        "q": values if case.wrapper == PAGED else (values, scales),
        "kv_cache": cache.view[:, :, 0] if case.three else cache.view,
        "weights": placed["weights"].view,
        "context_lens": placed["context_lens"].view,
        "block_table": placed["block_table"].view,
        "schedule_meta": None,
        "max_context_len": max(0, *case.lengths, 1) + case.columns,
    }
    if case.clean or case.positional:
        arguments["clean_logits"] = case.clean
    if case.bf16:
        arguments["logits_dtype"] = torch.bfloat16
    found = query.decoded(facts)[0].view(tokens, facts.heads, facts.columns)
    k, k_scale = keys.decoded(facts)
    first = tuple(one for one in firsts for _ in range(case.next_n))
    return Inputs(facts, arguments, found, weights.double(), k, k_scale, first, placed=placed)


def build_schedule(case: ScheduleCase, facts: LogitsFacts, device: str) -> Inputs:
    """The tensors of a case."""
    lens = _lengths(case.lengths, case.next_n).to(device)
    placed = place(lens, LAYOUTS[case.table], INT32.max) if case.next_n else place_vector(lens, INT32.max)
    arguments = {"context_lens": placed.view, "block_kv": 64, "num_sms": case.ranges}
    return Inputs(facts, arguments, placed={"context_lens": placed})


def schedule(context_lens: torch.Tensor, ranges: int, block: int, *, first_longer: bool = False) -> torch.Tensor:
    """The schedule of lengths, i32 [ranges + 1, 2], a range at a time: as DeepGEMM's sm90_paged_mqa_logits_metadata.

    Each range has the same number of blocks, and where some are left over, the last ones have one more (or the first
    ones). A range begins in the first request that has more blocks than those before the range, and the last one ends
    behind all requests.
    """
    longest = context_lens.amax(1) if context_lens.dim() == 2 and len(context_lens) else context_lens.flatten()
    kv_blocks = [-(-min(max(length, 0), MOST_KEYS) // block) for length in longest.tolist()]
    each, more = divmod(sum(kv_blocks), ranges)
    rows = []
    for number in range(ranges + 1):
        longer = min(number, more) if first_longer else max(number - (ranges - more), 0)
        request, left = 0, number * each + longer
        while request < len(kv_blocks) and left >= kv_blocks[request]:
            left -= kv_blocks[request]
            request += 1
        rows.append((request, left))
    return torch.tensor(rows, dtype=torch.int32)
