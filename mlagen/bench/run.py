"""Measures a generated package beside its peers: right first, then fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from mlagen.bench.check import check_device
from mlagen.bench.families import FAMILIES, shapes_of
from mlagen.bench.measure import (
    Timer,
    after_pause,
    device_timer,
    eager_time,
    flush_l2,
    graph_timer,
    interleave,
    warm_up,
)
from mlagen.bench.package import load_package
from mlagen.bench.peers import peers_of
from mlagen.bench.peers.libraries import absence
from mlagen.bench.report.origin import origin, peer_versions
from mlagen.bench.report.rows import Contender, Row
from mlagen.bench.trial import OURS, Call, Entrant, Setting, Sizes, Trial
from mlagen.errors import UsageError

ROUNDS = 11


@dataclass(frozen=True)
class _Ready:
    """A contender that gave the right result."""

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
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measures a package on the current CUDA or ROCm device.

    Args:
        package_dir: folder of the generated package.
        shapes: what to measure; None: `shapes_of` the package.
        peers: measure peers too, as far as they are installed.
        rounds: rounds of interleaved measurements.
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
    bench = _Bench(Setting(package, device, l2_bytes), rounds, peers=peers)
    rows = []
    for shape in shapes_of(package) if shapes is None else shapes:
        rows.append(bench.measure(shape))
        if on_row is not None:
            on_row(rows[-1])
    return rows


class _Bench:
    def __init__(self, setting: Setting, rounds: int, *, peers: bool) -> None:
        self.setting = setting
        self.rounds = rounds
        self.peers = peers
        self.origin = origin()
        self.flush = flush_l2(setting.device)
        self.trials: dict[str, Callable[[Any], Trial[Any]]] = {}

    def measure(self, shape: Sizes) -> Row:
        if shape.family not in self.trials:
            self.trials = {shape.family: FAMILIES[shape.family].trials(self.setting)}  # the last one's memory is freed
        trial = self.trials[shape.family](shape)
        others = peers_of(self.setting.package, shape, trial.inputs) if self.peers else ()
        prepared = {each.name: self._ready(each, trial, shape) for each in (*trial.entrants, *others)}
        ready = {name: each for name, each in prepared.items() if isinstance(each, _Ready)}
        times = interleave({name: each.timer for name, each in ready.items()}, self.rounds)
        held_back = trial.roof.products_bound(trial.flops, trial.bytes_moved)  # by the card's power limit, once hot
        cool = {name: after_pause(each.timer) for name, each in ready.items()} if held_back else {}
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
                )
            )
        return Row(
            package=self.setting.package.name,
            device=torch.cuda.get_device_name(self.setting.device),
            shape=shape,
            flops=trial.flops,
            bytes_moved=trial.bytes_moved,
            roof=trial.roof,
            contenders=tuple(contenders),
            torch=str(torch.__version__),
            triton=triton.__version__,
            rounds=self.rounds,
            driver=self.origin.driver,
            date=self.origin.date,
            commit=self.origin.commit,
            peers=peer_versions() if any(each.is_peer and each.seconds for each in contenders) else (),
        )

    def _ready(self, entrant: Entrant[Any], trial: Trial[Any], shape: Sizes) -> _Ready | Contender:
        """Prepares, checks and warms up one contender; where that fails, a contender that says why."""
        if entrant.unsupported is not None:
            return Contender(entrant.name, absent=entrant.unsupported)
        try:
            calls = [entrant.prepare(each) for each in trial.inputs]
            error = trial.error_of(calls[0])
            if not error <= trial.error_limit:
                return Contender(entrant.name, error=error, absent=f"wrong result: error {error:.2g}")
            if trial.graph_only:
                warm_up(calls[0])
                timer, method = graph_timer(calls, keep_results=True), "graph"
            else:
                timer, method = device_timer(calls, self.flush)
        except Exception as failure:  # whatever someone else's kernel raises, the others are still to be measured
            check_device(f"{shape} with {entrant.name}")
            return Contender(entrant.name, absent=absence(failure))
        return _Ready(calls, error, timer, method)
