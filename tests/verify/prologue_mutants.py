"""Attention's prologue broken on purpose; `mutants.py` runs verification on each mutant.

Usage: python prologue_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py; packages: v4, packed.
"""

import re
import sys
from pathlib import Path

import mutants
from mutants import Mutant

WRAPPERS, KERNELS = "prologue.py", "_prologue_kernels.py"


def _literal(name: str, old: str, new: str, *only: str, file: str = KERNELS) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only)


TYPICAL, NORMED, GARBAGE = "prologue: typical*", "prologue: norm*", "prologue: positions: garbage*"
ANY = (
    _literal("rows are off by a slot", "page_offsets = index - pages *", "page_offsets = index + 1 - pages *", TYPICAL),
    _literal("a slot past the cache is written", "(slots < cache.num_slots)", "(slots <= cache.num_slots)", "*beyond*"),
    _literal("negative slots are written", "known & (slots >= 0) & ", "known & ", "*negative*"),
    _literal("slots are cut to 32 bits", "slots < cache.num_slots", "slots.to(tl.int32) < cache.num_slots", "*beyond*"),
    _literal("rows without angles are written", "valid = known & ", "valid = ", GARBAGE),
    _literal("the last row is dropped", "exists = tokens < num_rows\n", "exists = tokens < num_rows - 1\n", TYPICAL),
    _literal(
        "rows turn by the first position",
        "tl.load(angles.positions_ptr + tokens",
        "tl.load(angles.positions_ptr + tokens * 0",
        TYPICAL,
    ),
    _literal(
        "a position past the table is read",
        "positions < angles.num_positions",
        "positions <= angles.num_positions",
        GARBAGE,
    ),
    _literal("sines are cosines", "sin_ptrs = cos_ptrs + D_HALF", "sin_ptrs = cos_ptrs", TYPICAL),
    _literal("rows turn backwards", "tl.where(is_second, 1.0, -1.0)", "tl.where(is_second, -1.0, 1.0)", TYPICAL),
    _literal("Q turns backwards", "first * cos - second * sin", "first * cos + second * sin", TYPICAL),
    _literal("the second of a pair does not turn", "second * cos + first * sin", "second * cos", TYPICAL),
    _literal("eps is left out", " + eps), 1.0)", "), 1.0)", NORMED),
    _literal(
        "rows are normalised without a weight",
        "tl.where(has_weight != 0, tl.rsqrt",
        "tl.where(has_weight == has_weight, tl.rsqrt",
        TYPICAL,
    ),
    _literal(
        "a norm's sum forgets what the last block has",
        "squares += tl.sum(nope.to(tl.float32)",
        "squares = 0.5 * tl.sum(nope.to(tl.float32)",
        NORMED,
    ),
    _literal("heads of Q are off by one", "exists = heads < num_heads\n", "exists = heads < num_heads - 1\n", TYPICAL),
    _literal(
        "blocks of heads are dropped",
        "heads = block % head_blocks * BLOCK_H",
        "heads = 0 * head_blocks * BLOCK_H",
        "prologue: heads: 17*",
    ),
    _literal("rows take the programs of Q", "block < row_programs", "block < row_programs - 1", TYPICAL),
    _literal("Q skips a block", "block - row_programs,", "block - row_programs + 1,", TYPICAL),
    _literal(
        "Q of skipped rows stays",
        "programs = call.row_programs + (queries[0]",
        "programs = call.row_programs + (call.num_rows",
        "*shorter*",
        file=WRAPPERS,
    ),
    _literal(
        "unaligned calls claim 16 bytes",
        "alignment = 1 if (addresses",
        "alignment = 16 if (addresses",
        "prologue: * odd*",
        file=WRAPPERS,
    ),
    _literal("a weight of a norm is not asked for", "return weight, 1", "return weight, 0", NORMED, file=WRAPPERS),
    _literal(
        "a latent's norm is over the row",
        "squares / ROPE_START + eps",
        "squares / (ROPE_START + 2 * D_HALF) + eps",
        NORMED,
    ),
    _literal(
        "latents that are not normalised are written",
        "changed = valid[:, None] & (has_weight != 0)",
        "changed = valid[:, None] & (has_weight == 0)",
        "prologue: * (concat)",
    ),
    _literal("keys of skipped rows turn", "changed = valid[:, None]\n", "changed = exists[:, None]\n", "*negative*"),
    _literal(
        "the fp32 table is not told apart",
        "is_fp32 = isinstance(angles, torch.Tensor) and",
        "is_fp32 = not isinstance(angles, torch.Tensor) and",
        TYPICAL,
        file=WRAPPERS,
    ),
)
HEADS = (
    _literal(
        "a row's norm leaves RoPE out",
        "squares += tl.sum(rope.to(tl.float32)",
        "squares += 0.0 * tl.sum(rope.to(tl.float32)",
        "prologue: norm* (insert)",
    ),
    _literal(
        "the other of a pair keeps its size",
        "_other.to(tl.float32) * factors * weight",
        "_other.to(tl.float32) * weight",
        "prologue: norm* (insert)",
    ),
    _literal(
        "the other of a pair has its neighbour's weight",
        "tl.load(weight_ptr + rope_others",
        "tl.load(weight_ptr + rope_columns",
        "prologue: norm* (insert)",
    ),
    _literal("heads that pad are left", "written[:, None]", "exists[:, None]", "prologue: padded*"),
    _literal(
        "a head's norm leaves RoPE out",
        "squares = tl.sum(first * first + second * second, 1)",
        "squares = tl.zeros([BLOCK_H], tl.float32)",
        TYPICAL,
    ),
    _literal(
        "a head's norm has another mean",
        "tl.rsqrt(squares / D_QK + eps), 0.0)",
        "tl.rsqrt(squares / ROPE_START + eps), 0.0)",
        TYPICAL,
    ),
    _literal(
        "Q's weight is the row's",
        "kv_weight, has_kv_weight = _check_weight",
        "q_weight, has_q_weight = _check_weight",
        NORMED,
        file=WRAPPERS,
    ),
    _literal("padding is not counted", "out.shape[:2]", "q.shape[:2]", "prologue: padded*", file=WRAPPERS),
)

NAMED = {"v4": (*ANY, *HEADS), "packed": ANY}

if __name__ == "__main__":
    mutants.MUTANTS = NAMED[Path(sys.argv[1]).name]
    mutants.TYPICAL = "prologue: typical (insert)"
    mutants.main()
