"""Patterns of index lists, of their lengths and of attention sinks, the same for the same generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

INT32 = torch.iinfo(torch.int32)
INT64 = torch.iinfo(torch.int64)
SHARES = (0, 50, 75, 90, 100)  # per cent of a token's indices that the next one names too


@dataclass(frozen=True)
class IndexLists:
    """A list of indices a token.

    Attributes:
        tokens, topk: sizes.
        rows: rows that there are to name.
        pattern: a key of INDEX_PATTERNS.
    """

    tokens: int
    topk: int
    rows: int
    pattern: str


def _randint(low: int, high: int, size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, size, generator=generator, dtype=torch.int64)


# Patterns of indices: i64 [tokens, topk] from the sizes, the rows that hold numbers, and a generator.
IndexPattern = Callable[[IndexLists, torch.Tensor, torch.Generator], torch.Tensor]


def _full(lists: IndexLists, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return named[_randint(0, len(named), (lists.tokens, lists.topk), generator)]


def _random(lists: IndexLists, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """An eighth of the indices is absent, in no order."""
    indices = _full(lists, named, generator)
    indices[torch.rand(indices.shape, generator=generator) < 0.125] = -1
    return indices


def _none(lists: IndexLists, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.full((lists.tokens, lists.topk), -1)


def _some_rows_none(lists: IndexLists, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    indices = _random(lists, named, generator)
    indices[::2] = -1
    return indices


def _int32_range(lists: IndexLists, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    rows = lists.rows
    odd = torch.tensor([INT32.min, INT32.max, rows, rows + 1, -2, -rows - 1, INT32.min + 1, INT32.max - 1])
    anything = _randint(INT32.min, INT32.max + 1, (lists.tokens, lists.topk), generator)
    outside = (anything < 0) | (anything >= rows)
    indices = torch.where(outside, anything, -1)
    picked = odd[_randint(0, len(odd), indices.shape, generator)]
    kind = torch.rand(indices.shape, generator=generator)
    indices = torch.where(kind < 0.4, picked, indices)
    return torch.where(kind > 0.7, _full(lists, named, generator), indices) if rows else indices


def _last_column(lists: IndexLists, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    indices = _none(lists, named, generator)
    indices[:, -1] = _full(lists, named, generator)[:, -1]
    return indices


def _first_column(lists: IndexLists, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return _last_column(lists, named, generator).flip(1)


def _late(lists: IndexLists, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Nothing in the first two thirds, and a gap in the rest."""
    indices = _full(lists, named, generator)
    indices[:, : 2 * lists.topk // 3] = -1
    indices[:, -lists.topk // 6 : -1] = -1
    return indices


def _duplicates(lists: IndexLists, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Three rows in uneven numbers."""
    picked = _randint(0, 12, (lists.tokens, lists.topk), generator).clamp(max=2)
    return named[:3][picked]


def _last_row(lists: IndexLists, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The last row, the one past it, and others."""
    indices = _full(lists, named, generator)
    indices[:, ::3] = lists.rows - 1
    indices[:, 1::3] = lists.rows
    return indices


def _row_zero(lists: IndexLists, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    indices = _random(lists, named, generator)
    indices[:, ::2] = 0
    return indices


def _neighbours(share: int) -> IndexPattern:
    """Distinct rows in no order; a token names `share` per cent of those of the one before, and others."""

    def pattern(lists: IndexLists, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        count = min(lists.topk, len(named) // 2)
        indices = torch.full((lists.tokens, lists.topk), -1)
        current = named[torch.randperm(len(named), generator=generator)[:count]]
        for token in range(lists.tokens):
            current = current[torch.randperm(count, generator=generator)]
            indices[token, :count] = current
            others = named[~torch.isin(named, current)]
            others = others[torch.randperm(len(others), generator=generator)]
            kept = count * share // 100
            current = torch.cat([current[:kept], others[: count - kept]])
        return indices

    return pattern


def _neighbours_repeat(lists: IndexLists, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Some tokens name a row twice or thrice; the neighbours of others name each row once."""
    indices = _neighbours(75)(lists, named, generator)
    indices[1::8, 5] = indices[1::8, 9]
    indices[2::8, 3::50] = indices[2::8, 7:8]
    return indices


INDEX_PATTERNS: dict[str, IndexPattern] = {
    "full": _full,
    "random": _random,
    "none": _none,
    "some rows none": _some_rows_none,
    "int32 range": _int32_range,
    "last column": _last_column,
    "first column": _first_column,
    "late": _late,
    "duplicates": _duplicates,
    "last row": _last_row,
    "row zero": _row_zero,
    "far": _random,
    **{f"neighbours, {share} % shared": _neighbours(share) for share in SHARES},
    "neighbours, repeats": _neighbours_repeat,
}


# Promises of the patterns for every family with index lists.
INDEX_PROMISES = {
    "none": "lists whose indices are all -1 name nothing",
    "some rows none": "rows without a valid index stand between ordinary ones",
    "int32 range": "any int32 outside the rows is skipped, INT32_MIN and INT32_MAX among them",
    "last column": "the one valid index stands in the last column",
    "first column": "the one valid index stands in the first column",
    "late": "leading tiles without a valid index leave later ones as they are",
    "duplicates": "an index that occurs n times counts n times",
    "last row": "the last row is reached, the one past it is not",
    "row zero": "row 0 is read where an index names it",
}
LENGTH_PROMISES = {
    "zero": "a length of 0 is an empty list",
    "too long": "a length past the indices means all",
    "negative": "a negative length is an empty list",
    "mixed": "lengths 0, 1, all, past all and negative",
}
SINK_PROMISES = {
    "random": "the sink scales out and leaves lse alone",
    "+inf": "a sink of +inf leaves out 0 and lse as it is",
    "-inf": "a sink of -inf changes nothing",
    "extreme": "a sink far above or below the logits neither overflows nor loses the row",
}


def lengths(pattern: str, tokens: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """topk_length i32 [tokens] of a pattern."""
    if pattern == "random":
        return _randint(0, topk + 1, (tokens,), generator).int()
    cycle = {
        "full": [topk],
        "zero": [0],
        "too long": [topk + 1, INT32.max],
        "negative": [-1, INT32.min],
        "mixed": [topk // 2 + 1, 0, topk, 1, topk + 9, -3, topk - 1],
    }[pattern]
    return torch.tensor((cycle * tokens)[:tokens], dtype=torch.int32)


def sinks(pattern: str, heads: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """attn_sink f32 [heads] of a pattern; an ordinary one is about as large as a row's LSE, so that it counts."""
    normal = torch.randn(heads, generator=generator) + math.log(topk)
    inf = math.inf
    cycle = {
        "random": [],
        "+inf": [inf],
        "-inf": [-inf],
        "extreme": [1e4, -1e4, 3e38, -3e38, 88.0, -104.0],
        "mixed": [inf, -inf, 1e4, -1e4, 0.0],
    }[pattern]
    # Mixed: every other head is an ordinary one.
    for head, value in enumerate((cycle * heads)[:heads]):
        if pattern != "mixed" or head % 2 == 0:
            normal[head] = cycle[head // 2 % len(cycle)] if pattern == "mixed" else value
    return normal


def named_rows(lists: IndexLists, generator: torch.Generator) -> torch.Tensor:
    """Rows that indices may name; the others stay poisoned, row 0 among them unless the pattern is about it."""
    rows = lists.rows
    if lists.pattern == "far":
        far = rows - 1 - torch.randperm(1000, generator=generator)[:40]
        return torch.cat([far, torch.randperm(1000, generator=generator)[:10] + 1])
    named = torch.randperm(rows, generator=generator)
    named = named[(named != 0) & (named != rows - 1)][: max(1, 2 * rows // 3)]
    if lists.pattern == "last row":
        named = torch.cat([named, torch.tensor([rows - 1])])
    if lists.pattern == "row zero":
        named = torch.cat([torch.tensor([0]), named])
    return named


def poison_index(pattern: str) -> int:
    """The name in an entry that does not count: row 0, with poisoned values, or none where that row has numbers."""
    return -1 if pattern == "row zero" else 0


def draw_indices(
    lists: IndexLists, named: torch.Tensor, length: str | None, shape: tuple[int, int], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Indices i64 [tokens, topk] of tokens by request and position, and lengths i32 [requests] of a pattern.

    Past its length a list names poison.
    """
    indices = INDEX_PATTERNS[lists.pattern](lists, named, generator)
    if length is None:
        return indices, None
    counts = lengths(length, shape[0], lists.topk, generator)
    beyond = torch.arange(lists.topk)[None, :] >= counts.repeat_interleave(shape[1])[:, None]
    indices[beyond] = poison_index(lists.pattern)
    return indices, counts
