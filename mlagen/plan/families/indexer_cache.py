"""Numbers of the kernels around the cache of the indexer's keys: writers, the gather, and the query's quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlagen.plan.family import Family
from mlagen.plan.indexer import IndexerRows, check_one_scale, check_scales, indexer_rows_of
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.tiles.chunks import next_power_of_2
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import Spec

QUERY, KEYS_QUERY = "fused_indexer_q_rope_quant", "indexer_qk_rope_quant_and_cache"
QUERY_HEADS = 16  # a program


@dataclass(frozen=True)
class RowsTile:
    """Launch parameters of a kernel that takes rows: tokens, or heads of one.

    Attributes:
        rows: that a program takes.
        num_warps: warps a program.
    """

    rows: int
    num_warps: int


@dataclass(frozen=True)
class KeysQueryTile:
    """Launch parameters of the kernel that takes keys and the query.

    Attributes:
        keys: tokens of a program that takes keys.
        heads: of a token, of a program that takes the query.
        num_warps: warps a program.
    """

    keys: int
    heads: int
    num_warps: int


@dataclass(frozen=True, kw_only=True)
class IndexerCachePlan(Family):
    """Numbers of the kernels around the cache of the indexer's keys.

    Attributes:
        rows: the rows that they write and read.
        write_tile: tokens of the writer.
        normalise_tile: tokens of the writer that normalises.
        gather_tile: tokens of the gather.
        query_tile: heads of a token.
        keys_query_tile: of programs of either kind.
    """

    NAME: ClassVar = "indexer_cache"
    WRAPPERS: ClassVar = {
        "indexer_k_quant_and_cache": Op(("kv_cache",)),
        "cp_gather_indexer_k_quant_cache": Op(("dst_k", "dst_scale")),
        "fused_indexer_q_rope_quant": Op((), {"q": None, "weights": None}, ("use_fp4", "weights_out_dtype")),
        "indexer_k_norm_rope_store": Op(("k_cache",), leaves_out=("use_fp4_cache",)),
        KEYS_QUERY: Op(("q_out", "weights_out", "kv_cache")),
    }

    rows: IndexerRows
    write_tile: RowsTile
    normalise_tile: RowsTile
    gather_tile: RowsTile
    query_tile: RowsTile
    keys_query_tile: KeysQueryTile

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> IndexerCachePlan | None:
        """Derives the numbers; see `Family`."""
        rows = indexer_rows_of(spec)
        if rows is None or not cls.wanted(spec):
            return None
        check_scales(rows)
        for name in (QUERY, KEYS_QUERY):
            if name in spec.wrappers:
                check_one_scale(rows, name)
        heads, warps = min(QUERY_HEADS, next_power_of_2(rows.indexer.num_heads)), 2 if rows.slice_columns else 4
        return cls(
            rows=rows,
            write_tile=RowsTile(16, 4),
            normalise_tile=RowsTile(8, 2),
            gather_tile=RowsTile(32, 1),
            query_tile=RowsTile(heads, warps),
            keys_query_tile=KeysQueryTile(4 * warps, heads, warps),
        )
