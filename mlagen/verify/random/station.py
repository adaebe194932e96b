"""A station: random calls of one family of a package on one kind of kernel."""

from __future__ import annotations

import fnmatch
import importlib
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from mlagen.verify.call.case import (
    COLLECT,
    E4M3,
    Q_HALVES,
    ROWS_32,
    SHARED,
    SM90,
    SWAP_AB,
    Case,
    CaseFailedError,
    CaseSkippedError,
)
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.operators import Operators
from mlagen.verify.call.subject import FORCED, Subject, kernels_of, launch_of
from mlagen.verify.families import KERNELS
from mlagen.verify.random import attention, candidates, indexer, pools, rows
from mlagen.verify.random.dice import Dice
from mlagen.verify.random.scene import Scene
from mlagen.verify.random.tally import FREE, Station, Tally
from mlagen.verify.random.ways import WAYS, built, way_of
from mlagen.verify.worker import cause

DRAWS: dict[str, Callable[[Scene], Case]] = {
    "sparse_fwd": attention.sparse_fwd,
    "sparse_decode": attention.sparse_decode,
    "dense_decode": attention.dense_decode,
    "dense_fwd": attention.dense_fwd,
    "topk": indexer.topk,
    "mqa_logits": indexer.mqa_logits,
    "indexer_select": indexer.indexer_select,
    "candidates": candidates.candidates,
    "indexer_cache": indexer.indexer_cache,
    "cache": rows.cache,
    "prologue": rows.prologue,
    "compressor": rows.compressor,
    "latents": rows.latents,
    "out_quant": rows.out_quant,
    "kpool": pools.kpool,
    "indices": rows.indices,
    "merge_states": rows.merge_states,
}
# Families that a kernel is forced in.
FORCED_IN = {
    SM90: (
        *("sparse_fwd", "sparse_decode", "dense_decode", "dense_fwd"),
        *("topk", "mqa_logits", "indexer_select", "candidates"),
    ),
    ROWS_32: ("dense_decode",),
    Q_HALVES: ("dense_decode",),
    E4M3: ("sparse_decode",),
    SWAP_AB: ("sparse_fwd", "dense_decode"),
    SHARED: ("sparse_fwd",),
    COLLECT: ("topk",),
}
STEERED = ("multiprocessors", "tile", "sm90_tile", "room")  # of a case: with them its call is forced
OPERATORS_SHARE = 0.5  # of the shapes of a package that registers operators: their calls go through these
MOST_DETAIL = 400  # characters of a failure's description


def stations_of(folder: str, package: ModuleType, device: str, only: Sequence[str]) -> list[Station]:
    """The stations of a package that match one of `only`, patterns of family/kernel, or all."""
    spec = package.SPEC["spec"]
    found = []
    for family in KERNELS:
        if family.name not in DRAWS or not family.cases(spec, "cpu"):
            continue
        kernels = [spec["targets"][0]] if device == "cpu" else [FREE]
        if device == "cuda" and launch_of(package).device_facts(torch.device("cuda", 0)).sm90:
            there = kernels_of(package)
            kernels += [kernel for kernel, families in FORCED_IN.items() if kernel in there and family.name in families]
        found += [Station(folder, family.name, kernel) for kernel in kernels]
    return [one for one in found if not only or any(fnmatch.fnmatchcase(f"{one.family}/{one.kernel}", o) for o in only)]


def watched(launch: Any) -> set[str]:
    """The set of sm90 kernels that a package's module of launches has launched, "module:kernel"."""
    if hasattr(launch.launch, "launched"):
        found: set[str] = launch.launch.launched
        return found
    launched, inner = set[str](), launch.launch

    def noting(kernel: Any, *arguments: Any, **named: Any) -> None:
        module = kernel.fn.__module__.rpartition(".")[2]
        if "_sm90" in module:
            launched.add(f"{module}:{kernel.fn.__name__}")
        inner(kernel, *arguments, **named)
        noting.after()  # type: ignore[attr-defined]

    noting.launched = launched  # type: ignore[attr-defined]
    noting.after = lambda: None  # type: ignore[attr-defined]
    launch.launch = noting
    return launched


class Tester:
    """Makes the random calls of a station.

    Args:
        station: its package, family and kernel.
        package: its package, imported.
        device: "cpu" or "cuda".
        seed: of all that is drawn.
        ways: the ways to make calls, keys of WAYS; none: as `way_of` draws them.
    """

    def __init__(
        self, station: Station, package: ModuleType, device: str, seed: int, *, ways: Sequence[str] = ()
    ) -> None:
        self._ways = ways
        self.station, self._package, self._device, self._seed = station, package, device, seed
        self._spec = package.SPEC["spec"]
        self._facts = Facts.of(self._spec)
        (self._family,) = [family for family in KERNELS if family.name == station.family]
        targets = {kernel: target for target, kernel in FORCED.items()}
        self._target = targets.get(station.kernel, device if device == "cuda" else station.kernel)
        self._launched = watched(launch_of(package))
        # Kept calls too take memory by torch.empty then, which is poisoned.
        internals: Any = importlib.import_module(f"{package.__name__}._internals")
        internals.empty_strided = None

    def draw(self, shape: int, number: int) -> tuple[Subject, Case, Dice]:
        """The subject, the case of a call, and the dice for the rest of it."""
        name = f"{self._seed}/{self.station.name}/{shape}"
        of_shape, of_call = Dice(name), Dice(f"{name}/{number}")
        keeps = of_shape.chance(0.5) and self.station.kernel == FREE
        scene = Scene(
            self._spec, self._facts, of_shape, of_call, self._device == "cuda",
            kernel=FORCED.get(self._target),
        )  # fmt: skip
        case = DRAWS[self.station.family](scene)
        keeps &= not any(getattr(case, name, None) is not None for name in STEERED)
        # Dice of its own, so that the other draws are the same with and without operators.
        through = self._spec.get("ops") and Dice(f"{name}/operators").chance(OPERATORS_SHARE)
        operators = Operators(self._package) if through else None
        return Subject(self._package, self._facts, self._device, self._target, keeps, operators), case, of_call

    def call(self, shape: int, number: int, tally: Tally) -> None:
        """Makes one call and counts it."""
        self._launched.clear()
        tally.drawn += 1
        way, detail, count = "draw", "", 1
        operators = None
        try:
            subject, case, dice = self.draw(shape, number)
            operators = subject.operators
            way = dice.pick(*self._ways) if self._ways else way_of(self._family, subject, case, dice)
            count = WAYS[way](built(self._family, subject, case, dice.seed()), dice)
        except CaseSkippedError:
            tally.skipped += 1
            return
        except CaseFailedError as failure:
            detail = str(failure)
        except Exception as error:
            detail = cause(error)
            if detail.endswith("backend is gluon"):
                tally.skipped += 1
                return
        tally.calls += count
        if operators is not None and operators.calls:
            tally.operator_calls += count
            way += ", operator"
        wrong = int(bool(detail))
        tally.wrong += wrong
        for kernel in self._launched:
            counts = tally.kernels.setdefault(kernel, [0, 0])
            counts[0] += count
            counts[1] += wrong
        if detail:
            tally.failures.append((number, way, detail[:MOST_DETAIL]))
            tally.broken = self._device == "cuda" and ("CUDA error" in detail or "Triton Error" in detail)

    def describe(self, shape: int, number: int) -> str:
        """The case of a call, in words."""
        subject, case, _ = self.draw(shape, number)
        return f"{case!r}{'' if subject.operators is None else ', through its operator where it has one'}"

    def batch(
        self, shape: int, first: int, most: int, seconds: float, begins: Callable[[int], None], *, stop: bool = False
    ) -> Tally:
        """Makes up to `most` calls of a shape from the number `first` on, as many as begin within so many seconds.

        `begins` is called with each before it begins. With `stop` a wrong one is the last.
        """
        tally, number = Tally(), first
        start = time.monotonic()
        while number < first + most and not tally.broken and not (stop and tally.wrong):
            begins(number)
            begin = time.monotonic()
            self.call(shape, number, tally)
            taken = time.monotonic() - begin
            if number == 0:
                tally.first_seconds = taken
                start = time.monotonic()
            else:
                tally.seconds += taken
            number += 1
            if time.monotonic() - start > seconds:
                break
        return tally
