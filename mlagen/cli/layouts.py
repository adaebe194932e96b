"""Descriptions of cache layouts for `show`: bytes, scale rule, fingerprint, golden page, layouts of equal size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from mlagen.layout import CacheLayout, LayoutError, ScalesField, compose
from mlagen.spec.stored import INDEXER_DIMS, INDEXER_LAYOUTS, LAYOUT_DIMS, NAMED_LAYOUTS

PAGE = 64  # default page size, and the page size of golden pages, in tokens

Dims = tuple[int, int]  # kv_lora_rank, qk_rope_head_dim; for an indexer's key, head_dim and 0
LAYOUTS, DIMS = NAMED_LAYOUTS | INDEXER_LAYOUTS, LAYOUT_DIMS | INDEXER_DIMS


def named_layouts() -> Iterator[tuple[CacheLayout, Dims]]:
    """Yield each named layout with the dims of each of its models."""
    for name, every in DIMS.items():
        for dims in every:
            yield compose(LAYOUTS[name], *dims), dims


def as_json(layout: CacheLayout, dims: Dims, block_size: int | None) -> dict[str, Any]:
    """Return the description of a layout as plain values."""
    return {
        "name": layout.name,
        "columns": list(dims),
        "row_bytes": layout.row_bytes,
        "plane_bytes": list(layout.plane_bytes),
        "block_size": block_size or PAGE,
        "page_bytes": layout.page_bytes(block_size or PAGE),
        "page_multiple": layout.page_multiple,
        "fields": [dataclasses.asdict(field) for field in layout.fields],
        "byte_table": list(layout.byte_table),
        "scales": {field.name: field.formula for field in layout.fields if isinstance(field, ScalesField)},
        "fingerprint": layout.fingerprint,
        "golden_sha256": _golden_sha256(layout),
        "same_bytes": [other.name for other, _ in _of_equal_bytes(layout, dims)],
    }


def as_text(layout: CacheLayout, dims: Dims, block_size: int | None) -> Iterator[str]:
    """Yield the description of a layout as lines."""
    tokens = block_size or PAGE
    page = f"{layout.page_bytes(tokens):,} bytes a page of {tokens}"
    yield f"{layout.name} on {_columns(dims)} columns: {layout.row_bytes:,} bytes a token, {page}"
    yield from (f"  {line}" for line in layout.byte_table)
    for field in layout.fields:
        if isinstance(field, ScalesField):
            yield f"  {field.name.replace('_', ' ')}: {field.formula}"
    yield f"  fingerprint {layout.fingerprint}"
    golden = _golden_sha256(layout)
    if golden:
        yield f"  golden page of {PAGE} tokens: sha256 {golden}"
    for other, others_dims in _of_equal_bytes(layout, dims):
        alike = f"{other.name} on {_columns(others_dims)} columns also has {other.row_bytes:,} bytes a token"
        yield f"  warning: {alike}; only the fingerprint tells the two apart, not the tensor"


def table() -> Table:
    """Return a table of all named layouts."""
    shown = Table(box=None, header_style="bold", padding=(0, 2, 1, 0))
    shown.add_column("layout")
    shown.add_column("columns")
    shown.add_column("bytes a token", justify="right")
    shown.add_column("fields, by byte")
    shown.add_column(f"a page of {PAGE}", justify="right")
    for layout, dims in named_layouts():
        where = Text("\n".join(layout.byte_table))
        shown.add_row(layout.name, _columns(dims), f"{layout.row_bytes:,}", where, f"{layout.page_bytes(PAGE):,}")
    return shown


def _columns(dims: Dims) -> str:
    return " + ".join(str(columns) for columns in dims if columns)


def _of_equal_bytes(layout: CacheLayout, dims: Dims) -> list[tuple[CacheLayout, Dims]]:
    """Return other quantised layouts with as many bytes a token, on their models' dims or on these.

    Unquantised caches are left out: their dtype tells them apart.
    """
    found: dict[str, tuple[CacheLayout, Dims]] = {}
    for name, every in DIMS.items():
        for others_dims in dict.fromkeys((*every, dims)) if name in NAMED_LAYOUTS else every:
            try:
                other = compose(LAYOUTS[name], *others_dims)
            except LayoutError:
                continue
            if other.quantised and layout.quantised and other.row_bytes == layout.row_bytes:
                found.setdefault(other.fingerprint, (other, others_dims))
    return [pair for fingerprint, pair in found.items() if fingerprint != layout.fingerprint]


def _golden_sha256(layout: CacheLayout) -> str | None:
    """Return the SHA-256 of the golden page; None without torch, which encodes it."""
    try:
        from mlagen.layout.codec import golden_page, page_sha256
    except ImportError:
        return None
    return page_sha256(golden_page(layout, PAGE))
