"""Numbers of the sm90 kernel of top-k, which the Gluon back end emits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlagen.plan.sm90 import SM90
from mlagen.spec import Spec

LANES = 32
FOUND_WORDS = 8
SHARED_ROW = 256  # words as they are allocated
SPARSITY = 24
MODULE = "_topk_sm90"


@dataclass(frozen=True)
class TopkSm90Tile:
    """Launch parameters of the sm90 kernel.

    Attributes:
        warps: of a program.
        halves: a thread has four scores of a tile in each.
        capacity: keys in shared memory, a multiple of a tile: of a whole row, or of the candidates of a longer one.
        registers: most a thread; None: as the compiler likes.
        parts: programs that share a longer row; then another selects from their candidates.
    """

    warps: int
    halves: int
    capacity: int
    registers: int | None = None
    parts: int = 1


@dataclass(frozen=True)
class TopkSm90Row:
    """A row of the table: the tile of calls of at most so many rows, columns and picks; None: any number."""

    max_rows: int | None
    max_columns: int | None
    max_k: int | None
    tile: TopkSm90Tile


@dataclass(frozen=True)
class TopkSm90Plan:
    """Numbers of the sm90 kernel of top-k.

    Attributes:
        sparsity: of so many scores of a long row, one is in its sample.
        tiles: the tile table; the last row holds any call.
    """

    sparsity: int
    tiles: tuple[TopkSm90Row, ...]

    @property
    def totals(self) -> int:
        """The first word of shared memory behind the bins, one a thread: totals of warps, of two tiles in turn."""
        return LANES * max(row.tile.warps for row in self.tiles)

    @property
    def found(self) -> int:
        """The first word of what threads tell all."""
        return self.totals + 2 * LANES

    @property
    def keys(self) -> int:
        """The first word of keys."""
        return -(-(self.found + FOUND_WORDS) // LANES) * LANES


def make_topk_sm90(spec: Spec, wrappers: Iterable[str]) -> TopkSm90Plan | None:
    """The plan of the sm90 kernel of a spec's selections by these wrappers; None where its back end leaves it out."""
    if spec.backend == "triton" or SM90 not in spec.targets or not any(name in spec.wrappers for name in wrappers):
        return None
    tiles = (
        TopkSm90Row(None, 4096, None, TopkSm90Tile(16, 2, 4096)),
        TopkSm90Row(16, None, None, TopkSm90Tile(16, 2, 8192, parts=8)),
        TopkSm90Row(264, None, None, TopkSm90Tile(32, 1, 8192)),
        TopkSm90Row(None, None, None, TopkSm90Tile(16, 1, 8192)),
    )
    return TopkSm90Plan(sparsity=SPARSITY, tiles=tiles)
