"""Attention that rotates its output back, broken on purpose; `mutants.py` runs verification on each mutant.

Usage: python out_rope_mutants.py PACKAGE_DIR WORK_DIR {portable|rows|few_heads|cache}
"""

import re
import sys

import mutants
from mutants import KERNELS, SPLITS, Mutant

DECODE = "_sparse_decode_kernels.py"
ROWS, FEW, CACHE = "_sparse_fwd_sm90.py", "_sparse_fwd_sm90_swap_ab.py", "_sparse_decode_sm90.py"
ANY, MANY, DECODED = (
    "sparse_fwd: positions: any (f*",
    "sparse_fwd: positions: any, many heads",
    "sparse_decode: pos*any",
)
OUTSIDE = "sparse_decode: positions: outside"
CHAIN = "prologue: chain*"


def _literal(name: str, file: str, old: str, new: str, *only: str) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only)


PORTABLE = (
    _literal("O turns forwards", SPLITS, "first * cos + second * sin", "first * cos - second * sin", ANY),
    _literal("the second of a pair turns forwards", SPLITS, "cos - first * sin", "cos + first * sin", ANY),
    _literal("attention behind a prologue turns forwards", SPLITS, "cos - first * sin", "cos + first * sin", CHAIN),
    _literal("sines are cosines", SPLITS, "cos_ptrs + ROPE_PAIRS", "cos_ptrs", ANY),
    _literal(
        "cosines are sines",
        SPLITS,
        "cos = tl.load(cos_ptrs, mask",
        "cos = tl.load(cos_ptrs + ROPE_PAIRS, mask",
        ANY,
    ),
    _literal("all tokens turn by the first's", SPLITS, "positions_ptr + token)", "positions_ptr + token * 0)", ANY),
    _literal("columns are a pair too early", SPLITS, "(START - ROPE_START) // 2", "(START - ROPE_START) // 2 + 1", ANY),
    _literal("columns are a pair too late", SPLITS, "(START - ROPE_START) // 2", "(START - ROPE_START) // 2 - 1", ANY),
    _literal(
        "pairs are half a row apart", SPLITS, "acc.shape[1] // 2, 2))", "2, acc.shape[1] // 2).permute(0, 2, 1))", ANY
    ),
    _literal(
        "a position past the table is read",
        SPLITS,
        "(position < angles.num_positions)",
        "(position <= angles.num_positions)",
        OUTSIDE,
    ),
    _literal("negative positions are read", SPLITS, "known = (position >= 0) &", "known = (position >= -1) &", OUTSIDE),
    _literal(
        "positions are 32 bits wide",
        SPLITS,
        "tl.load(angles.positions_ptr + token)",
        "tl.load(angles.positions_ptr + token).to(tl.int32)",
        OUTSIDE,
    ),
    _literal("rows of the table are close", SPLITS, "position, 0) * angles.cos_sin_stride", "position, 0) * 64", ANY),
    _literal("rows do not turn", KERNELS, "acc = _splits.rotate_back(", "_splits.rotate_back(", ANY),
    _literal("rows over a cache do not turn", DECODE, "acc = _splits.rotate_back(", "_splits.rotate_back(", DECODED),
    _literal(
        "pieces of a call turn by the first tokens'",
        DECODE,
        "extra_cache, first_token + token,",
        "extra_cache, token,",
        "sparse_decode: workspace: in*",
    ),
    _literal(
        "batches of rows turn by the first tokens'",
        "sparse_fwd.py",
        "self.positions[tokens]",
        "self.positions[: last - first]",
        "sparse_fwd: workspace: *",
    ),
    _literal("too few positions are enough", SPLITS, "if known < tokens:", "if known < 0:", "refuses: positions, one*"),
    _literal(
        "any table will do",
        SPLITS,
        '_launch.check("cos_sin_cache", cos_sin_cache, torch.float32',
        '_launch.check("cos_sin_cache", cos_sin_cache, cos_sin_cache.dtype',
        "refuses: cos_sin_cache, *",
    ),
)


def _sm90(file: str, case: str, outside: str, side: str, more: tuple[Mutant, ...] = ()) -> tuple[Mutant, ...]:
    """Signs, positions, angles and columns of an sm90 kernel's rotation. `side` is its name of other columns."""
    return (
        _literal("O turns forwards", file, "first * cos + second * sin", "first * cos - second * sin", case),
        _literal("the second of a pair turns forwards", file, "cos - first * sin", "cos + first * sin", case),
        _literal("sines are cosines", file, "pointers + ROPE_PAIRS", "pointers", case),
        _literal("all tokens turn by the first's", file, "positions_ptr + token)", "positions_ptr + token * 0)", case),
        _literal("columns in front of RoPE's turn", file, f"{side}_1, acc = _halves", f"acc, {side}_1 = _halves", case),
        _literal("a position past the table is read", file, "< call.num_positions", "<= call.num_positions", outside),
        *more,
    )


OF_KERNEL = {
    "portable": PORTABLE,
    "rows": _sm90(ROWS, MANY, "sparse_fwd: positions: outside, many heads", "left"),
    "few_heads": _sm90(FEW, ANY, "sparse_fwd: positions: outside (f*", "upper"),
    "cache": _sm90(
        CACHE,
        DECODED,
        OUTSIDE,
        "left",
        (
            _literal(
                "rows that are recomputed do not turn",
                CACHE,
                "acc = _rotate_rows_back(",
                "_rotate_rows_back(",
                "sparse_decode: cache: scales far apart, in splits",
            ),
            _literal(
                "pieces turn by the first tokens'",
                CACHE,
                "_rotate_back(call, acc, call.first_token + token)",
                "_rotate_back(call, acc, token)",
                "sparse_decode: workspace: in*",
            ),
        ),
    ),
}
TARGETS = {"portable": "sm80", "rows": "sm90, simulated", "few_heads": "sm90_swap_ab, simulated"}
TARGETS["cache"] = "sm90, simulated"

if __name__ == "__main__":
    kernel = sys.argv.pop()
    mutants.MUTANTS = OF_KERNEL[kernel]
    mutants.TYPICAL = mutants.MUTANTS[0].only[0]
    mutants.TARGET = TARGETS[kernel]
    mutants.main()
