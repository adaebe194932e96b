"""Kernels and wrappers of candidate blocks broken on purpose; `mutants.py` runs verification on each of them.

Usage: python candidates_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py.
"""

import re

import mutants
from mutants import Mutant

KERNELS, LAUNCHES, WRAPPERS = "_candidates_kernels.py", "_candidates.py", "candidates.py"


def _literal(name: str, old: str, new: str, *only: str, file: str = KERNELS) -> Mutant:
    return Mutant(name, file, re.escape(old), new, only)


BLOCKS, FLAT, PAGED = "blocks: typical", "flat candidates: exact", "paged candidates: exact"
FLAT_PICKS, PAGED_PICKS = "flat candidate picks: ", "paged candidate picks: "
SELECTION = (
    _literal("the last block is left out", "counts_ptr + wide, count,", "counts_ptr + wide, count - 1,", BLOCKS),
    _literal("the newest block is not kept", "blocks == count - 1", "blocks == count", "blocks: ends", BLOCKS),
    _literal(
        "other blocks may be as good as the newest",
        "tl.minimum(scores, LARGEST)",
        "scores",
        "blocks: logits: infinite",
    ),
    _literal("a block is worth its least logit", "tl.max(tl.where(", "tl.min(tl.where(", BLOCKS),
    _literal(
        "starts may be below 0",
        "first = tl.minimum(tl.maximum(first, 0), num_columns)",
        "first = first",
        "blocks: starts",
    ),
    _literal("ends may be past the columns", "tl.minimum(end, num_columns) - first", "end - first", "blocks: ends"),
    _literal("each row has a range", "group = row // row_repeat", "group = row", "blocks: repeat: 3"),
    _literal(
        "rows that share a range differ",
        "(row_repeat - 1 - row % row_repeat) * causal",
        "(row_repeat - 1 - row % row_repeat)",
        "blocks: repeat: 3",
    ),
    _literal(
        "query tokens of a request see the same",
        "(row_repeat - 1 - row % row_repeat) * causal",
        "0",
        "paged picks: blocks: next_n: 3",
    ),
    _literal("a program goes only one step", "count, splits * BLOCKS", "count, count", "blocks: splits: 1"),
    _literal("blocks are counted from column 0", "logits_stride + first", "logits_stride", "blocks: starts"),
    _literal(
        "pieces keep blocks of the first tokens",
        "rows = candidate_blocks[first:end]",
        "rows = candidate_blocks[: end - first]",
        "flat picks: blocks: pieces: 1",
        file="indexer_select.py",
    ),
    _literal(
        "pieces keep blocks by request",
        "candidate_blocks[first * next_n : end * next_n]",
        "candidate_blocks[first:]",
        "paged picks: blocks: next_n: 3",
        file="indexer_select.py",
    ),
    _literal(
        "any size of a block will do",
        '_launch.integer("block_size", block_size, BLOCK, BLOCK)',
        "pass",
        "refuses: block_size*",
        file=WRAPPERS,
    ),
    _literal("rows need not be whole groups", "if rest:", "if False:", "refuses: row_repeat, 4*", file=WRAPPERS),
)
LOGITS = (
    _literal("blocks below 0 are keys", "exists = (block >= 0) & (", "exists = (", "flat candidates: pattern: holes"),
    _literal(
        "blocks past the keys are keys",
        "& (block < tl.cdiv(limit, CANDIDATE_BLOCK))",
        "",
        "*candidates: pattern: beyond",
    ),
    _literal("the newest block is whole", "exists & (keys < limit)", "exists", FLAT, PAGED),
    _literal(
        "columns are keys of other blocks", "+ columns % CANDIDATE_BLOCK", "+ (columns + 1) % CANDIDATE_BLOCK", FLAT
    ),
    _literal(
        "keys that are not seen are 0", 'logits, float("-inf")).to(out_row', "logits, 0.0).to(out_row", FLAT, PAGED
    ),
    _literal(
        "keys are counted from the first of all",
        "k_ptr + key * k_stride",
        "k_ptr + keys * k_stride",
        "flat candidates: ranges: odd",
    ),
    _literal(
        "scales are counted from the first of all",
        "k_scale_ptr + key * k_scale_stride",
        "k_scale_ptr + keys * k_scale_stride",
        "flat candidates: ranges: odd",
    ),
    _literal(
        "all tokens see what the last sees",
        "(next_n - 1 - token) * causal, max_keys",
        "0, max_keys",
        "paged candidates: next_n: 2",
    ),
    _literal(
        "lengths of tokens are causal",
        "(next_n - 1 - token) * causal",
        "(next_n - 1 - token)",
        "paged candidates: next_n: 2, tokenwise",
    ),
    _literal(
        "keys past the table are keys", "* causal, max_keys)", "* causal, 1 << 30)", "paged candidates: lengths: beyond"
    ),
    _literal(
        "pages outside the cache are pages",
        "valid = page < num_pages.to(tl.uint32)",
        "valid = page < 1 << 31",
        "paged candidates: blocks: outside",
    ),
    _literal(
        "a token's request is its number",
        "request = (row // next_n)",
        "request = (row * 1)",
        "paged candidates: next_n: 2",
    ),
    _literal(
        "blocks are a request's",
        "blocks_ptr + wide * blocks_stride",
        "blocks_ptr + request * blocks_stride",
        "paged candidates: next_n: 2",
    ),
    _literal(
        "weights are a request's",
        "weights_ptr + wide * weights_stride",
        "weights_ptr + request * weights_stride",
        "paged candidates: next_n: 2",
    ),
)
PICKS = (
    _literal(
        "top-k sees half of the columns",
        "lens_ptr + token, num_columns",
        "lens_ptr + token, num_columns // 2",
        f"{FLAT_PICKS}exact",
    ),
    _literal(
        "columns are keys", "select.has_pages, select", "select.has_raw, select", f"{FLAT_PICKS}exact", file=LAUNCHES
    ),
    _literal(
        "pages are of one column",
        "columns // BLOCK, BLOCK",
        "columns // BLOCK, 1",
        f"{PAGED_PICKS}exact",
        file=LAUNCHES,
    ),
    _literal(
        "a piece has the first tokens' blocks",
        "candidate_blocks[first:end]",
        "candidate_blocks[: end - first]",
        f"{FLAT_PICKS}pieces: 1",
        file=WRAPPERS,
    ),
    _literal(
        "a piece has the first requests' blocks",
        "call.weights[rows], call.blocks[rows]",
        "call.weights[rows], call.blocks",
        f"{PAGED_PICKS}pieces: 1",
        file=WRAPPERS,
    ),
    _literal(
        "a piece has the first requests' pages",
        "call.block_table[first:end]",
        "call.block_table",
        f"{PAGED_PICKS}pieces: 1",
        file=WRAPPERS,
    ),
    _literal(
        "picks of pieces go to the first rows",
        "out=picks.out[first:end]",
        "out=picks.out[: end - first]",
        f"{FLAT_PICKS}pieces: 1",
        file=WRAPPERS,
    ),
    _literal(
        "scores of pieces go to the first rows",
        "picks.scores[first:end]",
        "picks.scores[: end - first]",
        f"{FLAT_PICKS}pieces: 1",
        file=WRAPPERS,
    ),
    _literal(
        "a result is the wrapper's own", "    if out is None:", "    if True:", f"{FLAT_PICKS}typical", file=WRAPPERS
    ),
)
MUTANTS = (*SELECTION, *LOGITS, *PICKS)

if __name__ == "__main__":
    mutants.MUTANTS = MUTANTS
    mutants.TYPICAL = "blocks: typical"
    mutants.main()
