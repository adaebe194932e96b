"""Measures a generated package and its peers: first whether they are right, then how fast they are."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from mlagen.bench.check import check_device
from mlagen.bench.families import FAMILIES, shapes_of
from mlagen.bench.measure import (
    BehindTimer,
    GraphTimer,
    Interleaved,
    Timer,
    after_pause,
    device_timer,
    eager_time,
    flush_l2,
    interleave,
    warm_up,
)
from mlagen.bench.package import kernels_digest, load_package
from mlagen.bench.peers import peers_of
from mlagen.bench.peers.libraries import absence
from mlagen.bench.report.origin import Origin
from mlagen.bench.report.origin import origin as origin_of_run
from mlagen.bench.report.rows import Contender, Row
from mlagen.bench.trial import OURS, Call, Entrant, Setting, Sizes, Trial, WrongResultError
from mlagen.errors import UsageError

ROUNDS = 11
RESULTS_OF_L2 = 8  # a call that moves so many times L2 leaves little of its result there
SHORT_S = 100e-6  # where a call is shorter than this, all are timed behind another kernel too


@dataclass(frozen=True)
class _Ready:
    """A contender that gave the right result, called and by the replayed graph."""

    calls: list[Call]
    error: float
    timer: Timer
    method: str


def bench_package(
    package_dir: Path,
    *,
    shapes: Sequence[Sizes] | None = None,
    peers: bool = True,
    rounds: int = ROUNDS,
    origin: Origin | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measures a package on the current CUDA or ROCm device.

    Args:
        package_dir: folder of the generated package.
        shapes: the shapes to measure; None: `shapes_of` the package.
        peers: also measure peers, as far as they are installed.
        rounds: rounds of interleaved measurements.
        origin: of the run; None: as far as this machine says.
        on_row: given each row as it is done.

    Returns:
        A row a shape.

    Raises:
        UsageError: no device, or no such package.
        ToolError: a kernel left the device unusable.
    """
    if not torch.cuda.is_available():
        raise UsageError("no CUDA or ROCm device: benchmarks run on a GPU")
    package = load_package(package_dir)
    device = torch.device("cuda", torch.cuda.current_device())
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    bench = _Bench(Setting(package, device, l2_bytes), rounds, origin or origin_of_run(), peers=peers)
    shapes = shapes_of(package) if shapes is None else shapes
    bench.compile(shapes)
    rows = []
    for shape in shapes:
        rows.append(bench.measure(shape))
        if on_row is not None:
            on_row(rows[-1])
    return rows


class _Bench:
    def __init__(self, setting: Setting, rounds: int, origin: Origin, *, peers: bool) -> None:
        self.setting = setting
        self.rounds = rounds
        self.peers = peers
        self.origin = origin
        self.flush = flush_l2(setting.device)
        self.trials: dict[str, Callable[[Any], Trial[Any]]] = {}

    def trial(self, shape: Sizes) -> Trial[Any]:
        if shape.family not in self.trials:
            self.trials = {shape.family: FAMILIES[shape.family].trials(self.setting)}  # the last one's memory is freed
        return self.trials[shape.family](shape)

    def compile(self, shapes: Sequence[Sizes]) -> None:
        """Compiles the package's kernels that the shapes reach, on all cores; those that fail do so when measured."""
        launch = self.setting.package.module("_launch")
        with launch.recording() as variants:
            for shape in shapes:
                trial = self.trial(shape)
                for entrant in trial.entrants:
                    with suppress(Exception):
                        entrant.prepare(trial.inputs[0])()
        self.trials = {}  # caches that a call left without a launch are no input
        with suppress(Exception):
            launch.compile_all(variants.values())
        check_device("compilation")

    def measure(self, shape: Sizes) -> Row:
        gc.collect()  # the graphs of the shape before hold memory, and a failed call's traceback does
        torch.cuda.empty_cache()
        trial = self.trial(shape)
        others = peers_of(self.setting.package, shape, trial.inputs) if self.peers else ()
        prepared = {each.name: self._ready(each, trial, shape) for each in (*trial.entrants, *others)}
        ready = {name: each for name, each in prepared.items() if isinstance(each, _Ready)}
        times = interleave({name: each.timer for name, each in ready.items()}, self.rounds)
        behind = self._behind(ready, times, keep_results=trial.graph_only and self._keeps_results(trial))
        throttled = trial.roof.products_bound(trial.flops, trial.bytes_moved)  # by the card's power limit, once hot
        cool = {name: after_pause(ready[name].timer) for name in self._leaders(times)} if throttled else {}
        contenders = []
        for name, each in prepared.items():
            if isinstance(each, Contender):
                contenders.append(each)
                continue
            contenders.append(
                Contender(
                    name=name,
                    seconds=times.seconds[name],
                    ratio=times.ratios[name] if OURS in ready else None,
                    method=each.method,
                    eager_seconds=eager_time(each.calls[0]) if trial.launch_bound else None,
                    error=each.error,
                    spread=times.spreads[name],
                    ratio_spread=times.ratio_spreads[name] if OURS in ready else None,
                    cool_seconds=cool.get(name),
                    behind_seconds=behind.seconds.get(name),
                    behind_ratio=behind.ratios.get(name) if OURS in behind.seconds else None,
                    behind_spread=behind.ratio_spreads.get(name) if OURS in behind.seconds else None,
                )
            )
        return self._row(shape, trial, tuple(contenders))

    def _keeps_results(self, trial: Trial[Any]) -> bool:
        """Whether a result could still be in L2 when another call writes over it; larger ones would fill the memory."""
        return trial.bytes_moved < RESULTS_OF_L2 * self.setting.l2_bytes

    def _leaders(self, times: Interleaved) -> list[str]:
        """Ours and the fastest of the peers, as far as they ran."""
        peers = [name for name in times.seconds if name.partition(",")[0] != OURS]
        return [name for name in times.seconds if name == OURS] + sorted(peers, key=times.seconds.__getitem__)[:1]

    def _row(self, shape: Sizes, trial: Trial[Any], contenders: tuple[Contender, ...]) -> Row:
        package, ran = self.setting.package, any(each.is_peer and each.seconds for each in contenders)
        return Row(
            package=package.name,
            device=torch.cuda.get_device_name(self.setting.device),
            shape=shape,
            flops=trial.flops,
            bytes_moved=trial.bytes_moved,
            roof=trial.roof,
            contenders=contenders,
            torch=str(torch.__version__),
            triton=triton.__version__,
            rounds=self.rounds,
            driver=self.origin.driver,
            date=self.origin.date,
            commit=self.origin.commit,
            peers=self.origin.peer_versions() if ran else (),
            kernels=kernels_digest(package.folder, FAMILIES[shape.family].modules),
        )

    def _behind(self, ready: Mapping[str, _Ready], times: Interleaved, *, keep_results: bool) -> Interleaved:
        """Times behind another kernel, of those that replay a graph; none where no call is short."""
        graphs = {name: each for name, each in ready.items() if each.method == "graph"}
        if min((times.seconds[name] for name in graphs), default=SHORT_S) >= SHORT_S:
            return interleave({}, 0)
        timers = {name: BehindTimer(each.calls, keep_results=keep_results) for name, each in graphs.items()}
        return interleave(timers, self.rounds)

    def _ready(self, entrant: Entrant[Any], trial: Trial[Any], shape: Sizes) -> _Ready | Contender:
        """Prepares, checks and warms up one contender; where that fails, a contender that says why."""
        if entrant.unsupported is not None:
            return Contender(entrant.name, absent=entrant.unsupported)
        try:
            calls = [entrant.prepare(each) for each in trial.inputs]
            error = trial.checked(entrant, calls[0])
            if trial.graph_only:
                warm_up(calls[0])
                timer: Timer = GraphTimer(calls, keep_results=self._keeps_results(trial))
            else:
                timer = device_timer(calls, self.flush)
            if isinstance(timer, GraphTimer):
                error = max(error, trial.checked(entrant, timer.result))
        except WrongResultError as wrong:
            return Contender(entrant.name, error=wrong.error, absent=str(wrong))
        except Exception as failure:  # after any error of someone else's kernel, the others are still measured
            check_device(f"{shape} with {entrant.name}")
            return Contender(entrant.name, absent=absence(failure))
        return _Ready(calls, error, timer, "graph" if isinstance(timer, GraphTimer) else "events")
