"""Facts of a package's spec about its pools of keys, and the wrappers around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.layout import CacheLayout, indexer_layout_of, indexer_query_layout_of
from mlagen.verify.call.facts import Facts
from mlagen.verify.paged.side import MAIN, Side

NAME = "kpool"
QUERY, COMPRESS, SEED = "fwht128_quant_fp8", "kpool_compress_and_write_cache", "kpool_seed_tail_cache"
UPDATE, EXPAND = "kpool_decode_update_and_maybe_write_cache_batched", "expand_pools_and_append_tail"
SHORT = {QUERY: "query", COMPRESS: "pools", SEED: "seed", UPDATE: "update", EXPAND: "expand"}
SCHEDULE, FLAT_PAIR, PAGED_PAIR = "get_paged_mqa_logits_metadata", "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"
GATHER, PREFILL, DECODE = "cp_gather_indexer_k_quant_cache", "top_k_per_row_prefill", "top_k_per_row_decode"
# From keys of pools to the tokens of the best ones.
NEEDED = (QUERY, COMPRESS, EXPAND, SCHEDULE, PAGED_PAIR, DECODE, FLAT_PAIR, GATHER, PREFILL)
COLUMNS = 128  # of a key


@dataclass(frozen=True)
class KpoolSide(Side):
    """The cache of the keys of pools, and the query.

    Attributes:
        query: how a row of the query is quantised.
    """

    query: CacheLayout

    @property
    def rounds(self) -> bool:
        """Whether scales of keys are powers of two."""
        scales = self.layout.scales_of(self.layout.data[0])
        return scales is not None and scales.rule.rounding == "power_of_two"

    @property
    def values_dtype(self) -> torch.dtype:
        """The dtype of a quantised query."""
        return torch.float8_e4m3fnuz if self.fnuz else torch.float8_e4m3fn


def side_of(spec: Mapping[str, Any]) -> KpoolSide | None:
    """The pools of `SPEC["spec"]`; None without a cache of the indexer's keys."""
    layout, query = indexer_layout_of(spec), indexer_query_layout_of(spec)
    if layout is None or query is None:
        return None
    return KpoolSide(MAIN, layout, Facts.of(spec), query)
