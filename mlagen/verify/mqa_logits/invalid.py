"""Arguments that the wrappers of the indexer's logits must refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.mqa_logits.facts import FLAT, FLAT_PAIR, PAGED, PAGED_PAIR, SCHEDULE, LogitsFacts

NAME = "mqa_logits"
SHORT = {FLAT: "flat", FLAT_PAIR: "flat pair", PAGED: "paged", PAGED_PAIR: "paged pair", SCHEDULE: "schedule"}
ON_FLAT, ON_PAGED = (FLAT, FLAT_PAIR), (PAGED, PAGED_PAIR)


def _of(pair: int) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Turn a change of a tensor into a change of one of a pair."""

    def changing(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: (make(value[0]), value[1]) if pair == 0 else (value[0], make(value[1]))

    return changing


def _values(argument: str, wrappers: tuple[str, ...], pair: bool, first: bool) -> Iterator[Invalid]:
    """Invalid q and keys, by themselves or with their scales."""
    changing = _of(0) if pair else (lambda make: make)
    for one in invalid.tensor(argument, torch.float32, first=first, word="columns apart"):
        if one.how != "dtype float32":
            yield replace(one, make=changing(one.make), wrappers=wrappers)
    changes = {
        "dtype bfloat16": lambda tensor: tensor.new_zeros(tensor.shape, dtype=torch.bfloat16),
        "too wide": lambda tensor: tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 1), dtype=tensor.dtype),
    }
    for how, make in changes.items():
        yield Invalid(argument, how, changing(make), wrappers=wrappers)
    if argument == "q":
        yield Invalid(argument, "a head too many", changing(_head_more), wrappers=wrappers)


def _head_more(q: torch.Tensor) -> torch.Tensor:
    return q.new_zeros((*q.shape[:-2], q.shape[-2] + 1, q.shape[-1]), dtype=q.dtype)


def _pairs(facts: LogitsFacts) -> Iterator[Invalid]:
    for argument, wrappers in (("q", (FLAT_PAIR, PAGED_PAIR)), ("kv", ON_FLAT)):
        yield Invalid(argument, "a tensor, not a pair", lambda pair: pair[0], wrappers=wrappers)
        yield Invalid(argument, "three of them", lambda pair: (*pair, None), wrappers=wrappers)
    scales = _of(1)
    short = {"an entry short": lambda one: one[:-1], "dtype float64": lambda one: one.double()}
    for how, make in (short | {"missing": invalid.constant(None), "elsewhere": invalid.elsewhere}).items():
        yield Invalid("kv", f"scales {how}", scales(make), wrappers=ON_FLAT)
        if facts.packed:
            yield Invalid("q", f"scales {how}", scales(make), wrappers=(FLAT_PAIR, PAGED_PAIR))
    if not facts.packed:
        given = scales(invalid.constant(torch.ones(3)))
        yield Invalid("q", "with scales", given, wrappers=(FLAT_PAIR, PAGED_PAIR))


def _invalid_flat(facts: LogitsFacts) -> Iterator[Invalid]:
    yield from _values("q", (FLAT,), pair=False, first=True)
    yield from _values("q", (FLAT_PAIR,), pair=True, first=True)
    yield from _values("kv", ON_FLAT, pair=True, first=False)
    vectors = ("cu_seq_len_k_start", "cu_seq_len_k_end")
    for argument in vectors:
        for one in invalid.tensor(argument, torch.int64, word="entries apart"):
            yield replace(one, wrappers=ON_FLAT)
        yield Invalid(argument, "an entry short", lambda vector: vector[:-1], wrappers=ON_FLAT)
    for value in (-1, 2**31, 2.5, None, True):
        yield Invalid("max_seqlen_k", str(value), invalid.constant(value), wrappers=ON_FLAT)
    taken = invalid.constant(7)
    yield Invalid(
        "clean_logits", "True with max_seqlen_k", taken, "max_seqlen_k", changes="max_seqlen_k", wrappers=ON_FLAT
    )


def _invalid_paged(facts: LogitsFacts) -> Iterator[Invalid]:
    yield from _values("q", (PAGED,), pair=False, first=True)
    yield from _values("q", (PAGED_PAIR,), pair=True, first=True)
    for argument in ("context_lens", "block_table", "schedule_meta"):
        for one in invalid.tensor(argument, torch.int64, strided=argument != "context_lens", word="entries apart"):
            if argument != "context_lens" or one.how != "a dimension short":
                yield replace(one, wrappers=ON_PAGED)
    for argument in ("context_lens", "block_table"):
        yield Invalid(argument, "a request short", lambda tensor: tensor[:-1], wrappers=ON_PAGED)
    yield Invalid("context_lens", "of other tokens", lambda lens: lens[:, None].repeat(1, 5), wrappers=ON_PAGED)
    yield Invalid("schedule_meta", "a row", lambda schedule: schedule[:1], wrappers=ON_PAGED)
    yield Invalid("schedule_meta", "rows apart", lambda schedule: schedule.repeat(1, 2)[:, :2], wrappers=ON_PAGED)
    yield Invalid("schedule_meta", "three columns", lambda schedule: schedule.repeat(1, 2)[:, :3], wrappers=ON_PAGED)
    row = facts.layout.row_bytes
    for how, make in {
        "dtype int32": lambda cache: cache.int(),
        "not a tensor": invalid.constant([1]),
        "another device": invalid.elsewhere,
        "rows of another layout": lambda cache: cache.new_zeros((*cache.shape[:-1], row + 4)),
        "two heads": lambda cache: cache.repeat(1, 1, 2, 1),
        "keys apart": lambda cache: cache.new_zeros((*cache.shape[:-1], row + 16))[..., :row],
        "pages that overlap": lambda cache: cache[:1].expand(2, -1, -1, -1),
        "no keys a page": lambda cache: cache[:, :0],
    }.items():
        yield Invalid("kv_cache", how, make, wrappers=ON_PAGED)
    if max(field.itemsize for field in facts.layout.fields) > 1:
        yield Invalid("kv_cache", "begins at an odd byte", _late, wrappers=ON_PAGED)
    for value in (-1, 2**31, 2.5, None, True):
        yield Invalid("max_context_len", str(value), invalid.constant(value), wrappers=ON_PAGED)


def _late(cache: torch.Tensor) -> torch.Tensor:
    """The same pages a byte later."""
    return cache.new_zeros(cache.numel() + 1)[1:].view(cache.shape)


def _invalid_schedule() -> Iterator[Invalid]:
    for one in invalid.kind("context_lens", torch.int64):
        yield replace(one, wrappers=(SCHEDULE,))
    yield Invalid("context_lens", "three dimensions", lambda lens: lens[:, None, None], wrappers=(SCHEDULE,))
    for argument, most in (("block_kv", 2**31), ("num_sms", 2**17)):
        for value in (0, -1, most, 2.5, None, True):
            yield Invalid(argument, str(value), invalid.constant(value), wrappers=(SCHEDULE,))
    yield Invalid("indices", "given", invalid.zeros(3, dtype=torch.int32), like="context_lens", wrappers=(SCHEDULE,))


def _invalid(facts: LogitsFacts) -> Iterator[Invalid]:
    yield from _invalid_flat(facts)
    yield from _invalid_paged(facts)
    yield from _invalid_schedule()
    yield from _pairs(facts)
    logits = (*ON_FLAT, *ON_PAGED)
    for one in invalid.tensor("weights", torch.bfloat16, word="heads apart"):
        yield replace(one, wrappers=logits)
    yield Invalid("weights", "a head too many", invalid.wider(1), wrappers=logits)
    yield Invalid("weights", "a token too many", invalid.longer, wrappers=logits)
    for value in (0, 1.0, None):
        yield Invalid("clean_logits", repr(value), invalid.constant(value), wrappers=logits)
    for dtype in (torch.float16, torch.float64, None, "bf16"):
        yield Invalid("logits_dtype", str(dtype), invalid.constant(dtype), wrappers=(FLAT_PAIR, PAGED_PAIR))
    yield Invalid("indices", "given", invalid.zeros(3, dtype=torch.int32), like="weights", wrappers=(PAGED_PAIR,))


def refused(facts: LogitsFacts) -> Iterator[RefusedCase]:
    """A case for each invalid argument of the wrappers that are there."""
    return invalid.refused_cases(
        NAME, {wrapper: SHORT[wrapper] for wrapper in SHORT if wrapper in facts.wrappers}, _invalid(facts)
    )
