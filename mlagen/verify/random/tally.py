"""Stations and results of random calls as plain data; needs neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

FREE = "free"  # the package picks the kernel


@dataclass(frozen=True)
class Station:
    """Random calls of one family of a package on one kind of kernel.

    Attributes:
        package: its folder.
        family: the family's word.
        kernel: FREE, or the kernel that calls are forced to (mlagen.verify.call.subject.FORCED); on a CPU a target.
    """

    package: str
    family: str
    kernel: str

    @property
    def name(self) -> str:
        """Seeds all draws, so it holds no folder."""
        return f"{self.package.rstrip('/').rpartition('/')[2]}/{self.family}/{self.kernel}"


@dataclass
class Tally:
    """Results of a batch of calls.

    Attributes:
        drawn: numbers of calls that were drawn.
        calls, wrong, skipped: how many there were: a number may be for two.
        seconds: that they took, the first of a shape not counted.
        first_seconds: that the first took, and with it compilation.
        failures: [call, way, finding] of each wrong one.
        kernels: by "module:kernel" of sm90 kernels, [calls, wrong] that launched it.
        broken: the device's context is lost.
        operator_calls: calls that went through an operator of torch.
    """

    drawn: int = 0
    calls: int = 0
    wrong: int = 0
    skipped: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    kernels: dict[str, list[int]] = field(default_factory=dict)
    broken: bool = False
    operator_calls: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Tally:
        """From plain data."""
        return cls(**value)
