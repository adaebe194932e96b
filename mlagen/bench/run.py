"""Measures a generated package beside its peers: right first, then fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mlagen.bench.check import Reference, check_device, error_limit
from mlagen.bench.measure import Timer, device_timer, eager_time, flush_l2, interleave
from mlagen.bench.package import BenchPackage, load_package
from mlagen.bench.peers import PEERS, Peer, absence
from mlagen.bench.roofline import Roof, roof_of
from mlagen.bench.shapes import Inputs, Shape, default_shapes, make_inputs
from mlagen.errors import UsageError

OURS = "ours"
BATCH_INVARIANT = "ours, batch-invariant"
ROUNDS = 15
EAGER_TOKENS = 1  # a call of so few tokens is bound by its launch, which is what eager time shows

Prepare = Callable[[Inputs], Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class Contender:
    """What one kernel did at one shape.

    Attributes:
        name: `ours`, `ours, batch-invariant`, or the peer's.
        seconds: median seconds a call on the device; None if it did not run.
        ratio: median over rounds of its seconds over ours; above 1, ours is faster.
        method: `graph` or `events`.
        eager_seconds: wall seconds a call from Python; None where the shape is no launch-bound one.
        error: relative Frobenius error against float64.
        absent: why there are no times, in one line.
    """

    name: str
    seconds: float | None = None
    ratio: float | None = None
    method: str | None = None
    eager_seconds: float | None = None
    error: float | None = None
    absent: str | None = None


@dataclass(frozen=True)
class Row:
    """One shape.

    Attributes:
        package: name of the generated package.
        device: name of the device.
        shape: sizes of the call.
        flops, bytes_moved: the call's work, least.
        roof_seconds: what the device's ceilings allow.
        roof_origin: where those are from.
        contenders: ours first.
    """

    package: str
    device: str
    shape: Shape
    flops: int
    bytes_moved: int
    roof_seconds: float
    roof_origin: str
    contenders: tuple[Contender, ...]

    @property
    def ours(self) -> Contender:
        """The package's own."""
        return self.contenders[0]


@dataclass(frozen=True)
class _Ready:
    """A contender that gave the right result."""

    calls: list[Callable[[], torch.Tensor]]
    error: float
    timer: Timer
    method: str


def bench_package(
    package_dir: Path,
    *,
    shapes: Sequence[Shape] | None = None,
    peers: bool = True,
    rounds: int = ROUNDS,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measures a package on the current CUDA or ROCm device.

    Args:
        package_dir: folder of the generated package.
        shapes: what to measure; None: `default_shapes`.
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
    bench = _Bench(package, device, PEERS if peers else (), rounds)
    rows = []
    for shape in default_shapes(package.facts) if shapes is None else shapes:
        rows.append(bench.measure(shape))
        if on_row is not None:
            on_row(rows[-1])
    return rows


class _Bench:
    def __init__(self, package: BenchPackage, device: torch.device, peers: Sequence[Peer], rounds: int) -> None:
        self.package = package
        self.device = device
        self.peers = peers
        self.rounds = rounds
        self.roof: Roof = roof_of(device)
        self.flush = flush_l2(device)
        self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def measure(self, shape: Shape) -> Row:
        facts = self.package.facts
        inputs = make_inputs(shape, facts, self.device, self.l2_bytes)
        reference = Reference(inputs[0], facts)
        prepared = {
            name: self._ready(name, prepare, inputs, reference) if why_not is None else Contender(name, absent=why_not)
            for name, prepare, why_not in self._contenders(shape)
        }
        ready = {name: each for name, each in prepared.items() if isinstance(each, _Ready)}
        times = interleave({name: each.timer for name, each in ready.items()}, self.rounds)
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
                    eager_seconds=eager_time(each.calls[0]) if shape.tokens <= EAGER_TOKENS else None,
                    error=each.error,
                )
            )
        flops, moved = shape.flops(facts), shape.bytes_moved(facts, self.package.row_bytes)
        return Row(
            package=self.package.name,
            device=torch.cuda.get_device_name(self.device),
            shape=shape,
            flops=flops,
            bytes_moved=moved,
            roof_seconds=self.roof.seconds(flops, moved),
            roof_origin=self.roof.origin,
            contenders=tuple(contenders),
        )

    def _contenders(self, shape: Shape) -> list[tuple[str, Prepare, str | None]]:
        """(name, how to prepare a call, why it cannot run), ours first."""
        return [
            (OURS, self.package.call, None),
            (BATCH_INVARIANT, partial(self.package.call, batch_invariant=True), None),
            *((peer.name, peer.prepare, peer.unsupported(shape, self.package.facts)) for peer in self.peers),
        ]

    def _ready(self, name: str, prepare: Prepare, inputs: list[Inputs], reference: Reference) -> _Ready | Contender:
        """Prepares, checks and warms up one contender; where that fails, a contender that says why."""
        try:
            calls = [prepare(each) for each in inputs]
            error = reference.error_of(calls[0])
            if not error <= error_limit(inputs[0].q.dtype):
                return Contender(name, error=error, absent=f"wrong result: relative error {error:.2g}")
            timer, method = device_timer(calls, self.flush)
        except Exception as failure:  # whatever someone else's kernel raises, the others are still to be measured
            check_device(f"{inputs[0].q.shape[0]} tokens with {name}")
            return Contender(name, absent=absence(failure))
        return _Ready(calls, error, timer, method)
