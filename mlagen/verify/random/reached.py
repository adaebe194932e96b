"""The sm90 modules of packages, and the random calls that reach each."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from mlagen.verify.random.syncs import sm90_files
from mlagen.verify.random.tally import FREE

# For each module, the family and the forced kernel with calls that reach it. FREE: several kernels are in it, and calls
# that are not forced reach all.
REACHED = {
    "_topk_sm90": ("topk", FREE),
    "_mqa_logits_sm90": ("mqa_logits", "sm90"),
    "_paged_mqa_logits_sm90": ("mqa_logits", "sm90"),
    "_sparse_fwd_sm90": ("sparse_fwd", "sm90"),
    "_sparse_fwd_sm90_swap_ab": ("sparse_fwd", "sm90_swap_ab"),
    "_sparse_fwd_sm90_shared": ("sparse_fwd", "sm90_shared"),
    "_index_union_sm90": ("sparse_fwd", "sm90_shared"),
    "_sparse_decode_sm90": ("sparse_decode", "sm90"),
    "_sparse_decode_sm90_e4m3": ("sparse_decode", "sm90_e4m3"),
    "_dense_decode_sm90": ("dense_decode", "sm90"),
    "_dense_decode_sm90_swap_ab": ("dense_decode", "sm90_swap_ab"),
    "_dense_decode_sm90_rows32": ("dense_decode", "sm90_rows32"),
    "_dense_decode_sm90_q_halves": ("dense_decode", "sm90_q_halves"),
    "_dense_fwd_sm90": ("dense_fwd", "sm90"),
}


def modules_of(folders: Sequence[Path], only: str) -> dict[str, Path]:
    """The first package that holds each module of sm90 kernels."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sm90_files(folder):
            if fnmatch.fnmatchcase(path.stem, only):
                found.setdefault(path.stem, folder)
    return found
