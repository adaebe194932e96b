"""Numbers of the sm90 kernel of top-k, which the Gluon back end emits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlagen.plan.targets import SM90, WARP_SIZE
from mlagen.spec import Spec

BINS = 4  # of a thread
FOUND_WORDS = 8
SHARED_ROW = 64  # words as they are allocated; the first row ends before the bins
SPARSITY = 24
SHARED_SPARSITY = 64  # every program that shares a row draws its whole sample
MULTIPROCESSORS = 132  # of H100 and H200: so many programs at most share rows, but for very few rows
PDL_ROWS = 2 * MULTIPROCESSORS
MODULE = "_topk_sm90"
COLLECT = "sm90_collect"  # programs share a row and collect its candidates, from which another program selects


@dataclass(frozen=True)
class TopkSm90Tile:
    """Launch parameters of the sm90 kernel.

    Attributes:
        warps: of a program.
        halves: a thread has four scores of a tile in each.
        capacity: keys in shared memory, a multiple of a tile: of a whole row, or of the candidates of a longer one.
        registers: most a thread, but for long rows of bf16; None: as the compiler likes.
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
        sparsity, shared_sparsity: of so many scores of a long row, one is in its sample; of one that programs share.
        pdl_rows: calls of up to so many rows begin while the kernel before them ends.
        tiles: the tile table; the last row holds any call.
    """

    sparsity: int
    shared_sparsity: int
    pdl_rows: int
    tiles: tuple[TopkSm90Row, ...]

    @property
    def found(self) -> int:
        """The first word that one thread publishes to all, behind the totals of warps, of two tiles in turn."""
        return 2 * WARP_SIZE

    @property
    def published(self) -> tuple[int, ...]:
        """The words that are published of a bin: its number, keys before it, in it, and in all bins."""
        return tuple(range(self.found, self.found + 4))

    @property
    def bins(self) -> int:
        """The first word of bins. A thread has four; keys are behind them."""
        return self.found + FOUND_WORDS

    def shared_bytes(self, tile: TopkSm90Tile, *, is_long: bool) -> int:
        """Shared memory of a program."""
        words = self.bins + BINS * WARP_SIZE * tile.warps + tile.capacity * (2 if is_long else 1)
        return 4 * (-(-words // SHARED_ROW) * SHARED_ROW)


def make_topk_sm90(spec: Spec, wrappers: Iterable[str]) -> TopkSm90Plan | None:
    """The plan of the sm90 kernel of a spec's selections by these wrappers; None where its back end leaves it out."""
    if spec.backend == "triton" or SM90 not in spec.targets or not any(name in spec.wrappers for name in wrappers):
        return None
    return TopkSm90Plan(sparsity=SPARSITY, shared_sparsity=SHARED_SPARSITY, pdl_rows=PDL_ROWS, tiles=make_tiles())


def make_tiles() -> tuple[TopkSm90Row, ...]:
    """The tile table.

    Few programs have many warps each. As many programs as fit the device share few rows of more than 64K columns, since
    the lengths of such rows may differ. Many rows have smaller programs: six, or four, fit a multiprocessor. A capacity
    of 8K keys holds all that a sample lets through of a comparatively long row.
    """
    one_program, shared = TopkSm90Tile(16, 2, 8192), TopkSm90Tile(16, 2, 8192, parts=8)
    wide = [
        TopkSm90Row(MULTIPROCESSORS // parts, None, None, TopkSm90Tile(16, 2, 8192, parts=parts)) for parts in (8, 4, 2)
    ]
    return (
        TopkSm90Row(PDL_ROWS, 4096, None, TopkSm90Tile(16, 2, 4096)),
        TopkSm90Row(PDL_ROWS, 8192, None, one_program),
        TopkSm90Row(16, 1 << 16, None, shared),
        TopkSm90Row(PDL_ROWS, 1 << 16, None, one_program),
        TopkSm90Row(4, None, None, TopkSm90Tile(16, 1, 8192, parts=16)),
        *wide,
        TopkSm90Row(PDL_ROWS, None, None, one_program),
        TopkSm90Row(None, 8192, None, TopkSm90Tile(8, 1, 8192, registers=40)),
        TopkSm90Row(None, 1 << 19, 2048, TopkSm90Tile(8, 2, 6144, registers=64)),
        TopkSm90Row(None, None, None, one_program),
    )
