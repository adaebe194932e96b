"""Plans that all families of attention over latent rows share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlagen.plan.family import TiledFamily
from mlagen.plan.rows import Caches, out_quant_of
from mlagen.plan.sm90.kernel import Sm90Plan
from mlagen.plan.splits import PartialRow, SplitsPlan, make_splits
from mlagen.plan.targets import TARGETS, Target
from mlagen.plan.tiles.cached_row import CachedRow
from mlagen.plan.tiles.chunks import Chunk
from mlagen.plan.tiles.tile import UNALIGNED_REASON, Tile, TileRow
from mlagen.spec import QUANT_BLOCK, Spec

ANY = 1 << 30  # more rows than a token can name

Table = tuple[tuple[str, tuple[TileRow, ...]], ...]


class KvRowPlan(Protocol):
    """A KV row as a program holds it. It decides which tiles fit."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Its blocks as they are multiplied, in column order."""

    def row(
        self, tile: Tile, target: Target, reason: str, max_heads: int | None = None, max_tokens: int | None = None
    ) -> TileRow:
        """A row of the tile table. Raises LimitError: the tile does not fit."""

    def untuned(self, num_heads: int, target: Target) -> tuple[TileRow, ...]:
        """Rows of an untuned target. Raises LimitError: not even the smallest tile fits."""

    def unaligned_tile(self, target: Target) -> Tile:
        """Return the tile for calls with unaligned rows or indices."""

    def unaligned_row(self, tile: Tile, target: Target, reason: str = UNALIGNED_REASON) -> TileRow:
        """The row of such a tile. Raises LimitError: it does not fit."""


@dataclass(frozen=True)
class Work:
    """The work of a call.

    Attributes:
        call: which, in words.
        flops: its FLOPs.
        bytes: fewest bytes that it moves.
    """

    call: str
    flops: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class LatentFamily(TiledFamily[TileRow]):
    """Numbers of attention over latent rows.

    Attributes:
        d_qk, d_v: columns of a KV row, and of V.
        splits: of a call's keys, and of the kernel that combines them.
    """

    d_qk: int
    d_v: int
    splits: SplitsPlan
    sm90: Sm90Plan | None

    @property
    @abstractmethod
    def kv_row(self) -> KvRowPlan:
        """A row as a program holds it."""

    @abstractmethod
    def one_token(self, num_heads: int) -> Work:
        """The work of a call of one token."""

    def describe_sm90(self) -> Iterator[str]:
        """Yield lines about its sm90 kernels, for readers of `show plan`."""
        if self.sm90 is not None:
            yield from self.sm90.describe()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Blocks of a row as it is multiplied, in column order."""
        return self.kv_row.chunks

    def like(self, row: TileRow, tile: Tile, target: Target, reason: str, *, aligned: bool) -> TileRow:
        """A row like another with this tile; see `TiledFamily`."""
        if aligned:
            return self.kv_row.row(tile, target, reason, row.max_heads, row.max_tokens)
        return self.kv_row.unaligned_row(tile, target, reason)


@dataclass(frozen=True, kw_only=True)
class CachedFamily(LatentFamily):
    """Numbers of attention over a cache.

    Attributes:
        caches: the caches that it reads.
        cached: a row as a program holds it.
    """

    caches: Caches
    cached: CachedRow

    @property
    def kv_row(self) -> CachedRow:
        """A row as a program holds it."""
        return self.cached

    @property
    def joined(self) -> bool:
        """Whether two blocks that are read are one in `chunks`."""
        return len(self.chunks) < len(self.caches.chunks)


def unaligned_table(kv_row: KvRowPlan, targets: Sequence[str]) -> Table:
    """The rows for calls that are not aligned, by target."""
    found = {name: kv_row.unaligned_tile(TARGETS[name]) for name in targets}
    return tuple((name, (kv_row.unaligned_row(tile, TARGETS[name]),)) for name, tile in found.items())


def splits_of(spec: Spec) -> SplitsPlan:
    """The numbers of the splits of a spec's attention."""
    partials = PartialRow(spec.partials, spec.model.v_head_dim)
    return make_splits(partials, QUANT_BLOCK if out_quant_of(spec) else 1)
