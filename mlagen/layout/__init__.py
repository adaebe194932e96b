"""Cache layouts: position and meaning of every byte of a cached token. Needs only the standard library."""

from mlagen.layout.layout import (
    CacheLayout,
    DataField,
    Field,
    LayoutError,
    PadField,
    ScaleRule,
    ScalesField,
    compose,
)
from mlagen.layout.of_spec import indexer_layout_of, indexer_query_layout_of, layouts_of

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
