"""Numbers of the indexer that scores pools of keys (kpool), GLM-5.3-Flash's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlagen.plan.family import Family
from mlagen.plan.indexer import IndexerRows, check_one_scale, indexer_rows_of
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import Spec

QUERY, COMPRESS, SEED = "fwht128_quant_fp8", "kpool_compress_and_write_cache", "kpool_seed_tail_cache"
UPDATE, EXPAND = "kpool_decode_update_and_maybe_write_cache_batched", "expand_pools_and_append_tail"
OVER_KEYS = (QUERY, COMPRESS, SEED, UPDATE)


@dataclass(frozen=True)
class KpoolTile:
    """Launch parameters of a kernel.

    Attributes:
        name: of the constant with them.
        wrappers: the wrappers that launch the kernel, or one like it.
        block: rows, tokens or indices that a program takes at once.
        num_warps: warps a program.
    """

    name: str
    wrappers: tuple[str, ...]
    block: int
    num_warps: int


# A program that takes pools is one warp: it changes a ring that it reads, and one warp needs no barrier for that.
TILES = (
    KpoolTile("QUERY", (QUERY,), 8, 2),
    KpoolTile("POOL", (COMPRESS, UPDATE), 4, 1),
    KpoolTile("SEED", (SEED,), 8, 1),
    KpoolTile("EXPAND", (EXPAND,), 256, 2),
)


@dataclass(frozen=True, kw_only=True)
class KpoolPlan(Family):
    """Numbers of the kernels around pools of keys.

    Attributes:
        rows: the keys of pools and the query; None if the package only expands pools.
        tiles: launch parameters of the package's kernels.
    """

    NAME: ClassVar = "kpool"
    WRAPPERS: ClassVar = {
        QUERY: Op((), {"q_fp8": None, "q_scale": None}),
        COMPRESS: Op(("kv_cache",)),
        SEED: Op(("tail_kv_cache",)),
        UPDATE: Op(("kv_cache", "tail_kv_cache")),
        EXPAND: Op((), {"indices": None}),
    }

    rows: IndexerRows | None
    tiles: tuple[KpoolTile, ...]

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> KpoolPlan | None:
        """Derives the numbers; see `Family`."""
        if not cls.wanted(spec):
            return None
        rows = indexer_rows_of(spec) if set(OVER_KEYS) & set(spec.wrappers) else None
        for name in OVER_KEYS:
            if rows is not None and name in spec.wrappers:
                check_one_scale(rows, name)
        tiles = tuple(tile for tile in TILES if set(tile.wrappers) & set(spec.wrappers))
        return cls(rows=rows, tiles=tiles)
