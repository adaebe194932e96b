"""Numbers of V4.1's compressor: latents of groups of tokens, and their insertion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlagen.plan.family import Family
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches, StoredCache
from mlagen.plan.tiles.chunks import Chunk, make_chunks
from mlagen.plan.tiles.tuned import Tuned
from mlagen.plan.tiles.windows import CompressTile, warps_of
from mlagen.spec import Spec

POOL, INSERT = "fused_save_compress_norm", "rope_quant_insert"
INSERT_TILE = (1, 1)  # a latent and a warp: many such programs run at once
SAVED_ROWS = 2  # states that a request's program loads at once
BLOCK_W = 2  # tokens of a group that are loaded at once: V4.1's groups have one or two
FEW_TOKENS = 4096  # calls of more have enough programs for half of the warps, each with twice the loads under way


@dataclass(frozen=True, kw_only=True)
class LatentsPlan(Family):
    """Numbers of the kernels of latents.

    Attributes:
        caches: the caches of attention.
        blocks, states: blocks of a latent's columns, and of a state's.
        saved_rows: states that a program loads at once.
        one_tile: of the kernel that makes latents, for groups of one token.
        tiles: (most tokens of a call, tile) for longer groups; 0: any.
        insert_tile: latents that a program inserts, and its warps.
    """

    NAME: ClassVar = "latents"
    WRAPPERS: ClassVar = {POOL: Op(("state_cache", "latent_out")), INSERT: Op(("kv_cache",))}

    caches: Caches
    blocks: tuple[Chunk, ...]
    states: tuple[Chunk, ...]
    saved_rows: int
    one_tile: CompressTile
    tiles: tuple[tuple[int, CompressTile], ...]
    insert_tile: tuple[int, int]

    @property
    def cache(self) -> StoredCache:
        """The cache of attention that latents go to: the second one if there is one."""
        return self.caches.extra or self.caches.main

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> LatentsPlan | None:
        """Derives the numbers; see `Family`."""
        if caches is None or not cls.wanted(spec):
            return None
        columns = spec.model.d_qk
        warps = warps_of(columns)
        one, few, many = (CompressTile(BLOCK_W, count) for count in (max(1, warps // 4), 2 * warps, warps))
        blocks = make_chunks([("row", columns)], 0)
        return cls(
            caches=caches,
            blocks=blocks,
            states=make_chunks([("state", 2 * columns)], 0),
            saved_rows=SAVED_ROWS,
            one_tile=one,
            tiles=((FEW_TOKENS, few), (0, many)),
            insert_tile=INSERT_TILE,
        )
