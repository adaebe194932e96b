"""Packages with splits that round their accumulators, broken on purpose; `mutants.py` runs verification on each.

Usage: python partials_mutants.py PACKAGE_DIR WORK_DIR {rows|sparse_decode|v4_fp16|dense}
"""

import re
import sys

import mutants
from mutants import SPLITS, Mutant

DENSE, DENSE_KERNELS = "dense_decode.py", "_dense_decode_kernels.py"
FEW, BESIDE, APART = "*few indices*", "*tokens of a request keep*", "*scales far apart, in splits*"


def _literal(name: str, file: str, old: str, new: str, only: str) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), (only,))


OF_PACKAGE = {
    "rows": (
        _literal(
            "one split of a row is not rounded",
            SPLITS,
            "self.num_splits > 1 or self.batch_invariant",
            "self.num_splits > 1",
            FEW,
        ),
        _literal("rows are as close as V's columns", SPLITS, "* PARTIAL_COLUMNS", "* D_V", "*workspace*"),
        _literal(
            "statistics stand where those of fp32 would",
            SPLITS,
            "PARTIAL_FLOATS\n    tl.store",
            "D_V\n    tl.store",
            "*splits: 3",
        ),
        _literal(
            "the workspace is as large as that of fp32",
            SPLITS,
            "(PARTIAL_FLOATS.value + 2)",
            "(D_V.value + 2)",
            "*workspace*",
        ),
        _literal("the merge adds without weights", SPLITS, "part * weight[:, None]", "part", "*splits: 3"),
    ),
    "sparse_decode": (
        _literal(
            "one split over a cache is not rounded",
            SPLITS,
            "self.num_splits > 1 or self.batch_invariant",
            "self.num_splits > 1",
            FEW,
        ),
        _literal(
            "accumulators lose further bits",
            SPLITS,
            "acc.to(tl.bfloat16)",
            "acc.to(tl.float8e5).to(tl.bfloat16)",
            "*workspace*",
        ),
        _literal(
            "row sums are rounded too",
            SPLITS,
            "tl.sum(part_l * weight, 0)",
            "tl.sum(part_l.to(tl.bfloat16).to(tl.float32) * weight, 0)",
            "*workspace*",
        ),
    ),
    "v4_fp16": (
        _literal(
            "rows of all sizes are stored as they are",
            SPLITS,
            "tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)",
            "tl.where(largest > 0, 141, 141)",
            APART,
        ),
        _literal("the merge leaves a row's power of two out", SPLITS, "(weight * power)", "weight", APART),
        _literal("a row's power of two is twice as large", SPLITS, "(exponent - 14)", "(exponent - 13)", APART),
    ),
    "dense": (
        _literal(
            "a request of one program is not rounded",
            DENSE_KERNELS,
            "(end_kv_block == kv_blocks) & (overhead > 0)",
            "(end_kv_block == kv_blocks)",
            BESIDE,
        ),
        _literal("a request of one program is not merged", SPLITS, " & (later_slots > 0)", "", BESIDE),
        _literal(
            "a call of one program is not merged",
            DENSE,
            "return self.slots > 0",
            "return self.programs > 1",
            "*invariant: one program",
        ),
        _literal(
            "the table stands where that of fp32 would",
            DENSE_KERNELS,
            "* ROW_FLOATS)",
            "* (_splits.D_V + 2))",
            "*shares: 7*",
        ),
    ),
}
TYPICAL = {
    "rows": "sparse_fwd: splits: 3",
    "sparse_decode": "sparse_decode: typical",
    "v4_fp16": "sparse_decode: typical",
    "dense": "dense_decode: typical",
}

if __name__ == "__main__":
    package = sys.argv.pop()
    mutants.MUTANTS, mutants.TYPICAL = OF_PACKAGE[package], TYPICAL[package]
    mutants.main()
