"""Attention kernels whose tiles are tuned: what a sweep asks of them that differs between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlagen.backends import compile_jobs as jobs_of
from mlagen.bench import attention, kvcache
from mlagen.bench.choose import Regime
from mlagen.bench.kvcache import KvcacheShape
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import DECODE_S_KV, DECODE_TOKENS, PREFILL_S_KV, PREFILL_TOKENS, Shape
from mlagen.bench.trial import Setting, Sizes, Trial
from mlagen.plan import CompileJob, Plan, Target, Tile, TileRow, needed
from mlagen.plan.chunks import Chunk
from mlagen.plan.kvcache import CachedRow
from mlagen.plan.tiles import make_row

CLASSES = (16, 32, 64)  # heads that get rows of their own where a model has more


@dataclass(frozen=True)
class Tunable:
    """Attention kernels that take a tile.

    Attributes:
        name: under which results are kept and reported.
        module: generated module that holds them.
        shape: the class of their shapes.
        tokens: query tokens that are measured, most wanted first.
        shape_of: the shape at which a regime of a package is measured.
        counts: indices a token in each list of a shape.
        chunks: blocks of a row, of a plan.
        make_row: a row of a plan's tile table, from the tile, the target, the reason, most heads and most tokens.
        trials: readies shapes.
        small_trials: the same, with no more memory than calls of one request take.
        with_rows: a plan whose tile tables are replaced by rows of one target.
    """

    name: str
    module: str
    shape: Callable[..., Sizes]
    tokens: tuple[int, ...]
    shape_of: Callable[[BenchPackage, Regime], Any]
    counts: Callable[[Any], tuple[int, ...]]
    chunks: Callable[[Plan], Sequence[Chunk]]
    make_row: Callable[[Plan, Tile, Target, str, int | None, int | None], TileRow]
    trials: Callable[[Setting], Callable[[Any], Trial[Any]]]
    small_trials: Callable[[Setting], Callable[[Any], Trial[Any]]]
    with_rows: Callable[[Plan, str, Sequence[TileRow]], Plan]

    def regimes(self, num_heads: int) -> list[Regime]:
        """Sizes of call that are swept for a model of that many heads."""
        classes = [(most, most) for most in CLASSES if most < num_heads] + [(0, num_heads)]
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
        return self.make_row(plan, tile, target, reason, max_heads, max_tokens)

    def jobs(self, plan: Plan, tile: Tile, target: Target) -> list[CompileJob]:
        """The compile jobs of the kernels that take the tile, on the target."""
        alone = replace(plan, spec=plan.spec.model_copy(update={"targets": (target.name,)}))
        alone = self.with_rows(alone, target.name, [self.row(plan, tile, target)])
        return [job for job in jobs_of(alone) if job.module == self.module and "BLOCK_H" in dict(job.constexprs)]


def _sparse_shape(package: BenchPackage, regime: Regime) -> Shape:
    if regime.tokens >= PREFILL_TOKENS:
        return Shape("prefill", regime.tokens, regime.num_heads, PREFILL_S_KV[1], package.facts.topk)
    return Shape("decode", regime.tokens, regime.num_heads, DECODE_S_KV, package.facts.topk)


def _kvcache_shape(package: BenchPackage, regime: Regime) -> KvcacheShape:
    return kvcache.shape_at(package, regime.tokens, 1, regime.num_heads)


def _with_sparse_rows(plan: Plan, target: str, rows: Sequence[TileRow]) -> Plan:
    return replace(plan, sparse=replace(needed(plan.sparse), tiles=((target, tuple(rows)),)))


def _with_kvcache_rows(plan: Plan, target: str, rows: Sequence[TileRow]) -> Plan:
    assert plan.kvcache is not None
    return replace(plan, kvcache=replace(plan.kvcache, tiles=((target, tuple(rows)),)))


def _sparse_row(plan: Plan, tile: Tile, target: Target, *rest: Any) -> TileRow:
    return make_row(tile, needed(plan.sparse).chunks, target, *rest)


def _cached_row(plan: Plan) -> CachedRow:
    assert plan.kvcache is not None
    return plan.kvcache.cached


def _kvcache_row(plan: Plan, *rest: Any) -> TileRow:
    return _cached_row(plan).row(*rest)


SPARSE = Tunable(
    name="sparse",
    module="sparse_attention",
    shape=Shape,
    tokens=(PREFILL_TOKENS, *DECODE_TOKENS),
    shape_of=_sparse_shape,
    counts=lambda shape: (shape.topk,),
    chunks=lambda plan: needed(plan.sparse).chunks,
    make_row=_sparse_row,
    trials=attention.trials,
    small_trials=attention.trials,
    with_rows=_with_sparse_rows,
)
KVCACHE = Tunable(
    name="kvcache",
    module="kvcache_attention",
    shape=KvcacheShape,
    tokens=DECODE_TOKENS,
    shape_of=_kvcache_shape,
    counts=lambda shape: tuple(count for count in (shape.window, shape.topk) if count),
    chunks=lambda plan: _cached_row(plan).chunks,
    make_row=_kvcache_row,
    trials=kvcache.kvcache_trials,
    small_trials=partial(kvcache.kvcache_trials, most_requests=1),
    with_rows=_with_kvcache_rows,
)


def tunables_of(wrappers: Sequence[str], kind: str | None) -> list[Tunable]:
    """The attention kernels of a package with those wrappers and that kind of attention that can be tuned."""
    if kind != "sparse":
        return []
    found = [SPARSE] if any(name in wrappers for name in attention.WRAPPERS) else []
    return found + ([KVCACHE] if kvcache.WRAPPER in wrappers else [])
