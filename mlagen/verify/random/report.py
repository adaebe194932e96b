"""The report of random calls: counts, place, and the wrong ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlagen.verify.random.tally import Station, Tally


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of each Python file of a package."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.py"))}


@dataclass
class Counts:
    """Calls, and how many of them were wrong.

    Attributes:
        calls, wrong: how many.
        seconds: that they took, compilation not counted.
    """

    calls: int = 0
    wrong: int = 0
    seconds: float = 0.0

    def add(self, calls: int, wrong: int, seconds: float = 0.0) -> None:
        """Counts more of them."""
        self.calls += calls
        self.wrong += wrong
        self.seconds = round(self.seconds + seconds, 3)


@dataclass
class Report:
    """Results of random calls.

    Attributes:
        run: card, driver, versions, date, commit, seed, processes, seconds, delays.
        packages: by name, the hashes of its `files`.
        stations: by package/family/kernel.
        kernels: by package, and "module:kernel" of the sm90 kernels that ran.
        failures: a line each that repeats it.
        compile_seconds: that first calls of shapes took, over all processes.
        hangs: calls that no answer came of.
        operator_calls: calls that went through an operator of torch.
    """

    run: dict[str, Any]
    packages: dict[str, dict[str, str]] = field(default_factory=dict)
    stations: dict[str, Counts] = field(default_factory=dict)
    kernels: dict[str, dict[str, Counts]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    compile_seconds: float = 0.0
    hangs: int = 0
    operator_calls: int = 0

    def add(self, station: Station, tally: Tally) -> None:
        """Counts a batch."""
        self.stations.setdefault(station.name, Counts()).add(tally.calls, tally.wrong, tally.seconds)
        package = station.name.partition("/")[0]
        for kernel, (calls, wrong) in tally.kernels.items():
            share = tally.seconds * calls / tally.calls if tally.calls else 0.0
            self.kernels.setdefault(package, {}).setdefault(kernel, Counts()).add(calls, wrong, share)
        self.compile_seconds += tally.first_seconds
        self.operator_calls += tally.operator_calls

    @property
    def total(self) -> Counts:
        """Over all stations."""
        whole = Counts()
        for counts in self.stations.values():
            whole.add(counts.calls, counts.wrong, counts.seconds)
        return whole

    def to_json(self) -> dict[str, Any]:
        """As plain data."""

        def plain(counts: Mapping[str, Counts]) -> dict[str, Any]:
            return {name: vars(one) for name, one in sorted(counts.items())}

        return {
            **self.run,
            **vars(self.total),
            "compile_seconds": round(self.compile_seconds, 1),
            "hangs": self.hangs,
            "operator_calls": self.operator_calls,
            "failures": self.failures,
            "stations": plain(self.stations),
            "packages": {
                name: {"files": files, "kernels": plain(self.kernels.get(name, {}))}
                for name, files in sorted(self.packages.items())
            },
        }
