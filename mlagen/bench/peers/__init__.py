"""Peers: kernels to measure a package against. None is required: those that do not import are absent, with a reason.

BENCHMARKS of a family's module has a function for each of the family's benchmarks, which returns the peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from mlagen.bench.families import MODULES
from mlagen.bench.package import BenchPackage
from mlagen.bench.trial import Entrant, Sizes

PEERS: dict[str, Callable[[BenchPackage, Any, Sequence[Any]], Iterable[Entrant[Any]]]] = {
    name: peers for module in MODULES for name, peers in import_module(f"{__package__}.{module}").BENCHMARKS.items()
}


def peers_of(package: BenchPackage, shape: Sizes, inputs: Sequence[Any]) -> list[Entrant[Any]]:
    """Others' kernels that compete with a package's at a shape, also those that cannot run it or are not installed.

    Args:
        package: the package.
        shape: sizes of the call.
        inputs: its trial's input sets.
    """
    return list(PEERS[shape.family](package, shape, inputs))
