"""Dense attention broken on purpose; `mutants.py` runs verification on each of them.

Usage: python dense_decode_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py. The package has a window, or
a cache of one scale.
"""

import re
import sys
from pathlib import Path

import mutants
from mutants import SPLITS, Mutant

DENSE, KERNELS, LAYOUT = "dense_decode.py", "_dense_decode_kernels.py", "_layout.py"
SHARED = ("dense_decode: shares: 7 *", "dense_decode: shares: 20 *", "dense_decode: shares: alike*")


def _literal(name: str, old: str, new: str, *only: str, file: str = DENSE) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only or (mutants.TYPICAL,))


def _device(name: str, old: str, new: str, *only: str) -> Mutant:
    return _literal(name, old, new, *only, file=KERNELS)


mutants.TYPICAL = "dense_decode: typical"
WINDOWED = ("dense_decode: window: 5, s_q 3, causal", "dense_decode: window: 100, s_q 3*")
mutants.MUTANTS = (
    _device("scores have the wrong sign", "scores * inputs.sm_scale_log2", "scores * -inputs.sm_scale_log2"),
    _device("the last key is dropped", "valid = keys < key_range.end", "valid = keys < key_range.end - 1"),
    _device("keys past the end count", "(behind >= least)", "(behind >= -999)", "dense_decode: s_q: 4, causal"),
    _device(
        "a query token sees one key too few", "(behind >= least)", "(behind > least)", "dense_decode: s_q: 4, causal"
    ),
    _device(
        "the first query token is the last", "own = length - s_q + positions", "own = length - 1 - positions", *WINDOWED
    ),
    _device("windows begin a key late", "(behind < inputs.window)", "(behind < inputs.window - 1)", *WINDOWED),
    _device("windows begin a key early", "(behind < inputs.window)", "(behind <= inputs.window)", *WINDOWED),
    _device(
        "keys before the window are multiplied", "valid &= keys >= key_range.lowest", "valid &= keys >= 0", *WINDOWED
    ),
    _device("the window is not looked at", "& (behind < inputs.window)", "", *WINDOWED),
    _device(
        "windows of one token",
        "length - inputs.s_q + 1 - inputs.window",
        "length - inputs.window",
        "dense_decode: window: 64, s_q 3*",
    ),
    _device(
        "pages past the cache are read",
        "valid &= page.to(tl.uint32, bitcast=True) <",
        "valid |= page.to(tl.uint32, bitcast=True) <",
    ),
    _device(
        "lengths may be too long",
        "tl.minimum(tl.maximum(length, 0), inputs.max_keys)",
        "tl.minimum(tl.maximum(length, 0), inputs.max_keys + 64)",
        "dense_decode: length: too long",
    ),
    _device(
        "positions go on past a page",
        "keys.to(tl.uint32) % inputs.page_size.to(tl.uint32)",
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
    _device(
        "all KV heads are the first",
        ".to(tl.int64) * k_head_stride",
        ".to(tl.int64) * 0",
        "dense_decode: heads: 10 of*",
    ),
    _device(
        "query heads are the first KV head's",
        "heads = block // row_blocks * group + rows % group",
        "heads = rows % group",
        "dense_decode: heads: 10 of*",
    ),
    _device(
        "query tokens and heads are swapped",
        "positions = rows // group",
        "positions = rows % group",
        "dense_decode: s_q: 4*",
    ),
    _device(
        "ranges begin a block early",
        "(program.to(tl.int64) * total // programs)",
        "(program.to(tl.int64) * total // programs - 1)",
        *SHARED,
    ),
    _device(
        "requests after the first begin where it does",
        "        start += tl.maximum(overhead + kv_blocks, work.padded_blocks)\n",
        "        start += overhead\n",
        "dense_decode: shares: 1 *",
    ),
    _device(
        "whole requests are not padded",
        "padded_blocks = tl.where(is_whole, max_blocks, 0)",
        "padded_blocks = 0",
        *SHARED,
    ),
    _device(
        "later batches of requests begin at offset 0",
        "        before += tl.sum(request_blocks, 0)\n",
        "",
        "dense_decode: length: in blocks",
    ),
    _device("overhead is not counted", "first_offset = start + overhead", "first_offset = start", *SHARED),
    _device(
        "a request begun has the slot of one continued", "tl.where(first_kv_block == 0, later_slots, 0)", "0", *SHARED
    ),
    _device("a program too few is merged", "last.to(tl.int32) - program + 1", "last.to(tl.int32) - program", *SHARED),
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
    _device(
        "a row's LSE is by token alone",
        "token * lse_token_stride + heads",
        "token * num_heads + heads",
        "dense_decode: typical, decode",
    ),
    _literal("empty rows have the other LSE", "-math.inf", "math.inf", "dense_decode: length: none at all, decode"),
    _literal(
        "splits depend on the batch",
        "if batch_invariant:\n        most_splits",
        "if False:\n        most_splits",
        "dense_decode: batch invariant: rows*",
    ),
    _literal(
        "tiles depend on the query tokens",
        "rows = group if batch_invariant else s_q * group",
        "rows = s_q * 16",
        "dense_decode: batch invariant: rows*",
    ),
    _literal(
        "batches have the first requests' lengths",
        "self.cache_seqlens[requests]",
        "self.cache_seqlens",
        "dense_decode: workspace: in p*",
    ),
    _literal("batches write the first rows", "self.out[tokens]", "self.out", "dense_decode: workspace: in p*"),
    _literal("rows are always called aligned", "1 if (addresses", "16 if (addresses", "dense_decode: layout: q odd"),
    _literal("metadata is not compared", "self.config != config", "False", "dense_decode: contract: metadata"),
    _literal("V may be a tensor of its own", "if same != (", "if False and same != (", "refuses: v_buffer*"),
    _literal("indices are taken", "one_of(name, given,", "one_of(name, None,", "refuses: indices*"),
    _literal(
        "any number is a scale", "_launch.scale(", "_launch.number(", "refuses: softmax_scale*", "refuses: sm_scale*"
    ),
    _literal("what is no bool is causal", '_launch.flag("causal", causal)', "bool(causal)", "refuses: causal*"),
)

Q_SCALE = ("dense_decode: e4m3: q, 3 heads, s_q 1", "dense_decode: e4m3: q slice")
SCALED = (
    _literal("q_scale is left out", "(q.float() * q_scale)", "q.float()", *Q_SCALE),
    _literal("q_scale counts twice", "(q.float() * q_scale)", "(q.float() * q_scale * q_scale)", *Q_SCALE),
    _literal("q of e4m3 has the cache's scale", "(q.float() * q_scale)", "(q.float() * 0.4375)", *Q_SCALE),
    _literal("q of e4m3 loses its scale", "q = (q.float() * q_scale).to(DTYPE)", "q = q.to(DTYPE)", *Q_SCALE),
    _literal("a scale goes with q of bf16", "DTYPE if q_scale is None else torch.float8_e4m3fn", "DTYPE", *Q_SCALE),
)

if __name__ == "__main__":
    if Path(sys.argv[1]).name == "dense_tensor":
        mutants.MUTANTS = SCALED
    mutants.main()
