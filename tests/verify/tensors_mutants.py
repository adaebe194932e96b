"""Caches in several tensors, broken on purpose; `mutants.py` runs verification on each mutant.

Usage: python tensors_mutants.py PACKAGE_DIR WORK_DIR {dense|sparse}
"""

import re
import sys

import mutants
from mutants import Mutant

LAYOUT = "_layout.py"
KPE, SCALES = "kpe_cache", "ckv_scale_arr"


def _literal(name: str, file: str, old: str, new: str, *only: str) -> Mutant:
    return Mutant(name, file, re.escape(old), new, only)


def _read(case: str, file: str, alignment: str, sizes: str) -> tuple[Mutant, ...]:
    """Mutants of attention: `case` is a pattern of its cases, and the others are its module and two lines of it."""
    return (
        _literal("pages of RoPE are as far apart as the latent's", LAYOUT, f"page * {KPE}_page", "page * page", case),
        _literal("pages of the latent are as far apart as RoPE's", LAYOUT, "page * page", f"page * {KPE}_page", case),
        _literal("rows of RoPE are as far apart as the latent's", LAYOUT, f"position * {KPE}_row", "position * row", case),
        _literal("offsets are 32 bits wide", LAYOUT, "page, position = page.to(tl.int64)", "page, position = page", far(case)),
        _literal("only the first tensor is aligned", file, alignment, "", f"{case.partition(':')[0]}: cache: odd beside"),
        _literal("strides of a single page count", LAYOUT, "page_stride if pages > 1 else 0", "page_stride", "*one page, odd*"),
        _literal("any dtype will do", LAYOUT, "tensor, dtype, (", "tensor, tensor.dtype, (", f"refuses: {KPE}*dtype*"),
        _literal("pages may overlap", LAYOUT, "size > 1 and stride < extent", "False", f"refuses: {KPE}*stride 0*"),
        _literal("pages of another number will do", LAYOUT, "(pages, page_size, columns)", "(None, page_size, columns)", f"refuses: {KPE}*page too*"),
        _literal("a size is not checked", file, sizes, "", f"refuses: {KPE}*"),
    )


def far(case: str) -> str:
    """The cases of far caches."""
    return f"{case.partition(':')[0]}: offsets*"
