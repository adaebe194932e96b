"""Arguments that the wrappers of candidate blocks must refuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.chains.indexer_select.invalid import MOST_K, OF_LOGITS_ALONE, invalid_workspaces
from mlagen.verify.mqa_logits.facts import FLAT_PAIR, PAGED_PAIR, LogitsFacts
from mlagen.verify.mqa_logits.invalid import refused as refused_logits

NAME = "candidates"
SELECT = "select_candidate_blocks"
FLAT, PAGED = "candidate_mqa_logits", "paged_candidate_mqa_logits"
FLAT_PICKS, PAGED_PICKS = "candidate_indexer_topk", "paged_candidate_indexer_topk"
SHORT = {
    SELECT: "blocks",
    FLAT: "flat candidates",
    PAGED: "paged candidates",
    FLAT_PICKS: "flat candidate picks",
    PAGED_PICKS: "paged candidate picks",
}
LOGITS, PICKS = (FLAT, PAGED), (FLAT_PICKS, PAGED_PICKS)
OVER_PAGES = (PAGED, PAGED_PICKS)
WITHOUT = {"schedule_meta", "max_context_len"}  # arguments that only the logits of all keys take


def _rows(argument: str, dtype: torch.dtype, wrappers: tuple[str, ...]) -> Iterator[Invalid]:
    """Invalid tensors for rows of results."""
    for one in invalid.tensor(argument, dtype, word="not contiguous"):
        yield replace(one, wrappers=wrappers)
    yield Invalid(argument, "a row short", lambda rows: rows[1:], wrappers=wrappers)
    yield Invalid(argument, "a column short", lambda rows: rows[:, 1:], wrappers=wrappers)
    overlapping = Invalid(argument, "rows that overlap", lambda rows: rows[:1].clone().expand(len(rows), -1))
    yield replace(overlapping, wrappers=wrappers)


def _selection() -> Iterator[Invalid]:
    """Invalid arguments of the selection of blocks."""
    found = [*invalid.tensor("logits", torch.float16, first=True, word="not contiguous")]
    for argument in ("row_ks", "row_ke"):
        found += invalid.tensor(argument, torch.int64, word="not contiguous")
        found.append(Invalid(argument, "an entry short", lambda vector: vector[:-1]))
        found.append(Invalid(argument, "an entry too many", invalid.longer))
    found.append(Invalid("row_ke", "missing", invalid.constant(None)))
    for value in (0, -1, MOST_K + 1, 5.0, None, True):
        found.append(Invalid("topk_blocks", str(value), invalid.constant(value)))
    for value in (0, 3, 128, 8.0, None):
        found.append(Invalid("block_size", str(value), invalid.constant(value)))
    for value in (0, -1, 4, 1.0, None):
        found.append(Invalid("row_repeat", str(value), invalid.constant(value)))
    for one in (*found, *_rows("out", torch.int64, ())):
        yield replace(one, wrappers=(SELECT,))


def _candidates() -> Iterator[Invalid]:
    """Invalid arguments of the wrappers over keys in blocks, but for those that all logits have."""
    for one in invalid.tensor("candidate_blocks", torch.int64, word="not contiguous"):
        yield replace(one, wrappers=(*LOGITS, *PICKS))
    yield Invalid("candidate_blocks", "a row short", lambda rows: rows[1:], wrappers=(*LOGITS, *PICKS))
    yield Invalid("candidate_blocks", "too many columns", invalid.wider(MOST_K), wrappers=(*LOGITS, *PICKS))
    for dtype in (torch.float16, torch.float64, None, "bf16"):
        yield Invalid("logits_dtype", str(dtype), invalid.constant(dtype), wrappers=LOGITS)
    yield from _rows("out", torch.int64, PICKS)
    yield from _rows("scores", torch.float64, PICKS)
    for value in (0, -1, MOST_K + 1, 5.0, None, True):
        yield Invalid("topk", str(value), invalid.constant(value), wrappers=PICKS)
    for one in invalid_workspaces():
        yield replace(one, wrappers=PICKS)


def refused(facts: LogitsFacts | None, wrappers: Sequence[str]) -> Iterator[RefusedCase]:
    """A case for each invalid argument of the wrappers that are there, including those of their logits."""
    there = {wrapper: SHORT[wrapper] for wrapper in wrappers}
    shared = []
    if facts is not None:
        own = {FLAT_PAIR: (FLAT, FLAT_PICKS), PAGED_PAIR: OVER_PAGES}
        pairs = replace(facts, wrappers=(FLAT_PAIR, PAGED_PAIR))
        shared = [
            replace(case.invalid, wrappers=own[case.wrapper])
            for case in refused_logits(pairs)
            if case.invalid.argument not in OF_LOGITS_ALONE | WITHOUT
        ]
    yield from invalid.refused_cases(NAME, there, [*_selection(), *shared, *_candidates()])
