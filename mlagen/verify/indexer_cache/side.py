"""Facts of a package's spec about its indexer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mlagen.layout import CacheLayout, DataField, ScalesField, indexer_layout_of, indexer_query_layout_of
from mlagen.verify.call.facts import Facts
from mlagen.verify.paged.side import MAIN, Side

NAME = "indexer_cache"
WRITE, GATHER, QUERY, NORMALISE, KEYS_QUERY = (
    "indexer_k_quant_and_cache",
    "cp_gather_indexer_k_quant_cache",
    "fused_indexer_q_rope_quant",
    "indexer_k_norm_rope_store",
    "indexer_qk_rope_quant_and_cache",
)
SHORT = {WRITE: "write", GATHER: "gather", QUERY: "query", NORMALISE: "normalise", KEYS_QUERY: "keys, query"}
CACHE_ARGUMENT = {WRITE: "kv_cache", GATHER: "kv_cache", NORMALISE: "k_cache", KEYS_QUERY: "kv_cache"}
SLOTS_ARGUMENT = {WRITE: "slot_mapping", NORMALISE: "kv_slot_mapping", KEYS_QUERY: "slot_mapping"}


@dataclass(frozen=True)
class IndexerSide(Side):
    """The cache of the indexer's keys, and its query.

    Attributes:
        query: how a head of the query is quantised.
        num_heads: of the query.
        rope: columns that RoPE rotates.
        neox: it rotates i and i + rope / 2 together; else 2i and 2i + 1.
        first: the first column that it rotates.
        compress_ratio: tokens a key stands for.
    """

    query: CacheLayout
    num_heads: int
    rope: int
    neox: bool
    first: int
    compress_ratio: int

    @property
    def values(self) -> DataField:
        """The columns of a key."""
        return self.layout.data[0]

    @property
    def scales(self) -> ScalesField:
        """The scales of a key."""
        found = self.layout.scales_of(self.values)
        assert found is not None
        return found

    @property
    def packed(self) -> bool:
        """Whether two columns share a byte."""
        return self.values.dtype == "e2m1"


def side_of(spec: Mapping[str, Any]) -> IndexerSide | None:
    """The indexer of `SPEC["spec"]`; None without a cache of its keys."""
    layout, query, indexer = indexer_layout_of(spec), indexer_query_layout_of(spec), spec.get("indexer")
    if layout is None or query is None or indexer is None:
        return None
    rope = indexer["rope_head_dim"]
    return IndexerSide(
        module=MAIN,
        layout=layout,
        facts=Facts.of(spec),
        query=query,
        num_heads=indexer["num_heads"],
        rope=rope,
        neox=indexer["rope"] == "neox",
        first=indexer["head_dim"] - rope if indexer["rope_at"] == "last" else 0,
        compress_ratio=indexer["compress_ratio"],
    )


def takes_ratio(side: IndexerSide, wrappers: Collection[str]) -> bool:
    """Whether KEYS_QUERY has an argument compress_ratio, in a package with these wrappers."""
    return side.compress_ratio > 1 or NORMALISE in wrappers
