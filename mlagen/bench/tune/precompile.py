"""Compiles tiles for the device at hand in several processes, so that a sweep finds them in Triton's cache on disk."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import torch

from mlagen.bench.check import one_line
from mlagen.bench.package import load_package
from mlagen.bench.trial import Setting
from mlagen.bench.tune.choose import Regime
from mlagen.bench.tune.tunable import tunables_of
from mlagen.plan.tiles.tile import Tile

MOST_PROCESSES = 12  # each holds half a GiB of the device


def compile_tile(package_dir: Path, kernels: str, tile: Tile) -> str | None:
    """Launches every kernel that takes a tile once with it; why it cannot run, in one line, or None."""
    package = load_package(package_dir)
    (tunable,) = [each for each in tunables_of(package.facts.wrappers, package.facts.kind) if each.name == kernels]
    device = torch.device("cuda", torch.cuda.current_device())
    driver = tunable.driver(package, tunable.module, package.device_facts(device))
    shape = tunable.shape_of(package, Regime(0, 1, 1))
    trial = tunable.small_trials(Setting(package, device, l2_bytes=0))(shape)
    call = trial.entrants[0].prepare(trial.inputs[0])
    try:
        for schedule in driver.smallest(tile, tunable.counts(shape)):
            driver.scheduled(schedule, call)()
        torch.cuda.synchronize()
    except Exception as error:  # a compiler's or a driver's: the sweep goes on without the tile
        return one_line(error)
    return None


def compile_tiles(package_dir: Path, kernels: str, tiles: Sequence[Tile]) -> dict[Tile, str | None]:
    """Compiles tiles in parallel. Returns `compile_tile`'s result for each, without tiles of a pool that broke."""
    processes = max(1, min(len(tiles), MOST_PROCESSES, (os.cpu_count() or 2) - 1))
    said: dict[Tile, str | None] = {}
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    try:
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            for tile, reason in zip(tiles, pool.map(partial(compile_tile, package_dir, kernels), tiles), strict=True):
                said[tile] = reason
    except BrokenProcessPool:
        return said
    return said
