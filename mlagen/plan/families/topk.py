"""Numbers of the top-k kernels: a tile's keys stand in registers while its threshold is sought."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mlagen.plan.family import Family
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.sm90.topk import COLLECT, MODULE, TopkSm90Plan, make_topk_sm90
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import Spec

MOST_K = 4096
COLUMNS = 128  # of a tile that stand in one row of a warp
PROGRAMS_PER_SM = 2  # of rows longer than a tile
LONG_REGISTERS = 255  # ptxas of Triton 3.8 stops at 128 unasked, and spills


@dataclass(frozen=True)
class TopkTile:
    """Launch parameters of the kernel that selects from a row.

    Attributes:
        reps: rows of COLUMNS that a warp holds.
        spans: warps a program; each holds a span of the tile's columns.
        is_long: rows may be longer than the tile: candidates are collected first, in memory.
    """

    reps: int
    spans: int
    is_long: bool

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return self.reps * self.spans * COLUMNS

    @property
    def most_k(self) -> int:
        """The most that it can pick: the kept part of a long row has to fit the tile together with half a tile."""
        return self.columns // 2 if self.is_long else self.columns


@dataclass(frozen=True)
class TopkTileRow:
    """A row of the tile table: the tile of calls of at most so many columns and picks; None: any number."""

    max_columns: int | None
    max_k: int | None
    tile: TopkTile


@dataclass(frozen=True)
class TopkMergeTile:
    """Launch parameters of the kernel that merges candidates.

    Attributes:
        reps, spans: as TopkTile's.
        block_k: columns that are sorted.
    """

    reps: int
    spans: int
    block_k: int


@dataclass(frozen=True, kw_only=True)
class TopkPlan(Family):
    """Numbers of the top-k kernels.

    Attributes:
        most_k: the most that a call can pick.
        tiles: the tile table of selections; rows of tiles that take long rows hold any call.
        programs_per_sm: programs a multiprocessor where rows are longer than a tile.
        long_registers: most a thread, of Nvidia's, there.
        merge_tiles: (most picks, tile) of merges.
        sm90: numbers of its sm90 kernel; None without one.
    """

    NAME: ClassVar = "topk"
    SELECTS: ClassVar = {
        "top_k_per_row_prefill": Op(("indices", "scores")),
        "top_k_per_row_decode": Op(("indices", "scores")),
        "persistent_topk": Op(("indices", "scores")),
        "top_k_page_table_transform": Op(("out_raw_indices", "scores"), {"slots": "out"}),
    }
    MERGE: ClassVar = "topk_merge"
    WRAPPERS: ClassVar = {**SELECTS, MERGE: Op((), {"ids": "out", "scores": "out_scores"})}

    most_k: int
    tiles: tuple[TopkTileRow, ...]
    programs_per_sm: int
    long_registers: int
    merge_tiles: tuple[tuple[int, TopkMergeTile], ...]
    sm90: TopkSm90Plan | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that a call can run, as schedules and `_launch.force` have them."""
        return (*super().kernels, *((COLLECT,) if self.sm90 else ()))

    @classmethod
    def all_sm90_modules(cls) -> tuple[str, ...]:
        """The generated module of its sm90 kernels."""
        return (MODULE,)

    @property
    def sm90_modules(self) -> tuple[str, ...]:
        """The same if the spec's package has it."""
        return () if self.sm90 is None else (MODULE,)

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> TopkPlan | None:
        """Derives the numbers; see `Family`."""
        return replace(make_topk_plan(), sm90=make_topk_sm90(spec, cls.SELECTS)) if cls.wanted(spec) else None


def make_topk_plan() -> TopkPlan:
    """The numbers, the same for every model.

    A row that fits a tile is read once. A longer row is read half a tile at a time. Its keys above a threshold, which
    a sample of the row gives, are collected in memory; they seldom fill a tile.
    """
    return TopkPlan(
        most_k=MOST_K,
        tiles=(
            TopkTileRow(4096, None, TopkTile(4, 8, is_long=False)),
            TopkTileRow(8192, None, TopkTile(4, 16, is_long=False)),
            TopkTileRow(16384, None, TopkTile(8, 16, is_long=False)),
            TopkTileRow(None, None, TopkTile(8, 8, is_long=True)),  # others spill under some Triton
        ),
        programs_per_sm=PROGRAMS_PER_SM,
        long_registers=LONG_REGISTERS,
        merge_tiles=(
            (512, TopkMergeTile(4, 16, 512)),
            (2048, TopkMergeTile(4, 16, 2048)),
            (MOST_K, TopkMergeTile(4, 16, MOST_K)),
        ),
    )
