"""Host time of a package's calls: by the wrapper's text, the first and the second of a signature, and later ones.

    PYTHONPATH=. python tests/generated/host_time.py PACKAGE_DIR [--device cuda] [--rounds 200] [--only PATTERN]

Prints medians in us. On a CPU launches are left out, so that only Python is timed. On a GPU, rounds end with a
synchronisation, which is not timed.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from alone import arguments
from noted import on_a_device

from mlagen.verify.worker import import_package

COLUMNS = ("text", "first", "second", "later")


def _nothing(*_: Any) -> None:
    """A launch that is left out."""


@contextmanager
def on_a_cpu(folder: Path) -> Iterator[ModuleType]:
    """A package without launches."""
    compiled = SimpleNamespace(run=_nothing, function=1, packed_metadata=None)
    with on_a_device(folder, checked_calls=1) as (package, launched):
        launched.get = lambda key: compiled  # type: ignore[method-assign]
        yield package


@contextmanager
def on_a_gpu(folder: Path) -> Iterator[ModuleType]:
    """A package on the current GPU."""
    yield import_package(folder)


def moved(call: dict[str, Any], device: str) -> dict[str, Any]:
    """A call on a device; arguments that shared memory still share it."""
    memory: dict[int, torch.UntypedStorage] = {}

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in memory:
                copied = torch.empty(0, dtype=torch.uint8).set_(storage).to(device, copy=True)  # type: ignore[call-overload]
                memory[storage.data_ptr()] = copied.untyped_storage()
            place = (value.storage_offset(), value.shape, value.stride())
            new = torch.empty(0, dtype=value.dtype, device=device)
            return new.set_(memory[storage.data_ptr()], *place)  # type: ignore[call-overload]
        if isinstance(value, (tuple, list)):
            return type(value)(map(move, value))
        return value

    return {name: move(value) for name, value in call.items()}


def timed(call: Callable[[], Any]) -> float:
    """Microseconds of a call."""
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1e3


def measure(wrapper: Any, call: dict[str, Any], rounds: int, synchronise: Callable[[], None]) -> list[float]:
    """Medians of COLUMNS; their calls take turns."""
    found: list[list[float]] = []
    for _ in range(rounds + 2):
        wrapper.checked.clear()
        wrapper.counts.clear()
        synchronise()
        row = [timed(lambda: wrapper.__wrapped__(**call))]
        row += [timed(lambda: wrapper(**call)) for _ in range(2)]
        row.append(min(timed(lambda: wrapper(**call)) for _ in range(5)))
        found.append(row)
    return [statistics.median(column) for column in zip(*found[2:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("package", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--only", default="*", help="shell pattern of wrappers")
    options = parser.parse_args()
    is_gpu = options.device == "cuda"
    with (on_a_gpu if is_gpu else on_a_cpu)(options.package) as package:
        print(f"{'us':45}", *(f"{name:>8}" for name in COLUMNS), "first/text")
        for name, call in arguments(package).items():
            wrapper = getattr(package, name)
            if not fnmatch.fnmatchcase(name, options.only) or not hasattr(wrapper, "checked"):
                continue
            row = measure(
                wrapper, moved(call, options.device), options.rounds, torch.cuda.synchronize if is_gpu else _nothing
            )
            print(f"{name:45}", *(f"{one:8.1f}" for one in row), f"{row[1] / row[0]:10.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
