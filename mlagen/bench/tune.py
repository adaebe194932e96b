"""Sweeps tiles and split counts on the device at hand, and makes the tile table: `specs/tuned/<spec>/<target>.yaml`.

For each class of heads and each batch size: every candidate tile at the split count that the package's own rule picks,
then the promising ones at all split counts, then the best three against each other. A result is checked against float64
before its time counts. From the times come few tiles (`choose`), and the number of programs a multiprocessor with which
the rule picks the best split count.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton

from mlagen.bench.candidates import attention_jobs, candidate_tiles, read_tiles, unfit_tiles
from mlagen.bench.cells import Cell, CellLog, Measured
from mlagen.bench.check import Reference, check_device, error_limit
from mlagen.bench.choose import Regime, choose_tiles, make_choices
from mlagen.bench.driver import Driver
from mlagen.bench.measure import Timer, event_timer, graph_timer, interleave
from mlagen.bench.package import BenchPackage, load_package
from mlagen.bench.precompile import compile_tiles
from mlagen.bench.progress import Progress, one_line, progress
from mlagen.bench.shapes import (
    DECODE_S_KV,
    DECODE_TOKENS,
    PREFILL_S_KV,
    PREFILL_TOKENS,
    Inputs,
    Shape,
    make_inputs,
)
from mlagen.emit.write import write_atomically
from mlagen.errors import MlagenError, UsageError
from mlagen.plan import TARGETS, Plan, Tile, TileRow, make_plan
from mlagen.plan.tiles import expected_shared, make_row, programs_per_sm
from mlagen.plan.tuned import dump_tuned, load_tuned, tuned_path
from mlagen.spec import Spec, load, spec_digest

CLASSES = (16, 32, 64)  # heads that get rows of their own where a model has more
MOST_SPLITS = 128
PROMISING = 1.6  # a tile this much slower than the best at the rule's splits is not tried at others
CROWDED = 4  # splits that give every slot of the device more programs than this are not tried
HOPELESS = 2.0  # nor more splits once two counts in a row are this much slower than the tile's best
ROUNDS, FINAL_ROUNDS, FINALISTS = 3, 9, 3
ROUND_S = 1e-3


@dataclass(frozen=True)
class Figure:
    """What tuning gave at one size of call.

    Attributes:
        regime: the size.
        tile, splits: what the new table and the split rule take.
        seconds: their time; None if it was not measured.
        best_seconds: of the fastest tile and split count tried.
        before_seconds: of the tile and split count that the package takes as it is.
    """

    regime: Regime
    tile: Tile
    splits: int
    seconds: float | None
    best_seconds: float | None
    before_seconds: float | None


@dataclass(frozen=True)
class Tuned:
    """A tuned tile table.

    Attributes:
        spec_name, target, device, triton: what it holds for.
        rows: the table.
        figures: what each row was measured at.
        complete: every regime was swept; False where the budget ended before.
    """

    spec_name: str
    target: str
    device: str
    triton: str
    rows: tuple[TileRow, ...]
    figures: tuple[Figure, ...]
    complete: bool

    def text(self) -> str:
        """The tuned file."""
        return dump_tuned(self.spec_name, self.target, self.rows, device=self.device, triton=self.triton)

    def write(self, specs_dir: Path) -> Path:
        """Writes the tuned file below `specs_dir`, and gives its path."""
        path = tuned_path(self.spec_name, self.target, specs_dir)
        write_atomically(path, self.text())
        return path


def regimes_of(num_heads: int) -> list[Regime]:
    """Sizes of call that are swept for a model of that many heads; prefill first in a class."""
    classes = [(most, most) for most in CLASSES if most < num_heads] + [(0, num_heads)]
    tokens = (PREFILL_TOKENS, *DECODE_TOKENS)
    return [Regime(most, heads, count) for most, heads in classes for count in tokens]


def shape_of(regime: Regime, topk: int) -> Shape:
    """The shape at which a regime is measured."""
    if regime.tokens >= PREFILL_TOKENS:
        return Shape("prefill", regime.tokens, regime.num_heads, PREFILL_S_KV[1], topk)
    return Shape("decode", regime.tokens, regime.num_heads, DECODE_S_KV, topk)


def split_counts(blocks: int, programs: int, slots: int) -> Iterator[int]:
    """Powers of two up to `blocks`, while they do not crowd a device that holds `slots` programs at once."""
    splits = 1
    while splits <= min(blocks, MOST_SPLITS) and (splits == 1 or programs * splits <= CROWDED * slots):
        yield splits
        splits *= 2


def tune(
    spec: Spec,
    package_dir: Path,
    *,
    budget: float | None = None,
    log: Path | None = None,
    regimes: Sequence[Regime] | None = None,
    tiles: Collection[Tile] | None = None,
    report: Progress | None = None,
) -> Tuned:
    """Finds the tiles of a spec's attention for the current device.

    Args:
        spec: the validated spec.
        package_dir: folder of the package generated from it.
        budget: seconds after which no further tile is tried; the table is then made of what is known.
        log: JSON lines of what was measured; a later call with the same file, package, Triton and device goes on there.
        regimes: sizes of call to sweep; None: `regimes_of` the spec's heads. Others keep the package's tiles.
        tiles: candidates to keep to, `read_tiles`: those that fit under other versions of Triton too; None: all.
        report: told of progress.

    Raises:
        UsageError: no device, or the package is not the spec's.
        ToolError: a kernel left the device unusable; a call with the same log goes on behind it.
    """
    deadline = time.monotonic() + budget if budget is not None else None
    if not torch.cuda.is_available():
        raise UsageError("no CUDA or ROCm device: tiles are tuned on a GPU")
    package = load_package(package_dir)
    if package.spec["spec_sha256"] != spec_digest(spec):
        raise UsageError(f"{package_dir} was generated from another spec", hint=f"mlagen build specs/{spec.name}.yaml")
    sweep = _Sweep(make_plan(spec), package, package_dir, log, deadline, tiles, report or Progress())
    every = regimes_of(spec.model.num_heads)
    return sweep.run(every, every if regimes is None else [regime for regime in every if regime in regimes])


class _BudgetError(Exception):
    """The budget is spent."""


class _Sweep:
    def __init__(
        self,
        plan: Plan,
        package: BenchPackage,
        package_dir: Path,
        log: Path | None,
        deadline: float | None,
        allowed: Collection[Tile] | None,
        report: Progress,
    ) -> None:
        self.plan = plan
        self.package = package
        self.package_dir = package_dir
        self.deadline = deadline
        self.allowed = allowed
        self.tiles: list[Tile] = []  # candidates that run
        self.report = report
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.device_name = torch.cuda.get_device_name(self.device)
        self.facts = package.device_facts(self.device)
        self.target = TARGETS[self.facts.target]
        self.driver = Driver(package, self.facts)
        self.workspace = self.driver.workspace(self.device)
        self.l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        self.topk = plan.spec.attention.topk
        key = {"package": package.kernels, "triton": triton.__version__, "device": self.device_name}
        self.log = CellLog(log, key)
        self.inputs = functools.lru_cache(maxsize=2)(self._inputs)

    def run(self, every: Sequence[Regime], wanted: Sequence[Regime]) -> Tuned:
        if len(self.log):
            self.report.say(f"{len(self.log)} cells are known from an earlier run")
        self.tiles = self._compiled(wanted)
        swept = []
        with self.report.steps("sweep", len(wanted)) as step:
            for regime in wanted:
                if self._sweep(regime):
                    swept.append(regime)
                self.report.say(self._best_line(regime))
                step()
        return self._result(every, swept, complete=len(swept) == len(every))

    def _resident(self, tile: Tile) -> int:
        """Programs of a tile that a multiprocessor holds."""
        return programs_per_sm(tile, expected_shared(tile, self.plan.sparse.chunks, self.target), self.target)

    def _candidates(self, regime: Regime) -> list[Tile]:
        tiles = candidate_tiles(regime.num_heads, self.plan.sparse.chunks, self.target)
        return [tile for tile in tiles if self.allowed is None or tile in self.allowed]

    def _compiled(self, regimes: Sequence[Regime]) -> list[Tile]:
        """Every candidate of the regimes that compiles, fits and spills nothing."""
        tiles: dict[Tile, None] = {}
        for regime in regimes:
            tiles.update(dict.fromkeys(self._candidates(regime)))
            tiles[self.driver.current(regime.num_heads, regime.tokens)[0]] = None
        jobs = {tile: attention_jobs(self.plan, tile, self.target) for tile in tiles}
        with self.report.steps("compile", len(jobs)) as step:
            unfit = unfit_tiles(self.package_dir, jobs, step)
        fitting = [tile for tile in jobs if tile not in unfit]
        with self.report.steps(f"load {len(fitting)} tiles", 1) as step:
            broken = {tile: why for tile, why in compile_tiles(self.package_dir, fitting).items() if why is not None}
            step()
        for tile, why in {**unfit, **broken}.items():
            self.report.say(f"left out {tile}: {why}")
        return [tile for tile in fitting if tile not in broken]

    def _inputs(self, shape: Shape) -> tuple[list[Inputs], Reference, torch.Tensor]:
        """Input sets, the reference of the first, and an output."""
        sets = 1 if shape.kind == "prefill" else None
        inputs = make_inputs(shape, self.package.facts, self.device, self.l2_bytes, sets)
        q = inputs[0].q
        out = torch.empty(*q.shape[:2], self.package.facts.d_v, dtype=q.dtype, device=self.device)
        return inputs, Reference(inputs[0], self.package.facts), out

    def _timer(self, cell: Cell) -> Timer:
        """A timer of a cell that gave the right result.

        Raises:
            ArithmeticError: the result is wrong.
        """
        shape = cell.shape
        inputs, reference, out = self.inputs(shape)
        resident = self._resident(cell.tile)
        schedule = self.driver.schedule(cell.tile, resident, shape.tokens, shape.num_heads, shape.topk, cell.splits)
        calls = [self.driver.call(schedule, each, out, self.workspace) for each in inputs]
        error = reference.error_of(calls[0])
        if not error <= error_limit(out.dtype):
            raise ArithmeticError(f"wrong result: relative error {error:.2g}")
        if shape.kind == "prefill":
            return event_timer(calls[0], None, repeats=1)
        return graph_timer(calls, ROUND_S)

    def _measure(self, cell: Cell, rounds: int = ROUNDS) -> float | None:
        """Seconds of a cell, from the log or the device; None if it does not run or is wrong.

        Raises:
            _BudgetError: it would have to be measured, and the budget is spent.
        """
        known = self.log.get(cell)
        if known is None:
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise _BudgetError
            try:
                timer = self._timer(cell)
                known = Measured(statistics.median(timer() for _ in range(rounds)))
            except Exception as error:  # out of memory or resources, or wrong: the next cell may do
                known = Measured(None, one_line(error))
                self.report.say(f"{cell.shape}, {cell.tile}, {cell.splits} splits: {known.why}")
            self.log.put(cell, known)
            if known.seconds is None:
                check_device(f"{cell.shape} with {cell.tile}")
        return known.seconds

    def _rule(self, regime: Regime, tile: Tile, resident: int, wished: int = 0) -> int:
        """The split count that the package's rule picks, or makes of a wish."""
        schedule = self.driver.schedule(tile, resident, regime.tokens, regime.num_heads, self.topk, wished)
        return int(schedule.num_splits)

    def _sweep(self, regime: Regime) -> bool:
        """Measures a regime; False if time ran out before every tile was tried once, or if none runs."""
        known = len(self.log)
        try:
            first = self._first_pass(regime)
        except _BudgetError:
            return False
        with contextlib.suppress(_BudgetError):
            for tile, seconds in sorted(first.items(), key=lambda item: item[1]):
                if seconds <= PROMISING * min(first.values()) and regime.tokens < PREFILL_TOKENS:
                    self._all_splits(regime, tile)
            if len(self.log) > known:
                self._final(regime)
        return bool(first)

    def _first_pass(self, regime: Regime) -> dict[Tile, float]:
        """Seconds of each candidate at the split count that the rule picks."""
        shape = shape_of(regime, self.topk)
        candidates = self._candidates(regime)
        current, resident = self.driver.current(regime.num_heads, regime.tokens)
        mine = [tile for tile in self.tiles if tile in candidates or tile == current]
        self._measure(Cell(shape, current, self._rule(regime, current, resident)))
        first: dict[Tile, float] = {}
        for tile in mine:
            seconds = self._measure(Cell(shape, tile, self._rule(regime, tile, self._resident(tile))))
            if seconds is not None:
                first[tile] = seconds
        return first

    def _all_splits(self, regime: Regime, tile: Tile) -> None:
        """Measures a tile at all split counts that may be its best."""
        shape = shape_of(regime, self.topk)
        blocks = -(-min(shape.topk, shape.s_kv) // tile.block_n)
        programs = regime.tokens * -(-regime.num_heads // tile.block_h)
        slots = self.facts.multiprocessors * self._resident(tile)
        best = float("inf")
        slower = 0
        for wished in reversed(list(split_counts(blocks, programs, slots))):
            splits = self._rule(regime, tile, 1, wished)
            seconds = self._measure(Cell(shape, tile, splits))
            if seconds is None:
                continue
            slower = slower + 1 if seconds > HOPELESS * best else 0
            best = min(best, seconds)
            if slower == 2:
                return

    def _best(self, regime: Regime) -> dict[Tile, tuple[float, int]]:
        """(seconds, splits) of each candidate that ran, at its best split count."""
        found = self.log.best(shape_of(regime, self.topk))
        return {tile: each for tile, each in found.items() if tile in self.tiles}

    def _final(self, regime: Regime) -> None:
        """Measures the best tiles of a regime once more, taking turns."""
        shape = shape_of(regime, self.topk)
        ranked = sorted(self._best(regime).items(), key=lambda item: item[1])
        cells = [Cell(shape, tile, splits) for tile, (_, splits) in ranked[:FINALISTS]]
        timers = {str(index): self._timer(cell) for index, cell in enumerate(cells)}
        times = interleave(timers, FINAL_ROUNDS).seconds
        for index, cell in enumerate(cells):
            self.log.put(cell, Measured(times[str(index)]))

    def _best_line(self, regime: Regime) -> str:
        found = self._best(regime)
        if not found:
            return f"{regime}: not measured"
        tile = min(found, key=lambda tile: found[tile])
        seconds, splits = found[tile]
        return f"{regime}: {len(found)} tiles, best {tile}, {splits} splits, {seconds * 1e6:.1f} us"

    def _slowdown(self, regime: Regime, tile: Tile, resident: int) -> float:
        """Time of the rule's split count over the tile's best one."""
        shape = shape_of(regime, self.topk)
        seconds = self._measure(Cell(shape, tile, self._rule(regime, tile, resident)))
        best = self._best(regime)[tile][0]
        return seconds / best if seconds is not None else float("inf")

    def _result(self, every: Sequence[Regime], swept: Sequence[Regime], *, complete: bool) -> Tuned:
        self.deadline = None  # what fits the rule is measured to the end
        best = {regime: self._best(regime) for regime in swept}
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
        rows = []
        for choice in choices:
            reason = f"measured on {self.device_name}"
            row = make_row(
                choice.tile, self.plan.sparse.chunks, self.target, reason, choice.max_heads, choice.max_tokens
            )
            rows.append(replace(row, programs_per_sm=choice.resident))
        figures = [self._figure(regime, rows) for regime in swept]
        return Tuned(
            spec_name=self.plan.spec.name,
            target=self.target.name,
            device=self.device_name,
            triton=triton.__version__,
            rows=tuple(rows),
            figures=tuple(figures),
            complete=complete,
        )

    def _figure(self, regime: Regime, rows: Sequence[TileRow]) -> Figure:
        shape = shape_of(regime, self.topk)
        row = next(
            row
            for row in rows
            if (row.max_heads is None or regime.num_heads <= row.max_heads)
            and (row.max_tokens is None or regime.tokens <= row.max_tokens)
        )
        splits = self._rule(regime, row.tile, row.programs_per_sm)
        current, resident = self.driver.current(regime.num_heads, regime.tokens)
        return Figure(
            regime=regime,
            tile=row.tile,
            splits=splits,
            seconds=self._measure(Cell(shape, row.tile, splits)),
            best_seconds=min(seconds for seconds, _ in self._best(regime).values()),
            before_seconds=self._measure(Cell(shape, current, self._rule(regime, current, resident))),
        )


def summary(tuned: Tuned) -> str:
    """A Markdown table of what tuning gained."""
    lines = ["| call | tile | splits | us | best found us | before us |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for each in tuned.figures:
        times = " | ".join(_us(seconds) for seconds in (each.seconds, each.best_seconds, each.before_seconds))
        lines.append(f"| {each.regime} | {each.tile} | {each.splits} | {times} |")
    return "\n".join(lines) + "\n"


def _us(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e6:.1f}"


def main(arguments: list[str] | None = None) -> int:
    """`python -m mlagen.bench.tune --spec specs/dsv32.yaml --package generated/dsv32`; the summary goes to stdout."""
    parser = argparse.ArgumentParser(prog="python -m mlagen.bench.tune", description="Finds a spec's tiles on a GPU.")
    parser.add_argument("--spec", type=Path, required=True, help="the spec; the result goes to tuned/ beside it")
    parser.add_argument("--package", type=Path, required=True, help="folder of the package generated from it")
    parser.add_argument("--specs-dir", type=Path, help="write below this folder instead")
    parser.add_argument("--budget", type=float, help="seconds after which no further tile is tried")
    parser.add_argument("--log", type=Path, help="JSON lines of what was measured, to go on from")
    parser.add_argument("--heads", type=int, nargs="+", help="only the classes measured at these heads")
    parser.add_argument("--tokens", type=int, nargs="+", help="only these token counts")
    parser.add_argument("--tiles", type=Path, help="only tiles of this file, which mlagen.bench.candidates wrote")
    options = parser.parse_args(arguments)
    try:
        spec = load(options.spec)
        specs_dir = options.specs_dir or options.spec.parent
        load_tuned(spec.name, specs_dir, make_plan(spec).sparse.chunks)  # a bad file is to be seen before, not after
        regimes = [
            regime
            for regime in regimes_of(spec.model.num_heads)
            if (not options.heads or regime.num_heads in options.heads)
            and (not options.tokens or regime.tokens in options.tokens)
        ]
        with progress() as report:
            tuned = tune(
                spec,
                options.package,
                budget=options.budget,
                log=options.log,
                regimes=regimes,
                tiles=read_tiles(options.tiles) if options.tiles else None,
                report=report,
            )
        path = tuned.write(specs_dir)
    except MlagenError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(summary(tuned), end="")
    print(f"{path}: {len(tuned.rows)} rows{'' if tuned.complete else ', not every size was swept'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
