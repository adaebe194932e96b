"""Arguments that wrappers which score and select must refuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.mqa_logits.facts import FLAT_PAIR, PAGED_PAIR, LogitsFacts
from mlagen.verify.mqa_logits.invalid import refused as refused_logits

NAME = "indexer_select"
FLAT, PAGED = "indexer_topk", "paged_indexer_topk"
BLOCKS = "select_candidate_blocks"  # in packages with calls that also keep blocks
SHORT = {FLAT: "flat picks", PAGED: "paged picks"}
SCORED = {FLAT: FLAT_PAIR, PAGED: PAGED_PAIR}
OF_LOGITS_ALONE = {"clean_logits", "max_seqlen_k", "logits_dtype", "indices"}
MOST_K = 4096


def _results() -> Iterator[Invalid]:
    for argument, dtype in {"out": torch.int64, "scores": torch.float64, "slots": torch.int64}.items():
        yield from invalid.tensor(argument, dtype, word="not contiguous")
        yield Invalid(argument, "a row short", lambda rows: rows[1:])
        yield Invalid(argument, "a column short", lambda rows: rows[:, 1:])
        yield Invalid(argument, "rows that overlap", lambda rows: rows[:1].clone().expand(len(rows), -1))
    for value in (0, -1, MOST_K + 1, 5.0, None, True):
        yield Invalid("topk", str(value), invalid.constant(value))


def _pages() -> Iterator[Invalid]:
    yield from invalid.tensor("src_page_table", torch.int64, word="not contiguous")
    yield Invalid("src_page_table", "missing", invalid.constant(None), wrappers=(FLAT,))
    yield from invalid.tensor("row_to_batch", torch.int64, word="not contiguous")
    yield Invalid("row_to_batch", "an entry short", lambda vector: vector[:-1])
    yield Invalid("row_to_batch", "missing, of several tokens a request", invalid.constant(None), wrappers=(PAGED,))
    for value in (0, -1, 2**31, 2.0):
        yield Invalid("page_size", str(value), invalid.constant(value))


def invalid_workspaces() -> Iterator[Invalid]:
    """Invalid workspaces of calls that score and select."""
    yield Invalid("workspace", "a number", invalid.constant(1), like="weights")
    yield Invalid("workspace", "another device", lambda one: invalid.elsewhere(one.new_zeros(1 << 14)), like="weights")
    changes = {
        "dtype float64": lambda one: one.new_zeros(1 << 14, dtype=torch.float64),
        "two dimensions": lambda one: one.new_zeros(16, 1 << 10),
        "not contiguous": lambda one: one.new_zeros(1 << 15)[::2],
        "begins at 4 bytes": lambda one: one.new_zeros(1 + (1 << 14))[1:],
        "too small for a token": lambda one: one.new_zeros(255),
        "empty": lambda one: one.new_zeros(0),
    }
    for how, make in changes.items():
        yield Invalid("workspace", how, make, like="weights")


def _blocks() -> Iterator[Invalid]:
    """Invalid tensors for candidate blocks."""
    rows = {
        "dtype int64": lambda one: one.new_zeros(6, 5, dtype=torch.int64),
        "not a tensor": invalid.constant([1, 2]),
        "one dimension": lambda one: one.new_zeros(6, dtype=torch.int32),
        "no columns": lambda one: one.new_zeros(6, 0, dtype=torch.int32),
        "too many columns": lambda one: one.new_zeros(6, MOST_K + 1, dtype=torch.int32),
        "a row": lambda one: one.new_zeros(1, 5, dtype=torch.int32),
        "another device": lambda one: invalid.elsewhere(one.new_zeros(6, 5, dtype=torch.int32)),
        "rows that overlap": lambda one: one.new_zeros(1, 5, dtype=torch.int32).expand(6, -1),
    }
    for how, make in rows.items():
        yield Invalid("candidate_blocks", how, make, like="weights")


def refused(facts: LogitsFacts, wrappers: Sequence[str], *, keeps_blocks: bool = False) -> Iterator[RefusedCase]:
    """A case for each invalid argument of the wrappers that are there, including those of their logits."""
    there = {wrapper: SHORT[wrapper] for wrapper in wrappers}
    pairs = replace(facts, wrappers=tuple(SCORED[wrapper] for wrapper in wrappers))
    own = {scored: wrapper for wrapper, scored in SCORED.items()}
    shared = [
        replace(case.invalid, wrappers=(own[case.wrapper],))
        for case in refused_logits(pairs)
        if case.invalid.argument not in OF_LOGITS_ALONE
    ]
    apart = [
        Invalid("context_lens", "entries apart", invalid.every_other, wrappers=(PAGED,)),
        Invalid(
            "context_lens", "of tokens, rows apart", lambda one: one[:, None].repeat(1, 3)[:, :2], wrappers=(PAGED,)
        ),
    ]
    own_results = [*_results(), *_pages(), *invalid_workspaces(), *(_blocks() if keeps_blocks else ())]
    yield from invalid.refused_cases(NAME, there, [*shared, *apart, *own_results])
