"""Numbers of dense attention over a paged cache: tiles, and how a batch's keys are shared out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mlagen.plan.cache import CachePlan
from mlagen.plan.sm90 import Sm90Plan
from mlagen.plan.sparse_decode import CachedRow, SparseDecodePlan, sparse_decode, unaligned_table
from mlagen.plan.targets import TARGETS, Target
from mlagen.plan.tiles import WIDE_ROWS, Tile, TileRow
from mlagen.spec import DenseAttention, Spec

DENSE_DECODE_WRAPPERS = ("flash_mla_with_kvcache", "decode_attention_fwd")
# Query tokens of a request share a tile, so that calls have more rows than the model has heads.
MOST_ROWS = 128
REQUEST_OVERHEAD = 1
COMBINE_UNITS = 6
BATCH_INVARIANT_SPLIT = 1024
BLOCK_B = 256
WINDOW_BLOCK_N = 32


@dataclass(frozen=True)
class DenseDecodePlan(SparseDecodePlan):
    """Numbers of the kernel of dense attention; its tiles hold rows, a head of a query token each.

    Attributes:
        request_overhead: fixed cost of a request in a program, in steps of BLOCK_N keys.
        combine_units: what sharing requests costs, partials and their merge, in steps of BLOCK_N keys of a program.
        batch_invariant_split: keys a split where its bounds depend on the row alone.
        block_b: requests whose lengths a program reads at a time.
    """

    request_overhead: int = REQUEST_OVERHEAD
    combine_units: int = COMBINE_UNITS
    batch_invariant_split: int = BATCH_INVARIANT_SPLIT
    block_b: int = BLOCK_B


def spills_with_window(tile: Tile, target: Target) -> bool:
    """Whether the bounds of a window find no registers beside the tile: wgmma's widest spills in its loop."""
    return (tile.block_h, target.dot) == (WIDE_ROWS, "wgmma") and tile.block_n > WINDOW_BLOCK_N


def _spared(row: TileRow, cached: CachedRow, target: Target) -> TileRow:
    """The row with a tile that leaves registers for the bounds of a window."""
    if not spills_with_window(row.tile, target):
        return row
    tile = replace(row.tile, block_n=WINDOW_BLOCK_N)
    return cached.row(tile, target, "with registers for the bounds of a window", row.max_heads, row.max_tokens)


def make_dense_decode_plan(
    spec: Spec,
    cached: CachedRow,
    cache: CachePlan,
    sm90: Sm90Plan | None = None,
    tuned: Mapping[str, Sequence[TileRow]] | None = None,
) -> DenseDecodePlan:
    """Derives the numbers.

    Args:
        spec: the validated spec.
        cached: the row.
        cache: the cache's plan, which says in what blocks a row is read.
        sm90: the sm90 kernel's numbers; None without one.
        tuned: rows of the tile table that a sweep found, by target; targets without take the defaults.

    Raises:
        LimitError: a target cannot hold any tile of these rows; one line with the arithmetic.
    """
    found = tuned or {}

    def rows(name: str) -> tuple[TileRow, ...]:
        chosen = sparse_decode(MOST_ROWS, cached, TARGETS[name])
        if not isinstance(spec.attention, DenseAttention) or spec.attention.window is None:
            return chosen
        return tuple(_spared(row, cached, TARGETS[name]) for row in chosen)

    return DenseDecodePlan(
        cached=cached,
        loaded=cache.chunks,
        tiles=tuple((name, tuple(found.get(name) or rows(name))) for name in spec.targets),
        unaligned=unaligned_table(cached, spec.targets),
        sm90=sm90,
    )
