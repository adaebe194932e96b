"""Attention kernels with tuned tiles: the parts of a sweep that differ between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mlagen.bench.families import dense_decode, sparse_decode, sparse_fwd
from mlagen.bench.families.dense_decode import DenseDecodeShape
from mlagen.bench.families.sparse_decode import SparseDecodeShape
from mlagen.bench.families.sparse_fwd import DECODE_S_KV, PREFILL_S_KV, PREFILL_TOKENS, SparseFwdShape
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import BLOCK_SIZE
from mlagen.bench.trial import Setting, Sizes, Trial
from mlagen.bench.tune.choose import Regime
from mlagen.bench.tune.driver import DenseDecodeDriver, Driver
from mlagen.compile import CompileJob, Toolchain, list_variants
from mlagen.compile.candidates import tile_of
from mlagen.emit import apply, compare, render
from mlagen.plan import DenseDecodePlan, LatentFamily, Plan, SparseDecodePlan, SparseFwdPlan, Target, Tile, TileRow
from mlagen.plan.families.dense_decode import MOST_ROWS, spills_with_window

DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)  # where tables may change from one row to the next
CLASSES = (16, 32, 64)  # heads, or rows of dense attention, that get rows of their own where a model has more


@dataclass(frozen=True)
class Tunable:
    """Attention kernels that take a tile.

    Attributes:
        name: under which results are kept and reported.
        family: the plan's.
        module: generated module with the wrappers that call them.
        shape: the class of their shapes.
        tokens: query tokens that are measured, most wanted first; of dense attention, requests.
        shape_of: the shape at which a regime of a package is measured.
        counts: indices a token in each list of a shape.
        trials: readies shapes.
        small_trials: the same, with no more memory than calls of one request take.
        driver: schedules a package's kernels.
        suits: whether calls of a plan would take the tile on a target, if it fits.
        widest: heads, or rows of dense attention, that are measured for a model of so many heads.
    """

    name: str
    family: type[LatentFamily]
    module: str
    shape: Callable[..., Sizes]
    tokens: tuple[int, ...]
    shape_of: Callable[[BenchPackage, Regime], Any]
    counts: Callable[[Any], tuple[int, ...]]
    trials: Callable[[Setting], Callable[[Any], Trial[Any]]]
    small_trials: Callable[[Setting], Callable[[Any], Trial[Any]]]
    driver: Callable[[BenchPackage, str, Any], Driver] = Driver
    suits: Callable[[Plan, Tile, Target], bool] = lambda plan, tile, target: True
    widest: Callable[[int], int] = lambda num_heads: num_heads

    def regimes(self, num_heads: int) -> list[Regime]:
        """Sizes of call that are swept for a model of that many heads."""
        widest = self.widest(num_heads)
        classes = [(most, most) for most in CLASSES if most < widest] + [(0, widest)]
        return [Regime(most, heads, tokens) for most, heads in classes for tokens in self.tokens]

    def row(
        self,
        plan: Plan,
        tile: Tile,
        target: Target,
        reason: str = "",
        max_heads: int | None = None,
        max_tokens: int | None = None,
    ) -> TileRow:
        """A row for the tile. Raises LimitError: it needs more shared memory than the target gives a program."""
        return plan.of(self.family).kv_row.row(tile, target, reason, max_heads, max_tokens)

    def with_rows(self, plan: Plan, target: str, rows: Sequence[TileRow]) -> Plan:
        """The plan with these rows of one target as the family's tile table."""
        mine = plan.of(self.family)
        alone = replace(mine, tiles=((target, tuple(rows)),))
        return replace(plan, families=tuple(alone if one is mine else one for one in plan.families))

    def jobs(
        self, plan: Plan, tiles: Iterable[Tile], target: Target, folder: Path, toolchain: Toolchain | None = None
    ) -> dict[Tile, list[CompileJob]]:
        """List the compilations that show whether tiles hold on a target.

        Args:
            plan: plan of the kernels that take them.
            tiles: the tiles.
            target: the target.
            folder: where to write the package that the jobs are of. Its table has all these tiles.
            toolchain: the Triton that lists them; None: the installed one.

        Returns:
            By tile, every variant of the kernels that take it for calls of aligned rows.
        """
        alone = replace(plan, spec=plan.spec.model_copy(update={"targets": (target.name,)}))
        rows = [self.row(plan, tile, target) for tile in dict.fromkeys(tiles)]
        apply(compare(render(self.with_rows(alone, target.name, rows)), folder))
        found: dict[Tile, list[CompileJob]] = {row.tile: [] for row in rows}
        for job in list_variants(folder, [target.name], toolchain=toolchain):
            if job.module == f"_{self.module}_kernels" and job.tabled and (tile := tile_of(job)) in found:
                found[tile].append(job)
        return found


def _sparse_fwd_shape(package: BenchPackage, regime: Regime) -> SparseFwdShape:
    if regime.tokens >= PREFILL_TOKENS:
        return SparseFwdShape("prefill", regime.tokens, regime.num_heads, PREFILL_S_KV[1], package.facts.topk)
    return SparseFwdShape("decode", regime.tokens, regime.num_heads, DECODE_S_KV, package.facts.topk)


def _sparse_decode_shape(package: BenchPackage, regime: Regime) -> SparseDecodeShape:
    return sparse_decode.shape_at(package, regime.tokens, 1, regime.num_heads)


def _dense_decode_shape(package: BenchPackage, regime: Regime) -> DenseDecodeShape:
    return dense_decode.tuned_shape(package, regime.tokens, regime.num_heads, torch.cuda.mem_get_info()[1])


def _suits_dense_decode(plan: Plan, tile: Tile, target: Target) -> bool:
    """Whether the tile's steps lie in a page, and leave registers for a window if there is one."""
    dense = plan.of(DenseDecodePlan)
    whole = (dense.caches.main.block_size or BLOCK_SIZE) % tile.block_n == 0
    return whole and (dense.window is None or not spills_with_window(tile, target))


SPARSE_FWD = Tunable(
    name="sparse_fwd",
    family=SparseFwdPlan,
    module="sparse_fwd",
    shape=SparseFwdShape,
    tokens=(PREFILL_TOKENS, *DECODE_TOKENS),
    shape_of=_sparse_fwd_shape,
    counts=lambda shape: (shape.topk,),
    trials=sparse_fwd.trials,
    small_trials=sparse_fwd.trials,
)
SPARSE_DECODE = Tunable(
    name="sparse_decode",
    family=SparseDecodePlan,
    module="sparse_decode",
    shape=SparseDecodeShape,
    tokens=DECODE_TOKENS,
    shape_of=_sparse_decode_shape,
    counts=lambda shape: tuple(count for count in (shape.window, shape.topk) if count),
    trials=sparse_decode.sparse_decode_trials,
    small_trials=partial(sparse_decode.sparse_decode_trials, most_requests=1),
)
DENSE_DECODE = Tunable(
    name="dense_decode",
    family=DenseDecodePlan,
    module="dense_decode",
    shape=DenseDecodeShape,
    tokens=dense_decode.TUNED_REQUESTS,
    shape_of=_dense_decode_shape,
    counts=lambda shape: (shape.context,),
    trials=dense_decode.dense_decode_trials,
    small_trials=dense_decode.dense_decode_trials,
    driver=DenseDecodeDriver,
    suits=_suits_dense_decode,
    widest=lambda num_heads: min(MOST_ROWS, dense_decode.TUNED_QUERIES * num_heads),
)


def tunables_of(wrappers: Sequence[str], kind: str | None) -> list[Tunable]:
    """The attention kernels of a package with those wrappers and that kind of attention that can be tuned."""
    if kind == "dense":
        return [DENSE_DECODE] if dense_decode.WRAPPER in wrappers else []
    if kind != "sparse":
        return []
    found = [SPARSE_FWD] if any(name in wrappers for name in sparse_fwd.WRAPPERS) else []
    return found + ([SPARSE_DECODE] if sparse_decode.WRAPPER in wrappers else [])
