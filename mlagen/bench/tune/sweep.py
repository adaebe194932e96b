"""Measures tiles and split counts of one package's attention on the device at hand, and makes its tables of them.

For each size of call: every candidate tile at the split count that the package's own rule picks, then the promising
ones at all split counts, then the best three against each other. The sm90 kernel is one more candidate, which takes
no tile's place. A result is checked against float64 before its time counts. Splits of dense attention are the programs
among which a batch is shared out: the rule takes as many a multiprocessor as the tile's row says.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

from mlagen.bench.check import check_device, one_line
from mlagen.bench.families.sparse_fwd import PREFILL_TOKENS
from mlagen.bench.measure import GraphTimer, Timer, event_timer, flush_l2, interleave
from mlagen.bench.package import BenchPackage, kernels_hash
from mlagen.bench.trial import Call, Setting, Trial
from mlagen.bench.tune.candidates import candidate_tiles, unfit_tiles
from mlagen.bench.tune.cells import Cell, CellLog, Measured
from mlagen.bench.tune.choose import Regime, choose_sm90, choose_tiles, make_choices, runs_sm90
from mlagen.bench.tune.precompile import compile_tiles
from mlagen.bench.tune.progress import Progress
from mlagen.bench.tune.tunable import Tunable
from mlagen.plan import TARGETS, Plan, Sm90Row, Tile, TileRow

PROMISING = 1.6  # a tile this much slower than the best portable one at the rule's splits is not tried at others
HOPELESS = 2.0  # nor more splits once two counts in a row are this much slower than the tile's best
ROUNDS, FINAL_ROUNDS, FINALISTS = 3, 9, 3
ROUND_S = 1e-3


@dataclass(frozen=True)
class Figure:
    """Result of tuning at one size of call.

    Attributes:
        kernels: name of the kernels.
        regime: the size.
        sm90: the new table gives it to the sm90 kernel.
        tile, splits: those that the new tables and the split rule take.
        seconds: their time; None if it was not measured.
        best_seconds: of the fastest tile and split count tried.
        before_seconds: of the tile and split count that the package takes as it is.
    """

    kernels: str
    regime: Regime
    sm90: bool
    tile: Tile
    splits: int
    seconds: float | None
    best_seconds: float | None
    before_seconds: float | None


@dataclass(frozen=True)
class Swept:
    """Tables of one kind of attention, and the sizes that they were measured at.

    Attributes:
        rows: the tile table.
        sm90_rows: which calls run the sm90 kernel; none where the package has no such kernel.
        figures: a figure a regime that was swept.
        complete: every regime was swept; False where the budget ended before.
    """

    rows: tuple[TileRow, ...]
    sm90_rows: tuple[Sm90Row, ...]
    figures: tuple[Figure, ...]
    complete: bool


class _BudgetError(Exception):
    """The budget is spent."""


@dataclass(frozen=True)
class _Ready:
    """A shape's trial, and our calls of its input sets."""

    trial: Trial[Any]
    calls: list[Call]


class Sweep:
    """A sweep of one package's kernels.

    Args:
        kernels: which.
        plan: of the package's spec.
        package: the package.
        log: JSON lines of earlier measurements, to go on from; None: nothing is kept.
        deadline: time.monotonic() after which no further tile is tried; None: never.
        allowed: portable candidates to keep to; None: all.
        report: shows progress.
    """

    def __init__(
        self,
        kernels: Tunable,
        plan: Plan,
        package: BenchPackage,
        log: Path | None,
        deadline: float | None,
        allowed: Collection[Tile] | None,
        report: Progress,
    ) -> None:
        self.kernels = kernels
        self.plan = plan
        self.package = package
        self.deadline = deadline
        self.allowed = allowed
        self.tiles: list[Tile] = []  # candidates that run
        self.report = report
        device = torch.device("cuda", torch.cuda.current_device())
        self.device_name = torch.cuda.get_device_name(device)
        self.facts = package.device_facts(device)
        self.target = TARGETS[self.facts.target]
        self.driver = kernels.driver(package, kernels.module, self.facts)
        self.flush = flush_l2(device)
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.trials = kernels.trials(Setting(package, device, l2_bytes))
        key = {
            "kernels": kernels.name,
            "package": kernels_hash(package.folder),
            "triton": triton.__version__,
            "device": self.device_name,
        }
        self.log = CellLog(log, key, kernels.shape)
        self.ready = functools.lru_cache(maxsize=2)(self._ready)

    def run(self, every: Sequence[Regime], wanted: Sequence[Regime]) -> Swept:
        """Sweeps the wanted ones of every regime; the others keep the package's tiles."""
        if len(self.log):
            self.report.say(f"{len(self.log)} cells of {self.kernels.name} are known from an earlier run")
        self.tiles = self._compiled(wanted)
        swept = []
        with self.report.steps(f"sweep {self.kernels.name}", len(wanted)) as step:
            for regime in wanted:
                if self._sweep(regime):
                    swept.append(regime)
                self.report.say(self._best_line(regime))
                step()
        return self._result(every, swept, complete=len(swept) == len(every))

    def _resident(self, tile: Tile) -> int:
        """Programs of a tile that a multiprocessor holds."""
        if tile == self.driver.sm90:
            return 1
        return self.kernels.row(self.plan, tile, self.target).programs_per_sm

    def _candidates(self, regime: Regime) -> list[Tile]:
        """Portable tiles that a regime may take."""
        tiles = candidate_tiles(self.kernels, self.plan, regime.num_heads, self.target)
        return [tile for tile in tiles if self.allowed is None or tile in self.allowed]

    def _compiled(self, regimes: Sequence[Regime]) -> list[Tile]:
        """Every candidate of the regimes that compiles, fits and spills nothing; the sm90 kernel first."""
        tiles: dict[Tile, None] = {}
        for regime in regimes:
            tiles.update(dict.fromkeys(self._candidates(regime)))
            tiles[self.driver.current(regime.num_heads, regime.tokens)[0]] = None
        with self.report.steps("compile", len(tiles)) as step:
            unfit = unfit_tiles(self.kernels, self.plan, tiles, self.target, lambda _: step())
        fitting = [tile for tile in tiles if tile not in unfit]
        if self.driver.sm90 is not None:
            fitting.insert(0, self.driver.sm90)
        with self.report.steps(f"load {len(fitting)} tiles", 1) as step:
            said = compile_tiles(self.package.folder, self.kernels.name, fitting)
            broken = {tile: why for tile, why in said.items() if why is not None}
            step()
        for tile, why in {**unfit, **broken}.items():
            self.report.say(f"left out {self._name(tile)}: {why}")
        return [tile for tile in fitting if tile not in broken]

    def _name(self, tile: Tile) -> str:
        return "the sm90 kernel" if tile == self.driver.sm90 else str(tile)

    def _shape(self, regime: Regime) -> Any:
        return self.kernels.shape_of(self.package, regime)

    def _ready(self, shape: Any) -> _Ready:
        trial = self.trials(shape)
        return _Ready(trial, [trial.entrants[0].prepare(each) for each in trial.inputs])

    def _schedule(self, regime: Regime, tile: Tile, resident: int, wished: int = 0) -> Any:
        counts = self.kernels.counts(self._shape(regime))
        return self.driver.schedule(tile, resident, regime.tokens, regime.num_heads, counts, wished)

    def _timer(self, regime: Regime, cell: Cell) -> Timer:
        """A timer of a cell that gave the right result.

        Raises:
            ArithmeticError: the result is wrong.
        """
        ready = self.ready(cell.shape)
        schedule = self._schedule(regime, cell.tile, self._resident(cell.tile), cell.splits)
        calls = [self.driver.scheduled(schedule, call) for call in ready.calls]
        ready.trial.checked(ready.trial.entrants[0], calls[0])
        if regime.tokens >= PREFILL_TOKENS or len(calls) == 1:  # one set of inputs is in L2 at its next turn
            return event_timer(calls[0], self.flush, repeats=1)
        return GraphTimer(calls, ROUND_S)

    def _measure(self, regime: Regime, tile: Tile, splits: int, rounds: int = ROUNDS) -> float | None:
        """Seconds of a tile and split count, from the log or the device; None if they do not run or are wrong.

        Raises:
            _BudgetError: they would have to be measured, and the budget is spent.
        """
        cell = Cell(self._shape(regime), tile, splits)
        known = self.log.get(cell)
        if known is None:
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise _BudgetError
            try:
                timer = self._timer(regime, cell)
                known = Measured(statistics.median(timer() for _ in range(rounds)))
            except Exception as error:  # out of memory or resources, or wrong: the next cell may do
                known = Measured(None, one_line(error))
                self.report.say(f"{cell.shape}, {self._name(tile)}, {splits} splits: {known.why}")
            self.log.put(cell, known)
            if known.seconds is None:
                check_device(f"{cell.shape} with {self._name(tile)}")
        return known.seconds

    def _rule(self, regime: Regime, tile: Tile, resident: int, wished: int = 0) -> int:
        """The split count that the package's rule picks, or makes of a wish."""
        return self.driver.splits_of(self._schedule(regime, tile, resident, wished))

    def _sweep(self, regime: Regime) -> bool:
        """Measures a regime; False if time ran out before every tile was tried once, or if none runs."""
        known = len(self.log)
        try:
            first = self._first_pass(regime)
        except _BudgetError:
            return False
        with contextlib.suppress(_BudgetError):
            portable = [seconds for tile, seconds in first.items() if tile != self.driver.sm90]
            for tile, seconds in sorted(first.items(), key=lambda item: item[1]):
                if seconds <= PROMISING * min(portable, default=seconds) and regime.tokens < PREFILL_TOKENS:
                    self._all_splits(regime, tile)
            if len(self.log) > known:
                self._final(regime)
        return bool(first)

    def _first_pass(self, regime: Regime) -> dict[Tile, float]:
        """Seconds of each candidate at the split count that the rule picks."""
        current, resident = self.driver.current(regime.num_heads, regime.tokens)
        candidates = [*self._candidates(regime), current, self.driver.sm90]
        mine = [tile for tile in self.tiles if tile in candidates]
        self._ruled(regime, current, resident)
        first: dict[Tile, float] = {}
        for tile in mine:
            seconds = self._ruled(regime, tile, self._resident(tile))
            if seconds is not None:
                first[tile] = seconds
        return first

    def _all_splits(self, regime: Regime, tile: Tile) -> None:
        """Measures a tile at all split counts that may be its best."""
        counts = self.kernels.counts(self._shape(regime))
        best = float("inf")
        slower = 0
        for wished in self.driver.wishes(tile, self._resident(tile), regime.tokens, regime.num_heads, counts):
            seconds = self._measure(regime, tile, self._rule(regime, tile, 1, wished))
            if seconds is None:
                continue
            slower = slower + 1 if seconds > HOPELESS * best else 0
            best = min(best, seconds)
            if slower == 2:
                return

    def _best(self, regime: Regime) -> dict[Tile, tuple[float, int]]:
        """(seconds, splits) of each candidate that ran, at its best split count."""
        found = self.log.best(self._shape(regime))
        return {tile: each for tile, each in found.items() if tile in self.tiles}

    def _final(self, regime: Regime) -> None:
        """Measures the best tiles and the sm90 kernel of a regime once more, taking turns."""
        shape, sm90, found = self._shape(regime), self.driver.sm90, self._best(regime)
        ranked = sorted(self._portable(regime).items(), key=lambda item: item[1])
        cells = [Cell(shape, tile, splits) for tile, (_, splits) in ranked[:FINALISTS]]
        if sm90 is not None and sm90 in found and self._sm90_seconds(regime) is not None:
            counts = (found[sm90][1], self._rule(regime, sm90, self._resident(sm90)))
            cells += [Cell(shape, sm90, splits) for splits in dict.fromkeys(counts)]
        timers = {str(index): self._timer(regime, cell) for index, cell in enumerate(cells)}
        times = interleave(timers, FINAL_ROUNDS).seconds
        for index, cell in enumerate(cells):
            self.log.put(cell, Measured(times[str(index)]))

    def _best_line(self, regime: Regime) -> str:
        found = self._best(regime)
        if not found:
            return f"{regime}: not measured"
        tile = min(found, key=lambda tile: found[tile])
        seconds, splits = found[tile]
        return f"{regime}: {len(found)} tiles, best {self._name(tile)}, {splits} splits, {seconds * 1e6:.1f} us"

    def _ruled(self, regime: Regime, tile: Tile, resident: int) -> float | None:
        """Seconds of a tile at the split count that the rule picks; None if that does not run or is wrong."""
        return self._measure(regime, tile, self._rule(regime, tile, resident))

    def _sm90_seconds(self, regime: Regime) -> float | None:
        """Seconds of the sm90 kernel as the rule splits it; None if there is none, or it does not run."""
        sm90 = self.driver.sm90
        return None if sm90 is None else self._ruled(regime, sm90, self._resident(sm90))

    def _faster(self, regime: Regime) -> bool:
        """Whether the sm90 kernel, as the rule splits it, is at least as fast as every portable tile."""
        seconds = self._sm90_seconds(regime)
        return seconds is not None and all(seconds <= each for each, _ in self._portable(regime).values())

    def _portable(self, regime: Regime) -> dict[Tile, tuple[float, int]]:
        """`_best` without the sm90 kernel."""
        return {tile: each for tile, each in self._best(regime).items() if tile != self.driver.sm90}

    def _slowdown(self, regime: Regime, tile: Tile, resident: int) -> float:
        """Time of the rule's split count over the tile's best one; infinite where the rule may not plan so."""
        if resident not in self.driver.residents(self._resident(tile)):
            return float("inf")
        seconds = self._ruled(regime, tile, resident)
        best = self._best(regime)[tile][0]
        return seconds / best if seconds is not None else float("inf")

    def _result(self, every: Sequence[Regime], swept: Sequence[Regime], *, complete: bool) -> Swept:
        self.deadline = None  # measurements for the split rule run to the end
        best = {regime: self._portable(regime) for regime in swept}
        tiles = choose_tiles(
            {regime: {tile: each[0] for tile, each in found.items()} for regime, found in best.items()}
        )
        kept = {regime: self.driver.current(regime.num_heads, regime.tokens) for regime in every if regime not in tiles}

        def slowdown(regime: Regime, tile: Tile, resident: int) -> float:
            if regime in kept:  # as it is, and not measured
                return 1.0 if resident == kept[regime][1] else float("inf")
            return self._slowdown(regime, tile, resident)

        choices = make_choices(
            {regime: tiles[regime] if regime in tiles else kept[regime][0] for regime in every},
            slowdown,
            self._resident,
        )
        reason = f"measured on {self.device_name}"
        rows = []
        for choice in choices:
            row = self.kernels.row(self.plan, choice.tile, self.target, reason, choice.max_heads, choice.max_tokens)
            rows.append(replace(row, programs_per_sm=choice.resident))
        sm90_rows = self.driver.sm90_rows
        if self.driver.sm90 is not None:
            sm90_rows = choose_sm90(every, {regime: self._faster(regime) for regime in swept}, sm90_rows)
        figures = tuple(self._figure(regime, rows, sm90_rows) for regime in swept)
        return Swept(tuple(rows), sm90_rows, figures, complete)

    def _figure(self, regime: Regime, rows: Sequence[TileRow], sm90_rows: Sequence[Sm90Row]) -> Figure:
        row = next(
            row
            for row in rows
            if (row.max_heads is None or regime.num_heads <= row.max_heads)
            and (row.max_tokens is None or regime.tokens <= row.max_tokens)
        )
        tile, resident = self._taken(sm90_rows, regime, (row.tile, row.programs_per_sm))
        before = self._taken(self.driver.sm90_rows, regime, self.driver.current(regime.num_heads, regime.tokens))
        return Figure(
            kernels=self.kernels.name,
            regime=regime,
            sm90=tile == self.driver.sm90,
            tile=tile,
            splits=self._rule(regime, tile, resident),
            seconds=self._ruled(regime, tile, resident),
            best_seconds=min(seconds for seconds, _ in self._best(regime).values()),
            before_seconds=self._ruled(regime, *before),
        )

    def _taken(self, rows: Sequence[Sm90Row], regime: Regime, portable: tuple[Tile, int]) -> tuple[Tile, int]:
        """The tile of a regime by the rows and its portable tile, and the programs a multiprocessor."""
        sm90 = self.driver.sm90
        return (sm90, self._resident(sm90)) if sm90 is not None and runs_sm90(rows, regime) else portable
