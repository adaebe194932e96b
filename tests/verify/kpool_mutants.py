"""Pools of keys broken on purpose; `mutants.py` runs verification on each mutant.

Usage: python kpool_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py.
"""

import re

import mutants
from mutants import Mutant

WRAPPERS, KERNELS = "kpool.py", "_kpool_kernels.py"
ROWS, POOLS, SEEDED = "kpool: typical (query)", "kpool: typical (pools)", "kpool: typical (seed)"
STEP, STEPS, EXPANDED = "kpool: typical (update)", "kpool: typical of 3 tokens (update)", "kpool: typical (expand)"
LONG, SEVERAL = "kpool: typical of 16 (pools)", "kpool: pools of 4, 1 in a ring, 9 tokens (update)"


def _literal(name: str, old: str, new: str, *only: str, file: str = KERNELS) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only or (POOLS,))


MUTANTS = (
    _literal("a stage of the transform is missing", "static_range(7)", "static_range(6)", ROWS),
    _literal("the transform has one sign", "(total - second * pairs)", "(total + second * pairs)", ROWS),
    _literal("columns are reversed", "2.0 * tl.arange(0, 2)", "2.0 * (1 - tl.arange(0, 2))", ROWS),
    _literal("the norm is left out", "x * 11.313708498984761", "x * 8.0", ROWS),
    _literal("scales of other rows", "tl.store(scales_ptr + index", "tl.store(scales_ptr + index // 2", ROWS),
    _literal("rows past the query are stored", "exists = index < num_rows", "exists = index <= num_rows", "*rows 17*"),
    _literal("rows lie end to end", "q_ptr + index * q_stride", "q_ptr + index * COLUMNS", "*q slice*"),
    _literal("ape is left out", "scores += tl.load(ape_ptrs, mask=exists, other=0.0)", "scores += 0.0"),
    _literal("ape of the next token", "ape_ptr + tokens * ape_stride", "ape_ptr + (tokens ^ 1) * ape_stride"),
    _literal("a pool is a token short", "exists = (tokens < pool_size)", "exists = (tokens < pool_size - 1)"),
    _literal("longer pools are cut", "range(0, pool_size, BLOCK_W)", "range(0, BLOCK_W, BLOCK_W)", LONG),
    _literal("tokens past the pool count", "(tokens < pool_size)[", "(tokens < pool_size + 1)[", "*pools of 3 (pools)"),
    _literal("a sum is not rescaled", "l * alpha + tl.sum(p, 0)", "l + tl.sum(p, 0)", LONG),
    _literal("keys are not rescaled", "acc * alpha + tl", "acc + tl", LONG),
    _literal(
        "scores are not taken relative", "tl.exp(scores - shift[None, :])", "tl.exp(scores)", "*large, 16 (pools)"
    ),
    _literal(
        "-inf of first tokens is NaN", 'tl.where(m_new == float("-inf"), 0.0, m_new)', "m_new", "*infinite, 16 (pools)"
    ),
    _literal("a pool's key is a sum", "acc / l, slot", "acc, slot"),
    _literal("the mean is not rounded", "x = mean.to(tl.bfloat16).to(tl.float32)[None", "x = (2 * mean)[None"),
    _literal("keys are off by a slot", "index = (slot + one)", "index = (slot + 1 + one)"),
    _literal(
        "negative slots are written",
        "if (slot >= 0) & (slot < num_slots) & (w",
        "if (slot < num_slots) & (w",
        "*negative (pools)",
    ),
    _literal(
        "a slot past the cache is written", "(slot < num_slots) & (w", "(slot <= num_slots) & (w", "*beyond (pools)"
    ),
    _literal(
        "slots are cut to 32 bits",
        "slot = tl.load(loc_ptr + pool)",
        "slot = tl.load(loc_ptr + pool).to(tl.int32)",
        "*beyond (pools)",
    ),
    _literal("masked pools are written", " & (written != 0)", "", "*mask: mixed (pools)"),
    _literal("scores of another pool", "score_ptr + pool * score_pool_stride", "score_ptr + 0 * score_pool_stride"),
    _literal("all tokens are seeded", "exists = exists & (continues == 0)", "exists = exists", SEEDED),
    _literal(
        "a token fewer is seeded",
        "(slots < num_tail_slots)\n    blocks",
        "(slots < num_tail_slots) & (tokens > 0)\n    blocks",
        "*pools of 16, 1 * (seed)",
    ),
    _literal(
        "the token ahead is one further",
        "tokens + kpool, tokens + kpool <",
        "tokens + kpool + 1, tokens + kpool + 1 <",
        "*pools of 2, 3 * (seed)",
    ),
    _literal(
        "scores lie over keys",
        "tail_ptrs + tail_half_stride, [1, ALIGNMENT]), score",
        "tail_ptrs, [1, ALIGNMENT]), score",
        SEEDED,
    ),
    _literal(
        "a tail slot past the rings is seeded",
        "exists = (slots >= 0) & (slots < num_tail_slots)",
        "exists = slots >= 0",
        "*beyond (seed)",
    ),
    _literal(
        "wide slots are cut", "tl.where(words == 2, (high << 32) | (low & 0xFFFFFFFF), low)", "low", "*beyond (seed)"
    ),
    _literal("narrow slots are wide", "(words - 1), mask", "1, mask", "*int64: none (update)", "*int32 (seed)"),
    _literal("every token completes a pool", " + 1) % pool_size == 0)", " + 1) % 1 == 0)", STEP),
    _literal(
        "pools complete a token early", "(tl.where(works, position, 0) + 1)", "(tl.where(works, position, 0) + 2)", STEP
    ),
    _literal(
        "the ring is not read",
        "before = exists[:, None] & (here == 0)",
        "before = exists[:, None] & (here != here)",
        STEP,
    ),
    _literal(
        "tokens of the call are not read",
        "near = exists & (sources >= 0)",
        "near = exists & (sources >= next_n)",
        STEPS,
    ),
    _literal(
        "tokens of another position count",
        "(stored & (source_positions == positions) & ",
        "(stored & ",
        "*garbage: positions, int64 (update)",
        "*garbage: positions, int32 (update)",
    ),
    _literal(
        "tokens without a ring count",
        "here = (stored & (source_positions == positions) & (source_blocks == block))",
        "here = (near & (source_positions == positions))",
        "*garbage: tail, * (update)",
    ),
    _literal(
        "the ring begins with the pool",
        "(tl.where(exists, positions, 0) % ring)",
        "(tl.where(exists, number, 0) % ring)",
        "*4, 2 in a ring, 6*",
    ),
    _literal(
        "scores come from keys",
        "tail_scores = tl.multiple_of(tail_ptrs + tail_half_stride",
        "tail_scores = tl.multiple_of(tail_ptrs",
        STEP,
    ),
    _literal(
        "a step's first token alone is stored", "keys + token * key_token_stride + columns", "keys + columns", STEPS
    ),
    _literal(
        "tokens are stored a place late",
        "position.to(tl.int32) % ring\n",
        "(position.to(tl.int32) + 1) % ring\n",
        "*pools of 4, 2*",
    ),
    _literal(
        "tokens without a ring are stored", " & (tail_slot < num_tail_slots):", ":", "*garbage: tail, int32 (update)"
    ),
    _literal(
        "negative positions are stored",
        "if (position >= 0) & (position <= 0x7FFFFFFF) & (t",
        "if (position <= 0x7FFFFFFF) & (t",
        "*garbage: positions, int32 (update)",
    ),
    _literal(
        "keys outside the cache are written",
        "works & (slot >= 0) & (slot < num_slots)",
        "works & (slot >= 0)",
        "*garbage: slots, int32 (update)",
    ),
    _literal("another request's slots", "slots_ptr + request * slots_stride\n", "slots_ptr + 0 * slots_stride\n", STEP),
    _literal("pools that are not complete have tokens", "(ids < pools)", "(ids <= pools)", "*pools: outside* (expand)"),
    _literal("no pool has tokens", "picked & (ids >= 0)", "picked", "*pools: outside* (expand)"),
    _literal("the tail is left out", "behind < length - pools * pool_size", "behind < 0 * length", EXPANDED),
    _literal(
        "the tail begins a token late", "pools * pool_size + behind, -1", "pools * pool_size + behind + 1, -1", EXPANDED
    ),
    _literal(
        "blocks of columns are dropped", "column_blocks * BLOCK_N + tl", "column_blocks * 0 + tl", "*512 pools (expand)"
    ),
    _literal(
        "unaligned calls claim 16 bytes",
        "alignment = 1 if (addresses | DTYPE.itemsize * strides) % 16 else 16",
        "alignment = 16",
        "*rows odd (seed)",
        "*tail odd (seed)",
        file=WRAPPERS,
    ),
    _literal("a pool is dropped", "tile, pools, call, constexprs", "tile, pools - 1, call, constexprs", file=WRAPPERS),
    _literal("a request is dropped", "programs = requests if", "programs = requests - 1 if", STEP, file=WRAPPERS),
)

if __name__ == "__main__":
    mutants.MUTANTS = MUTANTS
    mutants.TYPICAL = POOLS
    mutants.main()
