"""Wrappers that score and select broken on purpose; `mutants.py` runs verification on each of them.

Usage: python indexer_select_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py.
"""

import re

import mutants
from mutants import Mutant

SELECT = "indexer_select.py"


def _literal(name: str, old: str, new: str, *only: str, file: str = SELECT) -> Mutant:
    return Mutant(name, file, re.escape(old), new, only)


FLAT, PAGED, MORE = "flat picks: pieces: 3", "paged picks: pieces: 2", "paged picks: next_n: 2, pieces"
MUTANTS = (
    _literal(
        "the first piece is left out", "range(0, tokens, max(each, 1))", "range(each, tokens, max(each, 1))", FLAT
    ),
    _literal("pieces end a token late", "end = min(first + each, tokens)", "end = min(first + each + 1, tokens)", FLAT),
    _literal(
        "picks of pieces go to the first rows",
        "rows = slice(first, first + logits.shape[0])",
        "rows = slice(0, logits.shape[0])",
        FLAT,
    ),
    _literal(
        "a batch has the first tokens' q",
        "batch.weights = call.q[first:end]",
        "batch.weights = call.q",
        FLAT,
    ),
    _literal(
        "a batch has the first tokens' weights",
        "call.q[first:end], call.weights[first:end]",
        "call.q[first:end], call.weights",
        FLAT,
    ),
    _literal(
        "a batch has the first tokens' starts",
        "= call.start[first:end]",
        "= call.start[: end - first]",
        FLAT,
    ),
    _literal("a batch has the first tokens' ends", "call.end[first:end]", "call.end[: end - first]", FLAT),
    _literal(
        "a batch has weights by request",
        "call.weights[first * call.next_n : end * call.next_n]",
        "call.weights[first : end * call.next_n]",
        MORE,
    ),
    _literal(
        "a batch has the first requests' lengths",
        "= call.context_lens[first:end]",
        "= call.context_lens[: end - first]",
        PAGED,
    ),
    _literal(
        "a batch has the first requests' pages",
        "call.block_table[first:end]",
        "call.block_table[: end - first]",
        PAGED,
    ),
    _literal(
        "a batch has the call's schedule",
        "    mqa_logits._schedule_paged(SimpleNamespace(schedule=b",
        "    (SimpleNamespace(schedule=b",
        PAGED,
    ),
    _literal(
        "lengths of tokens are of requests",
        "next_n=next_n if call.causal else 1",
        "next_n=next_n",
        "*next_n: 2, tokenwise",
    ),
    _literal(
        "lengths of requests are of tokens", "next_n=next_n if call.causal else 1", "next_n=1", "*picks: next_n: 2"
    ),
    _literal("ends are lengths", "lens_are_ends=True", "lens_are_ends=False", "flat picks: pieces: 1", FLAT),
    _literal(
        "slots and indices change places",
        "call.out, call.raw, call.gives_raw = self.slots[rows], self.out[rows], 1",
        "call.raw, call.out, call.gives_raw = self.slots[rows], self.out[rows], 1",
        "flat picks: slots",
    ),
    _literal("scores of pieces go to the first rows", "self.scores[rows]", "self.scores[: logits.shape[0]]", FLAT),
    _literal(
        "a batch has the first tokens' requests",
        "self.row_to_batch[rows]",
        "self.row_to_batch",
        "flat picks: slots: mapped",
    ),
    _literal("a batch has the first tokens' page tables", "self.page_table[first:]", "self.page_table", PAGED),
    _literal("rows of logits overlap", "(floats, 1)", "(floats - ROW_FLOATS, 1)", "flat picks: typical"),
    _literal(
        "a workspace is passed over",
        "    if workspace is None:\n        workspace =",
        "    if True:\n        workspace =",
        "flat picks: workspace",
    ),
    _literal(
        "lengths may lie apart", "not context_lens.is_contiguous()", "False", "refuses: context_lens, of tokens, rows*"
    ),
    _literal("a small workspace will do", "room < step", "room < 0", "refuses: workspace, too small*"),
    _literal(
        "any address will do", "workspace.data_ptr() % 16", "workspace.data_ptr() % 1", "refuses: workspace, begins*"
    ),
    _literal("a result is the wrapper's own", "        if out is None:", "        if True:", "paged picks: typical"),
    _literal("slots need no requests", "elif batches != self.rows", "elif False", "refuses: row_to_batch, missing*"),
)

if __name__ == "__main__":
    mutants.MUTANTS = MUTANTS
    mutants.TYPICAL = "flat picks: typical"
    mutants.main()
