"""Kernels of the indexer's logits broken on purpose; `mutants.py` runs verification on each of them.

Usage: python mqa_logits_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py.
"""

import re

import mutants
from mutants import Mutant

WRAPPERS, KERNELS = "mqa_logits.py", "_mqa_logits_kernels.py"


def _literal(name: str, old: str, new: str, *only: str, file: str = KERNELS) -> Mutant:
    return Mutant(name, file, re.escape(old), new, only or ("flat: typical", "paged: typical"))


SCORE_MUTANTS = (
    _literal(
        "relu comes after the weights",
        "scores = (scores + tl.abs(scores)) * weights[None, :]",
        "scores = scores * weights[None, :]\n    scores = scores + tl.abs(scores)",
    ),
    _literal("relu is left out", "(scores + tl.abs(scores))", "(2 * scores)"),
    _literal("keys have no scale", "tl.sum(scores, 2) * scale[:, None]", "tl.sum(scores, 2)"),
    _literal("half is not taken", "HALF if config.NATIVE", "1.0 if config.NATIVE"),
    _literal("keys have the scale of the next", "scale_ptrs = k_scale_rows.to(", "scale_ptrs = (k_scale_rows + 4).to("),
    _literal("NaN is no NaN", "(scores + tl.abs(scores))", "tl.maximum(2 * scores, 0.0)", "*: contents: NaN"),
    _literal("heads are weighted as one", "weights_rows + head", "weights_rows + 0 * head"),
)
FLAT_MUTANTS = (
    _literal("the first key is not seen", "keys[:, None] >= start", "keys[:, None] > start", "flat: ranges: odd"),
    _literal(
        "one past the end is seen", "(keys[:, None] < end[None", "(keys[:, None] <= end[None", "flat: ranges: odd"
    ),
    _literal("starts are not cut", "tl.maximum(start, 0)", "start", "flat: ranges: beyond, compressed"),
    _literal("ends are not cut", "tl.minimum(end, num_keys)", "end", "flat: ranges: beyond"),
    _literal("start is added twice", "start * compressed", "2 * start * compressed", "flat: ranges: odd, compressed"),
    _literal(
        "compressed rows begin at 0", "shift = start * compressed", "shift = start * 0", "flat: ranges: odd, comp*"
    ),
    _literal(
        "the last block is left out",
        "tl.where(start < end, end, 0), 0), BLOCK_N)",
        "end, 0) - 1, BLOCK_N)",
        "flat: keys: 129",
    ),
    _literal("a split is scored by all", "first + split * part", "first", "flat: splits: 3 *"),
    _literal(
        "what lies before is not -inf",
        "_fill(out_rows, exists, split, ",
        "_fill(out_rows, exists, 1 << 20, ",
        "flat: ranges: empty",
    ),
    _literal("what lies behind is not -inf", "tl.maximum(first, last) + split", "blocks", "flat: ranges: o*"),
    _literal("a token too many", "exists = tokens < num_tokens", "exists = tokens < num_tokens + 1", "flat: tokens: 3"),
    _literal(
        "columns run past the row", "(columns < out_columns)", "(columns < out_columns + 9)", "flat: compressed: s*"
    ),
    _literal("keys past the last are read", "valid = keys < num_keys", "valid = keys < num_keys + 200", "flat: k*"),
    Mutant(
        "keys' offsets are 32 bits wide",
        KERNELS,
        r"offsets = tl.arange\(0, BLOCK_N\).to\(tl.int64\) \* k_stride",
        "offsets = (tl.arange(0, BLOCK_N) * k_stride).to(tl.int32)",
        ("flat: layout: k far",),
    ),
    _literal("clean is ignored", "int(clean)", "0", "flat: ranges: empty", file=WRAPPERS),
    _literal("rows are not rounded up", "OUT_ALIGNMENT = 1024", "OUT_ALIGNMENT = 4", "flat: typical", file=WRAPPERS),
)
PAGED_MUTANTS = (
    _literal("tokens see one key less", "next_n - 1 - tokens", "next_n - tokens", "paged: next_n: 2"),
    _literal("tokens all see as the last", "(next_n - 1 - tokens) * causal", "0", "paged: next_n: 2, clean"),
    _literal(
        "one past the length is seen", "(keys[:, None] < end[None, :])", "(keys[:, None] <= end[None, :])", "paged: n*"
    ),
    _literal("a request has the table of the next", "wide_request * block_table", "(wide_request + 1) * block_table"),
    _literal(
        "blocks are not bounded", "valid = page < num_pages.to(tl.uint32)", "valid = keys < stop", "paged: blocks*"
    ),
    _literal("pages are one late", "page_rows = cache_ptr + page.to(", "page_rows = cache_ptr + (page + 1).to("),
    _literal("scales lie one page late", "scales_byte + position", "scales_byte + page_size + position"),
    _literal(
        "positions are those of the request", "keys - column.to(tl.int32) * page_size", "keys", "paged: block size*"
    ),
    _literal("requests have the weights of the first", "(wide_request * next_n + token)", "token"),
    _literal("a program takes every step", "% programs_per_range * BLOCK_N", "% 1 * BLOCK_N", "paged: ranges: 1"),
    _literal(
        "ranges end with their request's keys",
        "last_unit * unit_keys",
        "(last_unit - 1) * unit_keys",
        "paged: requests: one",
    ),
    _literal("the first request alone", "tl.minimum(last_request + 1,", "tl.minimum(first_request + 1,"),
    _literal(
        "max_context_len is ignored",
        "call.max_keys = min(call.columns, ",
        "call.max_keys = max(call.columns, ",
        "paged: l*",
        file=WRAPPERS,
    ),
)
SCHEDULE_MUTANTS = (
    _literal(
        "units are rounded down",
        "tl.cdiv(tl.minimum(length, MOST_KEYS), unit_keys)",
        "length // unit_keys",
        "schedule*",
    ),
    _literal("lengths are of the first token", "range(columns)", "range(1)", "schedule: tokenwise"),
    _literal("a range begins behind its request", "<= first[:, None]", "< first[:, None]", "schedule*"),
    _literal("the first ranges are the longer ones", "rows - (ranges - (total - each * ranges))", "rows", "schedule*"),
    _literal("requests after the first block count from 0", "before += tl.sum(units, 0)", "before += 0", "schedule*"),
    _literal(
        "the total is 32 bits wide",
        "total = tl.sum(total, 0)",
        "total = tl.sum(total, 0).to(tl.int32)",
        "schedule: lengths: many*",
    ),
)
LOGITS_MUTANTS = (*SCORE_MUTANTS, *FLAT_MUTANTS, *PAGED_MUTANTS, *SCHEDULE_MUTANTS)

if __name__ == "__main__":
    mutants.MUTANTS, mutants.TYPICAL = LOGITS_MUTANTS, "flat: typical"
    mutants.main()
