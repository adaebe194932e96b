"""Windows of multi-head attention broken on purpose; `mutants.py` runs verification on each of them.

Usage: python dense_fwd_window_mutants.py PACKAGE_DIR WORK_DIR [NAMES], as mutants.py. The package is that of
dense_fwd_mutants.py, with a window.
"""

import re

import mutants
from mutants import Mutant

ATTENTION, KERNELS = "dense_fwd.py", "_dense_fwd_kernels.py"
WINDOWS, POINTERS = "dense_fwd: window: *", "dense_fwd: window: all odd"


def _literal(name: str, old: str, new: str, *only: str, file: str = KERNELS) -> Mutant:
    return Mutant(name, file, re.escape(old), new, only or (WINDOWS,))


WINDOW_MUTANTS = (
    _literal(
        "a row sees one key too many", "least = rows + (s_k - s_q + 1) - window", "least = rows + (s_k - s_q) - window"
    ),
    _literal(
        "a row sees one key too few",
        "least = rows + (s_k - s_q + 1) - window",
        "least = rows + (s_k - s_q + 2) - window",
    ),
    _literal("the bound is not masked", " & (keys[None, :] >= least[:, None])", "", WINDOWS, POINTERS),
    _literal(
        "the first step is left out",
        "0) // BLOCK_N * BLOCK_N\n    # From",
        "0) // BLOCK_N * BLOCK_N + BLOCK_N\n    # From",
    ),
    _literal("unmasked steps begin too early", "- window, 0), BLOCK_N) * BLOCK_N", "- window, 0), BLOCK_N) * 0"),
    _literal("steps are taken twice", "whole = tl.maximum(whole, inside)", "whole = whole"),
    _literal("the left side is the window", "min(left + 1, MAX_WINDOW)", "min(left, MAX_WINDOW)", file=ATTENTION),
    _literal("no bound is a window of nothing", "MAX_WINDOW if left < 0 else ", "", file=ATTENTION),
    _literal("a right side of 0 is no bound", "causal or right == 0", "causal", file=ATTENTION),
    _literal("a right side is taken", "sides[1] not in (-1, 0)", "False", "refuses: window_size*", file=ATTENTION),
    _literal("any left side is taken", "sides[0] < -1", "False", "refuses: window_size*", file=ATTENTION),
)

if __name__ == "__main__":
    mutants.MUTANTS = WINDOW_MUTANTS
    mutants.TYPICAL = "dense_fwd: typical, causal"
    mutants.main()
