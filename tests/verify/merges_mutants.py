"""Merges with attention that has LSE of base 2 and a required sink, broken on purpose.

Usage: python merges_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py.
"""

import re

import mutants
from mutants import Mutant

MERGE, KERNELS = "merge_states.py", "_merge_states_kernels.py"
CHAIN, SINKS = "sparse_fwd: merged: two parts, sink (flash_*", "merge*: sink: random"
TYPICAL = "merge 96: typical"


def _literal(name: str, file: str, old: str, new: str, *only: str) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), only)


MERGES_MUTANTS = (
    _literal("two parts are of base e", MERGE, "BASES[LSE_BASE]", 'BASES["e"]', CHAIN),
    _literal("parts are of base e", MERGE, "LSE_BASE if lse_base is None", '"e" if lse_base is None', CHAIN),
    _literal("sinks are left out", KERNELS, "mask=heads < num_sinks", "mask=heads < 0", CHAIN, SINKS),
    _literal("heads have the first one's sink", KERNELS, "attn_sink_ptr + heads", "attn_sink_ptr + heads * 0", SINKS),
    _literal("sinks are of the LSE's base", KERNELS, "sink * from_natural", "sink", CHAIN, SINKS),
    _literal("the sink joins the LSE", KERNELS, "tl.log2(divisor)", "tl.log2(1.0 / scale)", SINKS),
    _literal("every merge adds the sink twice", KERNELS, "(divisor + _", "(divisor + 2 * _", CHAIN, SINKS),
    _literal(
        "none is taken for a sink of 0", KERNELS, 'other=float("-inf"))\n    return', "other=0.0)\n    return", TYPICAL
    ),
    _literal(
        "an empty row has the other infinity",
        KERNELS,
        'l == 0, float("inf")',
        'l == 0, float("-inf")',
        "merge*: lse: none",
    ),
    _literal(
        "the scale is a factor", KERNELS, "(1.0 / tl.load(output_scale_ptr))", "tl.load(output_scale_ptr)", "*_scale"
    ),
    _literal("a scale is not looked at", KERNELS, "out * (1.0 / tl.load(output_scale_ptr))", "out", "*_scale"),
    _literal(
        "tokens of LSE lie side by side", KERNELS, "tokens * suffix_lse_token_stride", "tokens", "merge 96: layout*"
    ),
    _literal(
        "tokens of a part's LSE do", KERNELS, "tokens * lses_token_stride", "tokens", "merge parts 96: lse_layout*"
    ),
    _literal("tokens of the whole's LSE do", KERNELS, "tokens * out_lse_token_stride", "tokens", "merge*: lse_layout*"),
    _literal("LSE [T, H] are taken for [H, T]", MERGE, "lse.transpose(-1, -2)", "lse", "merge*: lse_layout*"),
    _literal(
        "strides that differ are no overlap",
        MERGE,
        "        return True\n    apart",
        "        return False\n    apart",
        "refuses*",
    ),
    _literal("LSE that meet share memory", MERGE, "and _share(output_lse, lse)", "", "merge 96: in place: LSE*"),
    _literal("no LSE shares memory", MERGE, "_meet(output_lse, lse) and", "False and", "refuses: output_lse*"),
    _literal(
        "attention's result is quantised as it lies",
        "sparse_fwd.py",
        "out, lse.T, output_scale",
        "out.flip(1), lse.T, output_scale",
        "sparse_fwd: merged: one part*",
    ),
)

if __name__ == "__main__":
    mutants.MUTANTS, mutants.TYPICAL = MERGES_MUTANTS, TYPICAL
    mutants.main()
