"""Template context of wrappers for an argument that is a cache."""

from __future__ import annotations

from typing import Any

from mlagen.backends.parts import layout
from mlagen.backends.parts.common import TORCH_DTYPES
from mlagen.backends.parts.layout_module import LayoutModule
from mlagen.layout import CacheLayout
from mlagen.plan import Caches, Plan, StoredCache

# Values of vLLM's kv_cache_dtype for a layout, in addition to the layout's name.
KV_CACHE_DTYPES = {"fp8_per_tensor": ("fp8", "fp8_e4m3")}
BLOCK_SIZE = 64  # tokens a page by default, if the spec does not say it


def _texts(strings: tuple[str, ...], name: str) -> str:
    """Return strings and the name of one more as entries of a tuple."""
    return ", ".join([*(f'"{string}"' for string in strings), name]) + ("" if strings else ",")


def _cache_doc(plan: Plan, cached: CacheLayout) -> str:
    """Return the text of the cache argument, for docstrings."""
    if not cached.quantised:
        row = cached.row_bytes // layout.unit_of(cached)
        return f"{plan.spec.model.dtype} [pages, block_size, {row}], any block_size, any page and row stride."
    strides = "rows end to end, any page stride" if cached.planar else "any page and row stride"
    return f"8-bit [pages, block_size, {cached.row_bytes}], any block_size, {strides}."


def context(plan: Plan, caches: Caches, cache: StoredCache) -> dict[str, Any]:
    """Template context of a cache of attention as wrappers check and describe it, by name of its layout too."""
    cached = cache.layout
    auto = ("auto", TORCH_DTYPES[plan.spec.model.dtype])
    names = (*(KV_CACHE_DTYPES.get(cached.name, ()) if cached.quantised else auto), cached.name)
    return {
        **described(plan, cached, layout.context(plan, caches, cache)),
        "takes_pages": True,
        "kv_cache_dtypes": _texts(names[:-1], "LAYOUT"),
        "kv_cache_dtypes_doc": " or ".join(f'"{name}"' for name in names),
        "default_kv_cache_dtype": f'"{names[0]}"',
        "block_size": cache.block_size or BLOCK_SIZE,
    }


def described(plan: Plan, cached: CacheLayout, of_layout: LayoutModule) -> dict[str, Any]:
    """Template context of any cache as wrappers check and describe it; `of_layout` is that of its layout's module."""
    fnuz = any(field.dtype == "e4m3fnuz" for field in cached.data)
    bytes_dtypes = ("uint8", "int8", "float8_e4m3fnuz" if fnuz else "float8_e4m3fn")
    dtypes = bytes_dtypes if cached.quantised else (TORCH_DTYPES[plan.spec.model.dtype],)
    return {
        **{name: getattr(of_layout, name) for name in ("row_constant", "unit_name", "row_alignment")},
        "cache_dtypes": ", ".join(f"torch.{name}" for name in dtypes) + ("," if len(dtypes) == 1 else ""),
        "cache_strides": "call.page_stride" if cached.planar else "call.page_stride | call.row_stride",
        "cache_doc": _cache_doc(plan, cached),
    }
