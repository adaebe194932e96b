"""Packages that take Q as a pair, broken where they read the second part; `mutants.py` runs verification on each.

Usage: python pairs_mutants.py PACKAGE_DIR WORK_DIR {rows|cache|dense}
"""

import re
import sys

import mutants
from mutants import ATTENTION, KERNELS, SPLITS, Mutant

PAIR, ODD, FAR = "*query: pair", "*query: pair, one odd", "*query: pair, far"
OF_WRAPPERS = {name: f"{name} (*" for name in (PAIR, ODD, FAR)}  # their cases are one a wrapper
CACHE, CACHE_KERNELS = "sparse_decode.py", "_sparse_decode_kernels.py"
DENSE, DENSE_KERNELS = "dense_decode.py", "_dense_decode_kernels.py"


def _literal(name: str, file: str, old: str, new: str, only: str) -> Mutant:
    return Mutant(name, file, re.escape(old), new.replace("\\", r"\\"), (only,))


REFUSED = (
    _literal(
        "any number of tensors is a pair", SPLITS, "if len(q) != 2:", "if len(q) < 1:", "*refuses: q, a pair of *"
    ),
    _literal(
        "the second part has any sizes",
        SPLITS,
        "(*shape[:-1], D_ROPE)",
        "(*leading, D_ROPE)",
        "*refuses: q, a pair of other heads*",
    ),
    _literal("the second part lies anywhere", SPLITS, "latent.device)", "None)", "*refuses: q, a pair on two devices*"),
)
OF_PACKAGE = {
    "rows": (
        _literal(
            "RoPE is read behind the latent", KERNELS, "inputs.q_rope_ptr - D_V", "inputs.q_ptr", OF_WRAPPERS[PAIR]
        ),
        _literal(
            "RoPE has the latent's strides",
            KERNELS,
            "* inputs.q_rope_head_stride",
            "* inputs.q_head_stride",
            OF_WRAPPERS[PAIR],
        ),
        _literal("RoPE is the first token's", KERNELS, " + token * inputs.q_rope_token_stride", "", OF_WRAPPERS[PAIR]),
        _literal(
            "offsets of RoPE are 32 bits wide",
            KERNELS,
            "token * inputs.q_rope_token_stride",
            "(token * inputs.q_rope_token_stride).to(tl.int32)",
            OF_WRAPPERS[FAR],
        ),
        _literal("RoPE's address is not looked at", ATTENTION, " | q_rope.data_ptr()", "", OF_WRAPPERS[ODD]),
        *REFUSED,
    ),
    "cache": (
        _literal("RoPE is read behind the latent", CACHE_KERNELS, "query.q_rope_ptr - D_V", "query.q_ptr", PAIR),
        _literal(
            "RoPE has the latent's strides", CACHE_KERNELS, "* query.q_rope_head_stride", "* query.q_head_stride", PAIR
        ),
        _literal("RoPE is the request's first", CACHE_KERNELS, "position * query.q_rope_token_stride", "0", PAIR),
        _literal(
            "offsets of RoPE are 32 bits wide",
            CACHE_KERNELS,
            "request * query.q_rope_request_stride",
            "(request * query.q_rope_request_stride).to(tl.int32)",
            FAR,
        ),
        _literal("RoPE's address is not looked at", CACHE, " | q_rope.data_ptr()", "", ODD),
        *REFUSED,
    ),
    "dense": (
        _literal("RoPE is read behind the latent", DENSE_KERNELS, "q_rope_ptr - D_V", "q_ptr", PAIR),
        _literal(
            "RoPE has the latent's strides",
            DENSE_KERNELS,
            "heads.to(tl.int64) * q_rope_head_stride",
            "heads.to(tl.int64) * q_head_stride",
            PAIR,
        ),
        _literal(
            "RoPE is the request's first",
            DENSE_KERNELS,
            "positions.to(tl.int64) * q_rope_token_stride",
            "0",
            "*query: pair, s_q 3",
        ),
        _literal(
            "offsets of RoPE are 32 bits wide",
            DENSE_KERNELS,
            "tl.cast(request, tl.int64) * q_rope_request_stride",
            "(tl.cast(request, tl.int64) * q_rope_request_stride).to(tl.int32)",
            FAR,
        ),
        _literal("RoPE's address is not looked at", DENSE, " | q_rope.data_ptr()", "", ODD),
        *REFUSED,
    ),
}
TYPICAL = {"rows": "sparse_fwd: splits: 3", "cache": "sparse_decode: typical", "dense": "dense_decode: typical"}

if __name__ == "__main__":
    package = sys.argv.pop()
    mutants.MUTANTS, mutants.TYPICAL = OF_PACKAGE[package], TYPICAL[package]
    mutants.main()
