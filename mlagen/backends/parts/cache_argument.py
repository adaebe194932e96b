"""Template context of wrappers for an argument that is a cache."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.backends.parts import layout
from mlagen.backends.parts.common import TORCH_DTYPES
from mlagen.backends.parts.layout_module import LayoutModule
from mlagen.layout import CacheLayout
from mlagen.plan import Caches, Plan, StoredCache

# Values of vLLM's kv_cache_dtype for a layout, in addition to the layout's name.
KV_CACHE_DTYPES = {"fp8_per_tensor": ("fp8", "fp8_e4m3")}
BLOCK_SIZE = 64  # tokens a page by default, if the spec does not say it


@dataclass(frozen=True)
class CacheArgument:
    """Template context of a cache as wrappers check and describe it.

    Attributes:
        row_constant: name of the constant with a row's elements.
        unit_name: "bytes" or "columns", the elements of the cache tensor.
        row_alignment: rows begin at multiples of this many elements.
        cache_dtypes: accepted dtypes, as entries of a tuple.
        cache_strides: the strides, joined by |, as text.
        cache_doc: text of the argument, for docstrings.
        takes_pages: whether a page may also be one row of bytes.
        checked_in: the module with the check of the cache, which others import; None: the wrappers' own.
    """

    row_constant: str
    unit_name: str
    row_alignment: int
    cache_dtypes: str
    cache_strides: str
    cache_doc: str
    takes_pages: bool
    checked_in: str | None


@dataclass(frozen=True)
class NamedArgument(CacheArgument):
    """Template context of a cache that wrappers also know by vLLM's name of its layout.

    Attributes:
        kv_cache_dtypes: accepted values of kv_cache_dtype, as entries of a tuple.
        kv_cache_dtypes_doc: the same for docstrings.
        default_kv_cache_dtype: its default, as text.
        block_size: tokens per page by default.
    """

    kv_cache_dtypes: str
    kv_cache_dtypes_doc: str
    default_kv_cache_dtype: str
    block_size: int


def _texts(strings: tuple[str, ...], name: str) -> str:
    """Return strings and the name of one more as entries of a tuple."""
    return ", ".join([*(f'"{string}"' for string in strings), name]) + ("" if strings else ",")


def _cache_doc(plan: Plan, cached: CacheLayout) -> str:
    """Return the text of the cache argument, for docstrings."""
    main = cached.parts[0]
    if not cached.quantised:
        row = main.row_bytes // layout.unit_of(cached)
        return f"{plan.spec.model.dtype} [pages, block_size, {row}], any block_size, any page and row stride."
    strides = "rows end to end, any page stride" if cached.planar else "any page and row stride"
    return f"8-bit [pages, block_size, {main.row_bytes}], any block_size, {strides}."


def context(plan: Plan, caches: Caches, cache: StoredCache, checked_in: str | None = None) -> NamedArgument:
    """Template context of a cache of attention as wrappers check and describe it; see CacheArgument.checked_in."""
    cached = cache.layout
    auto = ("auto", TORCH_DTYPES[plan.spec.model.dtype])
    names = (*(KV_CACHE_DTYPES.get(cached.name, ()) if cached.quantised else auto), cached.name)
    return NamedArgument(
        **vars(described(plan, cached, layout.context(plan, caches, cache), checked_in, takes_pages=True)),
        kv_cache_dtypes=_texts(names[:-1], "LAYOUT"),
        kv_cache_dtypes_doc=" or ".join(f'"{name}"' for name in names),
        default_kv_cache_dtype=f'"{names[0]}"',
        block_size=cache.block_size or BLOCK_SIZE,
    )


def described(
    plan: Plan,
    cached: CacheLayout,
    of_layout: LayoutModule,
    checked_in: str | None = None,
    *,
    takes_pages: bool = False,
) -> CacheArgument:
    """Template context of any cache as wrappers check and describe it; `of_layout` is that of its layout's module."""
    fnuz = any(field.dtype == "e4m3fnuz" for field in cached.data)
    bytes_dtypes = ("uint8", "int8", TORCH_DTYPES["e4m3fnuz" if fnuz else "e4m3"])
    dtypes = bytes_dtypes if cached.quantised else (TORCH_DTYPES[plan.spec.model.dtype],)
    return CacheArgument(
        row_constant=of_layout.row_constant,
        unit_name=of_layout.unit_name,
        row_alignment=of_layout.row_alignment,
        cache_dtypes=", ".join(f"torch.{name}" for name in dtypes) + ("," if len(dtypes) == 1 else ""),
        cache_strides="call.page_stride" if cached.planar else "call.page_stride | call.row_stride",
        cache_doc=_cache_doc(plan, cached),
        takes_pages=takes_pages,
        checked_in=checked_in,
    )
