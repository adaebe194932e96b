"""The quantisation of attention's output broken on purpose; `mutants.py` runs verification on each mutant.

Usage: python out_quant_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py.
"""

import re

import mutants
from mutants import Mutant

WRAPPERS, KERNELS = "out_quant.py", "_out_quant_kernels.py"
TYPICAL, PACKED, WIDE = "out_quant: typical", "out_quant: packed scales", "out_quant: not quantised"
GARBAGE = "out_quant: positions: garbage"


def _literal(name: str, old: str, new: str, *only: str, file: str = KERNELS) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only or (TYPICAL,))


MUTANTS = (
    _literal("sines are cosines", "sin_ptrs = cos_ptrs + D_HALF", "sin_ptrs = cos_ptrs"),
    _literal("the output turns forward", "first * cos + second * sin", "first * cos - second * sin"),
    _literal("second columns stay", "second * cos - first * sin", "second"),
    _literal("the first columns turn", "- (D // 2 - D_HALF)", "- 0"),
    _literal("negative positions turn", "(positions >= 0) & (positions", "(positions", GARBAGE),
    _literal("a position past the angles turns", "positions < num_positions", "positions <= num_positions", GARBAGE),
    _literal(
        "positions are cut to 32 bits", "(positions < num_pos", "(positions.to(tl.int32) < num_pos", "*positions: garb*"
    ),
    _literal(
        "rows that do not turn are multiplied",
        "tl.where(rotates, first * cos + second * sin, first)",
        "first * cos + second * sin",
        "out_quant: values: infinite",
    ),
    _literal("a scale is of half a group", "D // GROUP, GROUP), 2)  #", "2 * D // GROUP, GROUP // 2), 2)  #"),
    _literal("scales are not rounded up", "0x7FFFFF) >> 23", "0) >> 23"),
    _literal("powers of two are doubled", "0x7FFFFF) >> 23", "0x800000) >> 23", "out_quant: values: powers*"),
    _literal("an ulp is lost", "0x7FFFFF) >> 23", "0x7FFFFE) >> 23", "out_quant: values: powers*"),
    _literal("there is no least scale", "tl.maximum(amax, 1e-10)", "amax", "out_quant: values: zero*"),
    _literal("the least scale is larger", "1e-10", "1e-9", "out_quant: values: tiny*"),
    _literal("the largest value is 240", "1.0 / 448.0", "1.0 / 240.0"),
    _literal("negative values do not count", "tl.abs(x).reshape", "x.reshape"),
    _literal("values beside an infinity stay", "exponents == 255, 0,", "exponents == 256, 0,", "*values: infinite*"),
    _literal("NaN is a number", "values == values, code, 0x7F", "values == values, code, 0x7E", "*values: NaN*"),
    _literal("heads lie one after another", "groups * out_group_stride", "groups * group_width"),
    _literal("heads of a group share columns", "+ inner * D", "+ 0 * inner"),
    _literal("tokens share rows", "+ wide_tokens * group_width", "+ 0 * wide_tokens"),
    _literal("scales of groups share memory", "groups * scales_group_stride", "groups * 0"),
    _literal("scales of heads share columns", "inner[:, None] * SCALES", "inner[:, None] * 0"),
    _literal("columns of scales are a token long", ".to(tl.int64) * scale_rows", ".to(tl.int64)"),
    _literal("no zeros are behind scales", "tl.static_range(1, PAD)", "tl.static_range(0, 0)", "out_quant: *1 tokens"),
    _literal("zeros are too few", "tl.static_range(1, PAD)", "tl.static_range(1, PAD - 1)", "out_quant: *1 tokens"),
    _literal("zeros are behind each token", "& (tokens == num_tokens - 1)", "", "out_quant: typical*", PACKED),
    _literal("packed scales are 4 bits wide", "shifts = 8 * ", "shifts = 4 * ", PACKED),
    _literal("packed scales are turned round", "8 * tl.arange(0, 4)", "24 - 8 * tl.arange(0, 4)", PACKED),
    _literal(
        "the last column is not stored", "columns[None, :], [1, 16])", "(columns % (D - 1))[None, :], [1, 16])", WIDE
    ),
    _literal("tokens are dropped", '"num_tokens": tokens,', '"num_tokens": tokens // 2,', file=WRAPPERS),
    _literal("heads are dropped", '"num_heads": heads,', '"num_heads": heads // 2,', file=WRAPPERS),
    _literal("scales have no padding", "-(-tokens // PAD) * PAD", "tokens", file=WRAPPERS),
    _literal(
        "packed scales are floats", "torch.int32 if packs else", "torch.float32 if packs else", PACKED, file=WRAPPERS
    ),
    _literal("other dims are taken", "if got != takes:", "if got == 0:", "out_quant refuses: nope_dim*", file=WRAPPERS),
    _literal(
        "missing positions are taken",
        "is not None or cos_sin_cache is not None",
        "is not None",
        "out_quant refuses: positions, missing*",
        file=WRAPPERS,
    ),
)

if __name__ == "__main__":
    mutants.MUTANTS = MUTANTS
    mutants.TARGETS = ["sm80"]  # it has no e4m3, so that kernels round by themselves
    mutants.TYPICAL = TYPICAL
    mutants.main()
