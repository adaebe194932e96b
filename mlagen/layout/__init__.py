"""Cache layouts: where every byte of a cached token is, and what it means. Needs the standard library alone."""

from mlagen.layout.layout import (
    CacheLayout,
    DataField,
    Field,
    LayoutError,
    PadField,
    ScaleRule,
    ScalesField,
    compose,
    indexer_layout_of,
    indexer_query_layout_of,
    layouts_of,
)

__all__ = [
    "CacheLayout",
    "DataField",
    "Field",
    "LayoutError",
    "PadField",
    "ScaleRule",
    "ScalesField",
    "compose",
    "indexer_layout_of",
    "indexer_query_layout_of",
    "layouts_of",
]
