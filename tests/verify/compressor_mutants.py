"""The compressor broken on purpose; `mutants.py` runs verification on each mutant.

Usage: python compressor_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py.
"""

import re

import mutants
from mutants import Mutant

WRAPPERS, KERNELS = "compressor.py", "_compressor_kernels.py"
SAVED, ROWS = "compressor: typical (save)", "compressor: typical (rows)"
LONG, FIRST = "compressor: typical of 128 (rows)", "compressor: first windows (rows)"
MANY_LONG = "compressor: many tokens of 128 (rows)"
MANY, INFINITE = "compressor: many tokens (rows)", "compressor: scores: infinite, 128 (rows)"


def _literal(name: str, old: str, new: str, *only: str, file: str = KERNELS) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only or (ROWS,))


MUTANTS = (
    _literal("ape is left out", "score += tl.load(ape_ptrs", "score += 0.0 * tl.load(ape_ptrs", SAVED),
    _literal("ape of the next position", "(positions.to(tl.uint32) %", "((positions + 1).to(tl.uint32) %", SAVED),
    _literal("ape goes to kv", "tl.store(state_ptrs, kv, mask", "tl.store(state_ptrs, kv + score, mask", SAVED),
    _literal("scores follow kv", "state_ptrs + state_width, [", "state_ptrs + columns, [", "*further columns (save)"),
    _literal("negative slots are written", "(slots >= 0) & (slots < num_states)", "(slots < num_states)", "*negative*"),
    _literal("a slot past the states is written", "(slots < num_states)", "(slots <= num_states)", "*beyond (save)"),
    _literal("slots are cut to 32 bits", "(slots < num_states)", "(slots.to(tl.int32) < num_states)", "*beyond (save)"),
    _literal(
        "positions before 0 are saved", " & (positions >= 0) & (positions <=", " & (positions <=", "*garbage (save)"
    ),
    _literal(
        "columns of other rows are saved",
        "inside = (offsets < columns //",
        "inside = (offsets < (columns + 9) //",
        "*columns 0*",
    ),
    _literal(
        "the last columns are cut off", "strides | call.columns)", "strides)", "*4 columns short (save)", file=WRAPPERS
    ),
    _literal("blocks of columns are dropped", "column_blocks * BLOCK_C", "column_blocks * 0", SAVED),
    _literal(
        "states are a place off",
        "page_offsets.to(tl.int64) * state_row_stride\n    kv",
        "page_offsets.to(tl.int64) * 0\n    kv",
        SAVED,
    ),
    _literal("rows of all tokens", "if works & ((position + 1) % compress_ratio == 0)", "if works"),
    _literal("rows a token early", "(position + 1) % compress_ratio == 0", "position % compress_ratio == 0"),
    _literal(
        "a program's later windows are left out",
        "                token + 1, end, positions",
        "                end, end, positions",
        MANY_LONG,
    ),
    _literal("a program's first window is left out", "tl.where(ends, tokens,", "tl.where(ends, tokens + 1,", MANY_LONG),
    _literal("programs overlap", "first = tl.program_id(0) * block_tokens", "first = tl.program_id(0)", MANY_LONG),
    _literal("windows are a token short", "first in range(0, window,", "first in range(1, window,"),
    _literal("windows begin a token late", "position + 1 - window + tokens", "position + 2 - window + tokens"),
    _literal("longer windows are cut", "range(0, window, BLOCK_W)", "range(0, BLOCK_W, BLOCK_W)", LONG),
    _literal("tokens past the window count", "(tokens < window) & ", "", "compressor: ratio 3, overlap (rows)"),
    _literal("the newer half is the older one", "tl.where(tokens >= compress_ratio, COLUMNS, 0)", "0 * tokens"),
    _literal("the halves are split a token late", "tokens >= compress_ratio,", "tokens > compress_ratio,"),
    _literal("kv weighs itself", "kv_rows + states.state_width", "kv_rows"),
    _literal("scores lie right behind kv", "kv_rows + states.state_width", "kv_rows + 2 * COLUMNS", "*further*(rows)"),
    _literal("absent tokens have a score", 'other=float("-inf")', "other=0.0", FIRST),
    _literal("a sum is not rescaled", "l * alpha + tl.sum(p, 0)", "l + tl.sum(p, 0)", MANY),
    _literal("kv is not rescaled", "acc * alpha + tl", "acc + tl", MANY),
    _literal("apart: a sum is not rescaled", "l * alpha + p,", "l + p,", LONG),
    _literal("apart: kv is not rescaled", "acc * alpha + p *", "acc + p *", LONG),
    _literal("apart: larger scores have no weight", "tl.where(raises, 1.0, smaller)", "smaller", LONG),
    _literal("apart: the first tokens' -inf is NaN", 'tl.where(scores == float("-inf"), 0.0, ', "(", INFINITE),
    _literal("apart: threads are not joined", "tl.sum(l * alpha, 0)", "tl.max(l * alpha, 0)", LONG),
    _literal("apart: tokens are added twice", "tokens += BLOCK_W\n        exists", "tokens += 0\n        exists", LONG),
    _literal("scores are not taken relative", "tl.exp(scores - shift[None, :])", "tl.exp(scores)", "*large (rows)"),
    _literal(
        "the first tokens' -inf is NaN",
        'tl.where(m_new == float("-inf"), 0.0, m_new)',
        "m_new",
        "compressor: many tokens, scores: infinite (rows)",
    ),
    _literal("eps is left out", "COLUMNS + eps)", "COLUMNS)"),
    _literal("the mean is over other columns", "squares / COLUMNS", "squares / 64"),
    _literal("the norm's weight is left out", "factor * row_weight", "factor"),
    _literal("rows turn by the last position", "position + 1 - compress_ratio", "position"),
    _literal("sines are cosines", "angles_ptr + pairs + D_HALF", "angles_ptr + pairs"),
    _literal("rows turn backwards", "even * cos - odd * sin", "even * cos + odd * sin"),
    _literal("RoPE begins a pair late", "pairs = FIRST + tl", "pairs = FIRST - 1 + tl"),
    _literal(
        "a position past the angles works", "position < num_positions", "position <= num_positions + 8", "*past (rows)"
    ),
    _literal("negative positions work", "(position >= 0) & (position <", "(position <", "*positions: garbage (rows)"),
    _literal(
        "a request past the table works",
        "(request < num_requests)",
        "(request < 1 + num_requests)",
        "*requests: garbage (rows)",
    ),
    _literal("negative requests work", "(request >= 0) & ", "", "*requests: garbage (rows)"),
    _literal(
        "rows of skipped states are written",
        " & (state_slot >= 0) & (state_slot < num_states)",
        "",
        "*state slots: skipped (rows)",
    ),
    _literal("rows with negative slots are written", "(slot >= 0) & (slot <", "(slot <", "*slots: negative (rows)"),
    _literal("a row past the cache is written", "(slot < num_slots)", "(slot <= num_slots)", "*slots: beyond (rows)"),
    _literal("pages beyond the states are read", " & (pages < states.state_pages)", "", "*table: garbage* (rows)"),
    _literal("pages that are none are read", "(pages >= 0) & ", "", "*table: holes* (rows)"),
    _literal(
        "columns past the table are read",
        "exists & (entries < states.table_columns.to(tl.uint32))",
        "exists",
        "*narrow* (rows)",
    ),
    _literal(
        "a token without its page works",
        "valid, _ = _find_states(position + tl.arange(0, 1), tl.arange(0, 1) == 0, states)",
        "valid = tl.arange(0, 1) == 0",
        "*table: holes* (rows)",
    ),
    _literal("another request's table", "table_ptr + request.to(tl.int64)", "table_ptr + 0 * request.to(tl.int64)"),
    _literal("rows are off by a slot", "index = (slot + tl.arange(0, 1))", "index = (slot + 1 + tl.arange(0, 1))"),
    _literal(
        "tokens are dropped",
        '"num_tokens": tokens}',
        '"num_tokens": tokens - 6}',
        file=WRAPPERS,
    ),
    _literal("overlap is ignored", "halves * ratio", "ratio", file=WRAPPERS),
    _literal(
        "keys go to attention's cache",
        "if head_dim == indexer_compressor.COLUMNS",
        "if head_dim is None",
        "compressor: typical (keys)",
        file=WRAPPERS,
    ),
    _literal(
        "unaligned calls claim 16 bytes",
        "alignment = 1 if (addresses | 4",
        "alignment = 16 if (addresses | 4",
        "*odd* (rows)",
        file=WRAPPERS,
    ),
)

if __name__ == "__main__":
    mutants.MUTANTS = MUTANTS
    mutants.TYPICAL = ROWS
    mutants.main()
