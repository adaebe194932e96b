"""Top-k kernels broken on purpose; `mutants.py` runs verification on each of them.

Usage: python topk_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py.
"""

import re

import mutants
from mutants import Mutant

TOPK, KERNELS = "topk.py", "_topk_kernels.py"


def _literal(name: str, old: str, new: str, *only: str, file: str = KERNELS) -> Mutant:
    return Mutant(name, file, re.escape(old), new, only)


MUTANTS = (
    _literal(
        "kept calls launch behind an address",
        "return Place(number, offset or None)",
        "return Place(number, offset + 64)",
        "prefill: typical, kept",
        file="_notes.py",
    ),
    _literal(
        "kept calls launch with the first tensor's address",
        "return (self.numbers[found[0]],",
        "return (0,",
        "prefill: typical, kept",
        file="_notes.py",
    ),
    _literal(
        "zeros are told apart", "0 - bits, bits + 0x80000000)", "~bits, bits + 0x80000000)", "prefill: scores: z*"
    ),
    _literal(
        "negative scores are turned round",
        "0 - bits, bits + 0x80000000)",
        "bits - 0x80000000, bits + 0x80000000)",
        "prefill: k: 499",
    ),
    _literal("NaN is picked", "tl.where(key <= LAST_KEY, key, 0)", "key", "prefill: scores: special"),
    _literal("-inf is picked", "- 0x00800000\n", "- 0x007FFFFF\n", "prefill: scores: few"),
    _literal(
        "one too few reaches a bound", "count_second >= k, second", "count_second > k, second", "prefill: typical"
    ),
    _literal(
        "equals at a bound are left out",
        "((keys >= low) & (keys < high)).to",
        "((keys > low) & (keys < high)).to",
        "prefill: scores: ties",
    ),
    _literal("all equals are picked", "< wanted)", "< wanted + 1)", "prefill: scores: equal"),
    _literal("the last equals are picked", "& 0xFFFF) < wanted", "& 0xFFFF) >= wanted", "prefill: scores: ties"),
    _literal(
        "places of equals do not count what is above",
        "return (flags & 0xFFFF) + tl.minimum",
        "return tl.minimum",
        "prefill: scores: ties",
    ),
    _literal("nothing is filled", "range(number, k, COLUMNS)", "range(k, k, COLUMNS)", "prefill: ends"),
    _literal("the start is counted twice", "columns - row.first\n", "columns - 2 * row.first\n", "prefill: ranges"),
    _literal("the start is not taken off", "index = columns - row.first\n", "index = columns\n", "prefill: ranges"),
    _literal("buffered columns count from 0", "held - row.first, index", "held, index", "prefill: long rows: ranges"),
    _literal(
        "what is outside a row counts",
        "(columns >= row.first) & (columns < row.end), _key",
        "columns >= 0, _key",
        "prefill: ranges",
    ),
    _literal(
        "a row ends a column late", "& (columns < row.end), _key", "& (columns <= row.end), _key", "prefill: ends"
    ),
    _literal("ends are not clamped", "tl.minimum(end, num_columns))", "end)", "prefill: ends"),
    _literal(
        "a buffer overflows", "if count + (passing & 0xFFFF) > BLOCK:", "if count > 4 * BLOCK:", "prefill: long rows: *"
    ),
    _literal(
        "a cut keeps too little in view", "tl.where(passing >= k, low, floor)", "high", "prefill: long rows: cuts"
    ),
    _literal("a sample is believed", "(count < k) & (floor > 0)", "count < 0", "prefill: long rows: misleading"),
    _literal(
        "the last query token sees the least", "number % next_n + 1", "next_n - number % next_n", "decode: next_n: 2"
    ),
    _literal("a token sees one too few", "number % next_n + 1", "number % next_n", "decode: next_n: *"),
    _literal(
        "lengths wrap round",
        "tl.maximum(tl.load(lens_ptr + number // next_n), 0)",
        "tl.load(lens_ptr + number // next_n)",
        "decode: lengths*",
    ),
    _literal("pages past the row are read", "page < pages.num_pages", "page >= 0", "pages: pages: few"),
    _literal(
        "negative pages name slots", "(physical >= 0) & (physical <=", "(physical <=", "pages: blocks: limit, size 53"
    ),
    _literal(
        "pages past int32 name slots",
        "INT32_VALUES // call.page_size - 1",
        "INT32_VALUES - 1",
        "pages: blocks: limit, size 53",
        file="_topk.py",
    ),
    _literal("the place in a page is lost", "pages.page_size + in_page", "pages.page_size", "pages: page size: 53"),
    _literal("page starts are left out", "page_table_stride + page_start", "page_table_stride", "pages: page starts"),
    _literal(
        "row starts do not begin pages",
        "page_starts = row_starts if",
        "page_starts = None if",
        "pages: row starts",
        file=TOPK,
    ),
    _literal(
        "batches are not bounded", "(batch >= 0) & (batch < num_batches)", "batch >= 0", "pages: batches: outside"
    ),
    _literal("of equals the larger ids are picked", "0x80000000 - ids.to", "1 + ids.to", "merge: scores: ties"),
    _literal("ids are not sorted", "pairs = tl.sort(pairs)", "pairs = pairs", "merge: any order"),
    _literal(
        "candidates without an id count",
        "mask=ids >= 0, other",
        "mask=inside, other",
        "merge: k: 512",
        "merge: scores: few",
    ),
    _literal(
        "strides are believed",
        'integer("stride0", stride0, logits.stride(0), logits.stride(0))',
        "stride0",
        "refuses: stride0*",
        file=TOPK,
    ),
)

if __name__ == "__main__":
    mutants.MUTANTS = MUTANTS
    mutants.TYPICAL = "prefill: typical"
    mutants.main()
