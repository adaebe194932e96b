"""Numbers of the compressor: the states of tokens, and the rows made of windows of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlagen.plan.family import Family
from mlagen.plan.indexer import IndexerRows, indexer_rows_of
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches, StoredCache
from mlagen.plan.tiles.tuned import Tuned
from mlagen.plan.tiles.windows import CompressTile, warps_of
from mlagen.spec import Spec

SAVE, COMPRESS = "save_partial_states", "compress_norm_rope_store"
LONG_WINDOW = 16  # most tokens of a window that few warps take
SHORT_FEW = 2048  # most tokens of a call of short windows that is bound by the latency of a program
LONG_FEW, LONG_SOME = 256, 16384  # most tokens of long windows that are: with a program a token, and with one of many
LONG_TOKENS = 128  # V4's longer windows: one of them ends in so many tokens
LONG_PROGRAMS = 2  # per multiprocessor: as many take long windows at the same time


@dataclass(frozen=True)
class SaveTile:
    """Launch parameters of the kernel that saves states.

    Attributes:
        block_t: tokens that a program takes.
        block_c: columns of their states.
        num_warps: warps a program.
    """

    block_t: int
    block_c: int
    num_warps: int


TokenTiles = tuple[tuple[int | None, CompressTile], ...]  # (most tokens of a call, tile); None: any number
Tiles = tuple[TokenTiles, TokenTiles]  # of short windows, and of long ones


@dataclass(frozen=True, kw_only=True)
class CompressorPlan(Family):
    """Numbers of the compressor's kernels.

    Attributes:
        caches: the caches of attention.
        keys: the indexer's keys, which may be compressed rows, too; None without, or with RoPE of other pairs.
        save_tile: the tile of states.
        row_tiles, key_tiles: the tiles of rows of attention's cache and of the indexer's.
        long_window: most tokens of a short window.
        programs: per multiprocessor, where programs take several tokens.
    """

    NAME: ClassVar = "compressor"
    WRAPPERS: ClassVar = {SAVE: Op(("state_cache",)), COMPRESS: Op(("kv_cache",))}

    caches: Caches
    keys: IndexerRows | None
    save_tile: SaveTile
    row_tiles: Tiles
    key_tiles: Tiles
    long_window: int
    programs: int

    @property
    def cache(self) -> StoredCache:
        """The cache of attention that compressed rows go to: the second one if there is one."""
        return self.caches.extra or self.caches.main

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> CompressorPlan | None:
        """Derives the numbers; see `Family`."""
        if caches is None or not cls.wanted(spec):
            return None
        keys = indexer_rows_of(spec)
        if keys is not None and (keys.indexer.rope != "gptj" or keys.rope_start % 2 or keys.scales is None):
            keys = None
        dims = spec.model
        return cls(
            caches=caches,
            keys=keys,
            save_tile=SaveTile(1, 512, 4),
            row_tiles=_tiles(dims.d_qk),
            key_tiles=_tiles(keys.indexer.head_dim if keys else 0),
            long_window=LONG_WINDOW,
            programs=LONG_PROGRAMS,
        )


def _tiles(columns: int) -> Tiles:
    """The tiles of rows of so many columns. A thread has four of them, or more.

    Where tokens are many, as in a prefill, a thread has fewer tokens of a window, so that more programs fit.
    """
    warps = warps_of(columns)
    short = ((SHORT_FEW, CompressTile(8, max(warps, 2))), (None, CompressTile(2 if warps == 4 else 4, warps)))
    long = (
        (LONG_FEW, CompressTile(8, 4 * warps, apart=True)),
        (LONG_SOME, CompressTile(8, 4 * warps, apart=True, block_t=LONG_TOKENS)),
        (None, CompressTile(8, warps, block_t=LONG_TOKENS)),
    )
    return short, long
