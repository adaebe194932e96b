"""Arguments that the top-k kernels' wrappers must refuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase

NAME = "topk"
PREFILL, DECODE = "top_k_per_row_prefill", "top_k_per_row_decode"
PERSISTENT, PAGES, MERGE = "persistent_topk", "top_k_page_table_transform", "topk_merge"
SHORT = {PREFILL: "prefill", DECODE: "decode", PERSISTENT: "persistent", PAGES: "pages", MERGE: "merge"}
VLLM = (PREFILL, DECODE, PERSISTENT)

LOGITS = {"logits": VLLM, "input": (PAGES,)}
VECTORS = {
    "row_starts": (PREFILL, PAGES),
    "row_ends": (PREFILL,),
    "seq_lens": (DECODE,),
    "lengths": (PERSISTENT, PAGES),
    "row_to_batch": (PAGES,),
    "page_table_row_starts": (PAGES,),
}
ROWS = {"indices": VLLM, "out": (PAGES, MERGE), "out_raw_indices": (PAGES,)}
SCORES = {"scores": (*VLLM, PAGES), "out_scores": (MERGE,)}
MOST_K = 4096


def _invalid_tensors() -> Iterator[Invalid]:
    for argument, wrappers in LOGITS.items():
        for one in invalid.tensor(argument, torch.float16, first=True, word="not contiguous"):
            yield replace(one, wrappers=wrappers)
    for argument, wrappers in VECTORS.items():
        for one in invalid.tensor(argument, torch.int64, word="not contiguous"):
            if not (argument == "seq_lens" and one.how == "a dimension short"):
                yield replace(one, wrappers=wrappers)
        yield Invalid(argument, "an entry short", lambda vector: vector[:-1], wrappers=wrappers)
    for argument, wrappers in {**ROWS, **SCORES}.items():
        dtype = torch.int64 if argument in ROWS else torch.float64
        for one in invalid.tensor(argument, dtype, word="not contiguous"):
            yield replace(one, wrappers=wrappers)
        yield Invalid(argument, "a row short", lambda rows: rows[1:], wrappers=wrappers)
        yield Invalid(argument, "a column short", lambda rows: rows[:, 1:], wrappers=wrappers)
        overlapping = Invalid(argument, "rows that overlap", lambda rows: rows[:1].clone().expand(len(rows), -1))
        yield replace(overlapping, wrappers=wrappers)
    for one in invalid.tensor("src_page_table", torch.int64, word="not contiguous"):
        yield replace(one, wrappers=(PAGES,))
    for one in invalid.tensor("scores", torch.bfloat16, first=True, word="not contiguous"):
        yield replace(one, wrappers=(MERGE,))
    for one in invalid.tensor("ids", torch.int64, word="not contiguous"):
        yield replace(one, wrappers=(MERGE,))
    yield Invalid("ids", "a column short", lambda ids: ids[:, 1:], wrappers=(MERGE,))


def _invalid_numbers() -> Iterator[Invalid]:
    for argument, wrappers in {"topk": (PREFILL, DECODE), "k": (PERSISTENT, PAGES, MERGE)}.items():
        for value in (0, -1, MOST_K + 1, 5.0, None, True):
            yield Invalid(argument, str(value), invalid.constant(value), wrappers=wrappers)
    for value in (-1, 5, 2.0, None):
        yield Invalid("num_rows", str(value), invalid.constant(value), wrappers=(PREFILL, DECODE))
    for argument in ("stride0", "stride1"):
        for value in (0, 2, 1.0, None):
            yield Invalid(argument, str(value), invalid.constant(value), wrappers=(PREFILL, DECODE))
    for value in (0, -1, 3, 2.0, None):
        yield Invalid("next_n", str(value), invalid.constant(value), wrappers=(DECODE,))
    yield Invalid("seq_lens", "of other query tokens", lambda lens: lens.repeat(3).view(-1, 3), wrappers=(DECODE,))
    for value in (-1, 2.5, None):
        yield Invalid("max_seq_len", str(value), invalid.constant(value), wrappers=(PERSISTENT,))
    yield Invalid("workspace", "a number", invalid.constant(1), wrappers=(PERSISTENT,))
    yield Invalid("tie_break", "the largest index", invalid.constant(2), wrappers=(PAGES,))
    for value in (0, -1, 2**31, 2.0, None):
        yield Invalid("page_size", str(value), invalid.constant(value), wrappers=(PAGES,))


def refused(wrappers: Sequence[str]) -> Iterator[RefusedCase]:
    """A case for each invalid argument of the wrappers that are there."""
    there = {wrapper: short for wrapper, short in SHORT.items() if wrapper in wrappers}
    return invalid.refused_cases(NAME, there, [*_invalid_tensors(), *_invalid_numbers()])
