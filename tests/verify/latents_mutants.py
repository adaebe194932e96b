"""V4.1's compressor broken on purpose; `mutants.py` runs verification on each mutant.

Usage: python latents_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py.
"""

import re

import mutants
from mutants import Mutant

WRAPPERS, KERNELS = "latents.py", "_latents_kernels.py"
MADE, ROWS = "latents: typical (latents)", "latents: typical (rows)"
ONE, DECODE = "latents: ratio 1 (latents)", "latents: decode (latents)"
LONGER, DECODE_4 = "*ratio 3,*", "latents: decode, ratio 4 (latents)"


def _literal(name: str, old: str, new: str, *only: str, file: str = KERNELS) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only or (MADE,))


MUTANTS = (
    _literal("groups begin a token late", "numbers - (compress_ratio - 1)", "numbers - (compress_ratio - 2)", LONGER),
    _literal("longer groups are cut", "range(0, compress_ratio, BLOCK_W)", "range(0, BLOCK_W, BLOCK_W)", "*ratio 5,*"),
    _literal("tokens past a group count", "(numbers < compress_ratio)", "(numbers < 8 * compress_ratio)", "*ratio 3,*"),
    _literal("the ring is not read", "numbers < before, ring_rows", "numbers < 0, ring_rows", DECODE_4),
    _literal("the ring is a place off", "(position + later) % capacity", "(position + later + 1) % capacity", DECODE_4),
    _literal("a ring has no end", "(position + later) % capacity", "(position + later) % 4096", DECODE_4),
    _literal("kv weighs itself", "kv_ptrs + COLUMNS", "kv_ptrs"),
    _literal("pairs: scores have no maximum", "tl.exp(scores - m)", "tl.exp(scores)", "*scores: large (latents)"),
    _literal("pairs: the other token has no weight", "other_p * kv)", "0.0 * kv)"),
    _literal("pairs: the first token is the second", "(first & 1) != 0", "(first & 1) == 0"),
    _literal("pairs: the ring is a place off", "to(tl.int32) - 1) % capacity", "to(tl.int32)) % capacity", DECODE),
    _literal("pairs: a ring has no end", "to(tl.int32) - 1) % capacity", "to(tl.int32) - 1) % 4096", DECODE),
    _literal("pairs: groups of two calls are dropped", "works & is_second & inside", "works & (first < 0)", DECODE),
    _literal("pairs: groups of the call are taken from the ring", "works & is_second & inside", "works & inside"),
    _literal("pairs: a group begins before the call", "(other >= 0) & ", "", "*positions: last (latents)"),
    _literal("pairs: a group that began earlier is whole", "token > start", "token >= start", DECODE),
    _literal("pairs: a single token's state is not saved", "mask=inside)", "mask=inside & (begin < 0))", DECODE),
    _literal("pairs: a state has another's slot", "slot, next_slot)", "next_slot, slot)", "*negative (latents)"),
    _literal(
        "pairs: negative positions end groups", "exists & (first >= 0) & ", "exists & ", "latents: positions: garbage*"
    ),
    _literal("scores have no maximum", "tl.exp(scores - shift[None, :])", "tl.exp(scores)", "*scores: large, ratio 5*"),
    _literal(
        "columns of -inf are NaN",
        'tl.where(m_new == float("-inf"), 0.0, m_new)',
        "m_new",
        "*scores: infinite, ratio 5*",
    ),
    _literal("eps is left out", "COLUMNS + eps)", "COLUMNS)"),
    _literal("the norm's weight is left out", "row * factor * row_weight", "row * factor"),
    _literal("groups of one are not normalised", "factor = tl.rsqrt(squares / COLUMNS + eps)", "factor = 1.0", ONE),
    _literal("the mean is over other columns", "squares / COLUMNS", "squares / 64"),
    _literal("scores are not saved", "tl.store(state_ptrs, state_1,", "tl.store(state_ptrs, state_0,"),
    _literal("a state is not saved", "exists = tokens < end\n", "exists = tokens < end - 1\n"),
    _literal("only the last state is saved", "tl.maximum(begin, end - capacity)", "tl.maximum(begin, end - 1)"),
    _literal("states are a place off", "ring_offsets * row_stride", "0 * row_stride"),
    _literal("a token saves the first one's state", "tokens.to(tl.int64) * kv_score", "first * kv_score"),
    _literal(
        "negative slots are in the states", "(slots >= 0) & (slots < num_states)", "(slots < num_states)", "*negative*"
    ),
    _literal("a slot past the states is in them", "(slots < num_states)", "(slots <= num_states)", "*beyond (latents)"),
    _literal(
        "slots are cut to 32 bits", "(slots < num_states)", "(slots.to(tl.int32) < num_states)", "*beyond (latents)"
    ),
    _literal(
        "negative slots of groups of one work",
        "stored = (slot >= 0) & (position",
        "stored = (slot > -2) & (position",
        "*negative, ratio 1*",
    ),
    _literal("negative positions work", "(position >= 0) & (position <=", "(position <=", "*positions: garbage*"),
    _literal("negative positions end groups", "works = (first >= 0) & ", "works = ", "*positions: garbage, ratio 3*"),
    _literal("positions past 2^31 work", " & (position <= 0x7FFFFFFF)", "", "*positions: garbage*"),
    _literal(
        "a block ends where its group does",
        "(first % compress_ratio).to(tl.int32)\n            works = (f",
        "0\n            works = (f",
        "*ratio 3,*",
    ),
    _literal("negative slots make latents", "(slot >= 0) & (slot < num_states)", "(slot < num_states)", "*negative*"),
    _literal("slots past the states make latents", " & (slot < num_states)", "", "*beyond (latents)"),
    _literal("requests begin where the first does", "starts_ptr + request,", "starts_ptr + 0 * request,", DECODE),
    _literal(
        "a request past the others works",
        "request < num_requests)",
        "request < 9 + num_requests)",
        "*requests: garbage*",
    ),
    _literal("negative requests work", "(request >= 0) & (request", "(request", "*requests: garbage*"),
    _literal(
        "a group that began before the call counts as whole",
        "known & (token - start >=",
        "known & (token + start >=",
        DECODE_4,
    ),
    _literal(
        "groups of two calls are dropped", "works = (before > 0) & (token < end)", "works = before > 999", DECODE_4
    ),
    _literal(
        "a group past the call's tokens ends",
        "(before > 0) & (token < end)",
        "before > 0",
        "latents: decode, ratio 4 (latents)",
    ),
    _literal("rows turn by the last position", "to(tl.int32) + 1 - compress_ratio", "to(tl.int32)", ROWS),
    _literal("rows of all tokens", " & (first % compress_ratio == 0)", "", ROWS),
    _literal("sines are cosines", "sin_ptrs = cos_ptrs + D_HALF", "sin_ptrs = cos_ptrs", ROWS),
    _literal("rows turn backwards", "x * cos + ", "x * cos - ", ROWS),
    _literal(
        "negative positions make rows", "(positions >= 0) & (positions < num", "(positions < num", "*garbage (rows)"
    ),
    _literal(
        "a position past the angles works", "positions < num_positions", "positions <= num_positions", "*garbage (rows)"
    ),
    _literal(
        "rows with negative slots are written",
        "(slots >= 0) & (slots < num_slots)",
        "(slots < num_slots)",
        "*negative (rows)",
    ),
    _literal("a row past the cache is written", "slots < num_slots)", "slots <= num_slots)", "*beyond (rows)"),
    _literal(
        "rows are off by a slot",
        "index = slots.to(tl.uint32)\n    pages",
        "index = (slots + 1).to(tl.uint32)\n    pages",
        ROWS,
    ),
    _literal("tokens are dropped", '"num_tokens": num_tokens,', '"num_tokens": num_tokens // 2,', file=WRAPPERS),
    _literal("rows are dropped", '"num_rows": slots,', '"num_rows": slots // 2,', ROWS, file=WRAPPERS),
    _literal(
        "unaligned calls claim 16 bytes",
        "alignment = 1 if (addresses | strides) % 16",
        "alignment = 16 if (addresses | strides) % 16",
        "*odd* (rows)",
        file=WRAPPERS,
    ),
    _literal(
        "unaligned latents claim 16 bytes",
        "alignment = 1 if (addresses | 4",
        "alignment = 16 if (addresses | 4",
        "*odd (latents)",
        file=WRAPPERS,
    ),
)

if __name__ == "__main__":
    mutants.MUTANTS = MUTANTS
    mutants.TYPICAL = MADE
    mutants.main()
