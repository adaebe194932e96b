"""Numbers of the sm90 kernel of top-k, which the Gluon back end emits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlagen.plan.sm90 import SM90
from mlagen.spec import Spec

LANES = 32
BINS = 4  # of a thread
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
    def found(self) -> int:
        """The first word of what threads tell all, behind the totals of warps, of two tiles in turn."""
        return 2 * LANES

    @property
    def bins(self) -> int:
        """The first word of bins, of which a thread has four; keys are behind them."""
        return self.found + FOUND_WORDS

    def shared_bytes(self, tile: TopkSm90Tile, *, is_long: bool) -> int:
        """Shared memory of a program."""
        words = self.bins + BINS * LANES * tile.warps + tile.capacity * (2 if is_long else 1)
        return 4 * (-(-words // SHARED_ROW) * SHARED_ROW)


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
