"""Attention that quantises its output, broken on purpose; `mutants.py` runs verification on each mutant.

Usage: python quantised_out_mutants.py PACKAGE_DIR WORK_DIR {portable|rows|few_heads|cache}
"""

import re
import sys

import mutants
from mutants import KERNELS, SPLITS, Mutant

DECODE = "_sparse_decode_kernels.py"
ROWS, FEW, CACHE = "_sparse_fwd_sm90.py", "_sparse_fwd_sm90_swap_ab.py", "_sparse_decode_sm90.py"
ANY, MANY = "sparse_fwd: positions: any (f*", "sparse_fwd: positions: any, many heads"
SPLIT, DECODED = "sparse_fwd: positions: any, split", "sparse_decode: positions: any"
FAR = "sparse_decode: cache: scales far apart, logits alike"


def _literal(name: str, file: str, old: str, new: str, *only: str) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only)


PORTABLE = (
    _literal("scales are twice as large", SPLITS, ">> 23) - 8", ">> 23) - 7", ANY),
    _literal("scales are half as large", SPLITS, ">> 23) - 8", ">> 23) - 9", ANY),
    _literal("a mantissa above 1.5 takes the next exponent", SPLITS, "+ 0x1FFFFF)", "+ 0x3FFFFF)", MANY),
    _literal("a mantissa above 1.875 takes the next exponent", SPLITS, "+ 0x1FFFFF)", "+ 0x0FFFFF)", MANY),
    _literal("negative values have no part in a scale", SPLITS, "tl.max(tl.abs(blocks), 2)", "tl.max(blocks, 2)", MANY),
    _literal("blocks are half as wide", SPLITS, "tl.constexpr(128)", "tl.constexpr(64)", ANY),
    _literal("empty rows have a scale of 0", SPLITS, "1e-10)", "0.0)", "sparse_fwd: indices: none"),
    _literal("codes are cut off", SPLITS, "total = magnitude +", "total = magnitude * 0.97 +", MANY),
    _literal("codes have no sign", SPLITS, "& 0x80)", "& 0x00)", ANY),
    _literal("heads of a group lie in reverse", SPLITS, "heads % GROUP_HEADS *", "(7 - heads % GROUP_HEADS) *", ANY),
    _literal("groups lie where the first one does", SPLITS, "(heads // GROUP_HEADS).to", "(heads // 128).to", MANY),
    _literal(
        "columns of scales have no padding",
        SPLITS,
        "columns * tokens + token",
        "columns * num_tokens + token",
        ANY,
    ),
    _literal("scales of heads are mixed up", SPLITS, "* HEAD_SCALES + blocks", "+ 8 * blocks", MANY),
    _literal("padding is left as it is", SPLITS, "range(num_tokens, tokens)", "range(num_tokens, num_tokens)", ANY),
    _literal("padding of some columns is left", SPLITS, "range(0, columns, lanes.shape[0])", "range(0, 32, 128)", MANY),
    _literal(
        "pieces have the scales of the first tokens",
        SPLITS,
        "first_token + token, heads",
        "token, heads",
        "sparse*workspace: *",
    ),
    _literal(
        "pieces begin with the first token",
        "sparse_fwd.py",
        "call.first_token, call.num_tokens = first,",
        "call.first_token, call.num_tokens = 0,",
        "sparse_fwd: workspace: *",
    ),
    _literal(
        "the combine's columns all begin with 0",
        SPLITS,
        "% D_BLOCKS * BLOCK_D\n    mask",
        "% D_BLOCKS * 0\n    mask",
        "sparse_decode: splits: 1000*",
    ),
    _literal("rows are not divided by their sums", KERNELS, "acc * scale[:, None], START_KV", "acc, START_KV", ANY),
    _literal(
        "rows over a cache are not divided by their sums",
        DECODE,
        "acc * scale[:, None], START_KV",
        "acc, START_KV",
        DECODED,
    ),
    _literal(
        "any number of heads will do", SPLITS, "if num_heads % GROUP_HEADS.value:", "if False:", "*refuses: q, heads*"
    ),
)


def _sm90(file: str, case: str, *more: Mutant) -> tuple[Mutant, ...]:
    """Blocks, rows and padding of an sm90 kernel."""
    return (
        _literal(
            "scales of the right half are the left's", file, "// QUANT_BLOCK + gl.arange", "// 1024 + gl.arange", case
        ),
        _literal(
            "scales of tokens are the first's",
            file,
            "num_tokens, token, scale_heads",
            "num_tokens, token * 0, scale_heads",
            case,
        ),
        _literal(
            "tokens are counted wrong",
            file,
            "_tile_coordinates(call, call.num_tiles)[0]\n        _store_out",
            "_tile_coordinates(call, call.num_tiles)[0] + 4\n        _store_out",
            case,
        ),
        _literal("padding is left as it is", file, "    _pad_scales(", "    tuple((", case),
        *more,
    )


OF_KERNEL = {
    "portable": PORTABLE,
    "rows": _sm90(
        ROWS,
        MANY,
        _literal(
            "rows are not divided by their sums",
            ROWS,
            "_quantise(_rescale(acc, scale), True)",
            "_quantise(acc, True)",
            MANY,
        ),
        _literal("columns of the right half are the left's", ROWS, "columns = START + gl", "columns = gl", MANY),
    ),
    "few_heads": _sm90(
        FEW,
        ANY,
        _literal(
            "rows are not divided by their sums",
            FEW,
            "gl.permute(acc * scale[None, :], (1, 0)), slot",
            "gl.permute(acc, (1, 0)), slot",
            ANY,
        ),
    ),
    "cache": _sm90(
        CACHE,
        DECODED,
        _literal(
            "rows are not divided by their sums",
            CACHE,
            "_quantise(_rescale(acc, scale), True)",
            "_quantise(acc, True)",
            DECODED,
        ),
        _literal(
            "rows that are recomputed are twice as large",
            CACHE,
            "_quantise(acc * scale[:, None], True)",
            "_quantise(acc * 2.0 * scale[:, None], True)",
            FAR,
        ),
        _literal(
            "rows that are recomputed keep their scales",
            CACHE,
            "        blocks = gl.arange(0, exponents.shape[1]",
            "        blocks = 99 + gl.arange(0, exponents.shape[1]",
            FAR,
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
