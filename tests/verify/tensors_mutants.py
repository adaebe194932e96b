"""Caches in several tensors, broken on purpose; `mutants.py` runs verification on each mutant.

Usage: python tensors_mutants.py PACKAGE_DIR WORK_DIR {dense|sparse}
"""

import re
import sys

import mutants
from mutants import Mutant

LAYOUT, CACHE = "_layout.py", "cache.py"
ALIGNED = "addresses |= _layout.tensor_addresses("
DENSE, SPARSE = "dense_decode", "sparse_decode"


def _literal(name: str, file: str, old: str, new: str, *only: str) -> Mutant:
    return Mutant(name, file, re.escape(old), new, only)


def _layout(name: str, old: str, new: str, *only: str) -> Mutant:
    return _literal(name, LAYOUT, old, new, *only)


def _strides(who: str, case: str, far: str) -> tuple[Mutant, ...]:
    """Addresses of rows in each tensor. `who` calls, `case` notices, and `far` has offsets past 2^31."""
    kpe = "page * kpe_cache_page_stride"
    return (
        _layout(f"{who}: RoPE has the latent's page stride", kpe, "page * page_stride", case),
        _layout(f"{who}: the latent has RoPE's page stride", "page * page_stride", kpe, case),
        _layout(f"{who}: RoPE has the latent's row stride", "position * kpe_cache_row", "position * row", case),
        _layout(f"{who}: page offsets are 32 bits wide", kpe, f"({kpe}).to(tl.int32)", far),
        _layout(f"{who}: RoPE begins where the latent does", "kpe_rows = kpe_cache_ptr", "kpe_rows = cache_ptr", case),
    )


REFUSED = (
    _layout("any dtype will do", "tensor, dtype, (", "tensor, tensor.dtype, (", "refuses: kpe_cache, dtype*"),
    _layout(
        "any number of pages will do", "(pages, page_size, columns)", "(None, None, columns)", "refuses: kpe_*page*"
    ),
    _layout("pages may overlap", "if size > 1 and stride < extent:", "if False:", "refuses: kpe_cache, pages of s*"),
)
OF_KIND = {
    "dense": (
        *_strides("attention", f"{DENSE}: typical*", f"{DENSE}: offsets: cache*"),
        _literal("only the latent's alignment counts", "dense_decode.py", ALIGNED, "(", f"{DENSE}: cache: odd beside*"),
        *REFUSED,
    ),
    "sparse": (
        *_strides("attention", f"{SPARSE}: typical*", f"{SPARSE}: offsets: cache*"),
        *_strides("writer", "writer: typical*", "writer: far pages*"),
        *_strides("gather", "gather: typical*", "gather: far pages*"),
        _layout("scales have RoPE's page stride", "page * ckv_scale_arr_page", "page * kpe_cache_page", "*: typical*"),
        _literal(
            f"only the latent's alignment counts in {SPARSE}", "sparse_decode.py", ALIGNED, "(", f"{SPARSE}: typical"
        ),
        _literal("only the latent's alignment counts in the cache", CACHE, ALIGNED, "(", "*: typical (*"),
        *REFUSED,
    ),
}

if __name__ == "__main__":
    kind = sys.argv.pop()
    mutants.MUTANTS = OF_KIND[kind]
    mutants.TYPICAL = mutants.MUTANTS[0].only[0]
    mutants.main()
