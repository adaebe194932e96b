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

from mlagen.bench.driver import Driver
from mlagen.bench.package import load_package
from mlagen.bench.progress import one_line
from mlagen.bench.shapes import Shape, make_inputs
from mlagen.plan.tiles import Tile

MOST_PROCESSES = 12  # each holds half a GiB of the device


def compile_tile(package_dir: Path, tile: Tile) -> str | None:
    """Launches the single pass and the split kernel once with a tile; why it cannot run, in one line, or None."""
    package = load_package(package_dir)
    device = torch.device("cuda", torch.cuda.current_device())
    driver = Driver(package, package.device_facts(device))
    shape = Shape("decode", 1, 1, 256, 2 * tile.block_n)
    (inputs,) = make_inputs(shape, package.facts, device, 0, sets=1)
    out = torch.empty(1, 1, package.facts.d_v, dtype=inputs.q.dtype, device=device)
    try:
        for splits in (1, 2):
            schedule = driver.schedule(tile, 1, shape.tokens, shape.num_heads, shape.topk, splits)
            driver.call(schedule, inputs, out, driver.workspace(device))()
        torch.cuda.synchronize()
    except Exception as error:  # a compiler's or a driver's: the sweep goes on without the tile
        return one_line(error)
    return None


def compile_tiles(package_dir: Path, tiles: Sequence[Tile]) -> dict[Tile, str | None]:
    """Compiles tiles in parallel; gives what `compile_tile` says of each. Tiles of a pool that broke are left out."""
    processes = max(1, min(len(tiles), MOST_PROCESSES, (os.cpu_count() or 2) - 1))
    said: dict[Tile, str | None] = {}
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    try:
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            for tile, reason in zip(tiles, pool.map(partial(compile_tile, package_dir), tiles), strict=True):
                said[tile] = reason
    except BrokenProcessPool:
        return said
    return said
