"""Results of a benchmark: a row a shape, with a figure of each kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from mlagen.bench.roofline import Roof
from mlagen.bench.trial import OURS, Sizes

Key: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True)
class Contender:
    """Results of one kernel at one shape.

    Attributes:
        name: `ours`, `ours, batch-invariant`, or the peer's.
        seconds: median seconds a call on the device, in rounds without a pause; None if it did not run.
        ratio: median over rounds of its seconds over ours; above 1, ours is faster.
        method: `graph` or `events`.
        eager_seconds: wall seconds a call from Python; None where the shape is no launch-bound one.
        error: of its result: relative Frobenius error, or the share of wrong entries where they are integers.
        absent: why there are no times, in one line.
        spread, ratio_spread: 10th to 90th percentile of the rounds' seconds and ratios, over their median.
        cool_seconds: of a round after a pause; None where bytes bound the shape, which no power limit slows.
        behind_seconds: median seconds that a call adds behind another kernel; None where no contender is that short.
        behind_ratio, behind_spread: of those, as `ratio` and `ratio_spread`.
    """

    name: str
    seconds: float | None = None
    ratio: float | None = None
    method: str | None = None
    eager_seconds: float | None = None
    error: float | None = None
    absent: str | None = None
    spread: float | None = None
    ratio_spread: float | None = None
    cool_seconds: float | None = None
    behind_seconds: float | None = None
    behind_ratio: float | None = None
    behind_spread: float | None = None

    @property
    def quoted_seconds(self) -> float | None:
        """The time that is quoted: behind another kernel where that was measured."""
        return self.seconds if self.behind_seconds is None else self.behind_seconds

    @property
    def quoted_ratio(self) -> float | None:
        """The ratio of the same."""
        return self.ratio if self.behind_ratio is None else self.behind_ratio

    @property
    def is_peer(self) -> bool:
        """Whether the kernel is someone else's."""
        return self.name.partition(",")[0] != OURS


@dataclass(frozen=True)
class Row:
    """One shape.

    Attributes:
        package: name of the generated package.
        device: name of the device.
        shape: sizes of the call.
        flops, bytes_moved: the call's work, least.
        roof: the ceilings over it.
        contenders: ours first.
        torch, triton: versions; None where an older file does not say.
        rounds: how many were interleaved; likewise.
        driver, date, commit: of its origin; None where an older file, or the machine, does not say.
        peers: packages of the peers that ran, with their versions; None where an older file does not say.
        kernels: digest of the kernels of the shape's family; likewise.
    """

    package: str
    device: str
    shape: Sizes
    flops: int
    bytes_moved: int
    roof: Roof
    contenders: tuple[Contender, ...]
    torch: str | None = None
    triton: str | None = None
    rounds: int | None = None
    driver: str | None = None
    date: str | None = None
    commit: str | None = None
    peers: tuple[str, ...] | None = None
    kernels: str | None = None

    @property
    def key(self) -> Key:
        """Key that tells the row from others: device, package, shape."""
        return self.device, self.package, str(self.shape)

    @property
    def ours(self) -> Contender:
        """The package's own."""
        return self.contenders[0]

    @property
    def roof_seconds(self) -> float:
        """Seconds that the ceilings allow."""
        return self.roof.seconds(self.flops, self.bytes_moved)

    @property
    def best_peer(self) -> Contender | None:
        """The fastest of the peers that ran: by the ratio to ours if ours ran, else by time."""
        ran = [each for each in self.contenders if each.is_peer and each.seconds is not None]
        return min(ran, key=lambda each: (each.quoted_ratio or math.inf, each.seconds), default=None)

    def of(self, name: str) -> Contender:
        """A kernel's part of the row; absent if it has none."""
        return next((each for each in self.contenders if each.name == name), Contender(name, absent="not measured"))
