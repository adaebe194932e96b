"""Dense attention broken on purpose; `mutants.py` runs verification on each of them.

Usage: python dense_decode_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py. The package has a window.
"""

import re

import mutants
from mutants import SPLITS, Mutant

DENSE, LAYOUT = "dense_decode.py", "_layout.py"
SHARED = ("dense_decode: shares: 7 *", "dense_decode: shares: 20 *", "dense_decode: shares: alike*")


def _literal(name: str, old: str, new: str, *only: str, file: str = DENSE) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only or (mutants.TYPICAL,))


mutants.TYPICAL = "dense_decode: typical"
WINDOWED = ("dense_decode: window: 5, s_q 3, causal", "dense_decode: window: 100, s_q 3*")
mutants.MUTANTS = (
    _literal("scores have the wrong sign", "scores * sm_scale_log2", "scores * -sm_scale_log2"),
    _literal("the last key is dropped", "valid = (keys < end)", "valid = (keys < end - 1)"),
    _literal("keys past the end count", "(behind >= least)", "(behind >= -999)", "dense_decode: s_q: 4, causal"),
    _literal(
        "a query token sees one key too few", "(behind >= least)", "(behind > least)", "dense_decode: s_q: 4, causal"
    ),
    _literal(
        "the first query token is the last", "own = length - s_q + positions", "own = length - 1 - positions", *WINDOWED
    ),
    _literal("windows begin a key late", "(behind < window)", "(behind < window - 1)", *WINDOWED),
    _literal("windows begin a key early", "(behind < window)", "(behind <= window)", *WINDOWED),
    _literal("keys before the window are multiplied", "valid &= keys >= lowest", "valid &= keys >= 0", *WINDOWED),
    _literal("the window is not looked at", "& (behind < window)", "", *WINDOWED),
    _literal(
        "windows of one token", "length - s_q + 1 - window", "length - window", "dense_decode: window: 64, s_q 3*"
    ),
    _literal(
        "pages past the cache are read",
        "& (page.to(tl.uint32, bitcast=True) <",
        "| (page.to(tl.uint32, bitcast=True) <",
    ),
    _literal(
        "lengths may be too long",
        "tl.minimum(tl.maximum(length, 0), max_keys)",
        "tl.minimum(tl.maximum(length, 0), max_keys + 64)",
        "dense_decode: length: too long",
    ),
    _literal(
        "positions go on past a page",
        "keys.to(tl.uint32) % page_size.to(tl.uint32)",
        "keys.to(tl.uint32)",
        "dense_decode: page size: 53",
    ),
    _literal(
        "page sizes are said to be whole",
        "alignment == ALIGNED and page_size % tile.block_n == 0",
        "True",
        "dense_decode: page size: 53",
    ),
    _literal(
        "page offsets are 32 bits wide",
        "page.to(tl.int64) * page_stride",
        "(page.to(tl.int64) * page_stride).to(tl.int32)",
        "dense_decode: offsets: cache*",
        file=LAYOUT,
    ),
    _literal(
        "all KV heads are the first",
        ".to(tl.int64) * k_head_stride",
        ".to(tl.int64) * 0",
        "dense_decode: heads: 10 of*",
    ),
    _literal(
        "query heads are the first KV head's",
        "heads = part // row_blocks * group + rows % group",
        "heads = rows % group",
        "dense_decode: heads: 10 of*",
    ),
    _literal(
        "query tokens and heads are swapped",
        "positions = rows // group",
        "positions = rows % group",
        "dense_decode: s_q: 4*",
    ),
    _literal(
        "parts begin a place early",
        "(program.to(tl.int64) * total // programs)",
        "(program.to(tl.int64) * total // programs - 1)",
        *SHARED,
    ),
    _literal(
        "requests after the first begin where it does",
        "        start += tl.maximum(overhead + units, room)\n",
        "        start += overhead\n",
        "dense_decode: shares: 1 *",
    ),
    _literal("whole requests stand side by side", "room = tl.where(whole, most, 0)", "room = 0", *SHARED),
    _literal(
        "blocks of requests begin at place 0",
        "        before += tl.sum(places, 0)\n",
        "",
        "dense_decode: length: in blocks",
    ),
    _literal("overhead is not counted", "place = start + overhead", "place = start", *SHARED),
    _literal(
        "a request begun has the slot of one continued", "tl.where(first_unit == 0, later_slots, 0)", "0", *SHARED
    ),
    _literal("a program too few is merged", "last.to(tl.int32) - program + 1", "last.to(tl.int32) - program", *SHARED),
    _literal(
        "the merge takes the first split's slot", "tl.where(splits == 0, later_slots, 0)", "0", *SHARED, file=SPLITS
    ),
    _literal(
        "the merge writes requests that have their result",
        "if num_splits == 1:",
        "if num_splits == 0:",
        *SHARED,
        file=SPLITS,
    ),
    _literal(
        "a row's LSE is by token alone",
        "token * lse_token_stride + heads",
        "token * num_heads + heads",
        "dense_decode: typical, decode",
    ),
    _literal("empty rows have the other LSE", "-math.inf", "math.inf", "dense_decode: length: none at all, decode"),
    _literal(
        "splits depend on the batch",
        "if batch_invariant:\n        most_units",
        "if False:\n        most_units",
        "dense_decode: batch invariant: rows*",
    ),
    _literal(
        "tiles depend on the query tokens",
        "rows = group if batch_invariant else s_q * group",
        "rows = s_q * 16",
        "dense_decode: batch invariant: rows*",
    ),
    _literal(
        "pieces have the first requests' lengths",
        "cache_seqlens=call.cache_seqlens[piece]",
        "cache_seqlens=call.cache_seqlens",
        "dense_decode: workspace: in p*",
    ),
    _literal("pieces write the first rows", "out=call.out[tokens]", "out=call.out", "dense_decode: workspace: in p*"),
    _literal("rows are always called aligned", "1 if (addresses", "16 if (addresses", "dense_decode: layout: q odd"),
    _literal("metadata is not compared", "self.config != config", "False", "dense_decode: contract: metadata"),
    _literal("V may be a tensor of its own", "if same != (", "if False and same != (", "refuses: v_buffer*"),
    _literal("indices are taken", "if given is not None:", "if False:", "refuses: indices*"),
)

if __name__ == "__main__":
    mutants.main()
