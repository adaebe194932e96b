"""Tiles worth trying on a target: those that fit its shared memory and spill no register, compiled without the GPU."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from mlagen.bench.tune.progress import progress
from mlagen.bench.tune.tunable import DENSE_DECODE, SPARSE_DECODE, SPARSE_FWD, Tunable, tunables_of
from mlagen.compile import Toolchain, check_limits, compile_jobs
from mlagen.errors import LimitError, MlagenError, ToolError, UsageError
from mlagen.plan import TARGETS, Plan, Target, Tile, make_plan
from mlagen.plan.tiles.chunks import next_power_of_2
from mlagen.plan.tiles.tile import ACCUMULATOR_REGISTERS, accumulator_registers
from mlagen.spec import load

BLOCK_H = (16, 32, 64)
BLOCK_N = (16, 32, 64, 128)
NUM_WARPS = (4, 8)
# Where indices come with the step that uses them, K's loads wait for them and a deeper pipeline stays empty.
STAGES = {("cuda", False): (2, 3), ("cuda", True): (2, 3, 4), ("hip", False): (1, 2), ("hip", True): (1, 2)}


def candidate_tiles(kernels: Tunable, plan: Plan, num_heads: int, target: Target) -> list[Tile]:
    """Tiles for calls of `num_heads` heads, or rows of dense attention, that should fit the target.

    They suit the kernels and the plan, and should fit the target's shared memory and registers.
    """
    widest = max(min(BLOCK_H), next_power_of_2(num_heads))
    tiles = [
        Tile(block_h, block_n, num_warps, num_stages, indices_ahead)
        for block_h, block_n, num_warps, indices_ahead in itertools.product(BLOCK_H, BLOCK_N, NUM_WARPS, (False, True))
        for num_stages in STAGES[target.backend, indices_ahead]
        if block_h <= widest
    ]
    chunks = plan.of(kernels.family).chunks
    return [
        tile
        for tile in tiles
        if kernels.suits(plan, tile, target)
        and accumulator_registers(tile, chunks, target) <= ACCUMULATOR_REGISTERS[tile.block_h]
        and _fits(kernels, plan, tile, target)
    ]


def _fits(kernels: Tunable, plan: Plan, tile: Tile, target: Target) -> bool:
    try:
        kernels.row(plan, tile, target)
    except LimitError:
        return False
    return True


def unfit_tiles(
    kernels: Tunable,
    plan: Plan,
    tiles: Iterable[Tile],
    target: Target,
    on_done: Callable[[object], None] = lambda _: None,
    toolchain: Toolchain | None = None,
) -> dict[Tile, str]:
    """Compiles the kernels of each tile without the GPU, a core each; gives the tiles that break a limit, and how.

    Args:
        kernels, plan, target: those that the tiles belong to.
        tiles: the tiles.
        on_done: called when a tile is done.
        toolchain: the Triton that compiles; None: the installed one.
    """
    with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
        folder = Path(temporary) / plan.spec.name
        jobs = kernels.jobs(plan, tiles, target, folder, toolchain)

        def reason(tile: Tile) -> str | None:
            try:
                broken = check_limits(compile_jobs(folder, jobs[tile], workers=1, toolchain=toolchain))
            except ToolError as error:
                return str(error)
            finally:
                on_done(tile)
            return str(broken[0]) if broken else None

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            reasons = zip(jobs, pool.map(reason, jobs), strict=True)
            return {tile: why for tile, why in reasons if why is not None}


def read_tiles(path: Path) -> set[Tile]:
    """Tiles of a file that `python -m mlagen.bench.tune.candidates` wrote.

    Raises:
        UsageError: it is no such file.
    """
    try:
        return {Tile(**entry) for entry in json.loads(path.read_text())}
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path}: takes a JSON list of tiles ({error})") from None


def main(arguments: list[str] | None = None) -> int:
    """Prints the candidates that fit under the Triton at hand, as JSON; needs no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m mlagen.bench.tune.candidates", description="Lists tiles that a target can run."
    )
    parser.add_argument("--spec", type=Path, required=True, help="the spec")
    parser.add_argument("--target", choices=tuple(TARGETS), required=True)
    names = [SPARSE_FWD.name, SPARSE_DECODE.name, DENSE_DECODE.name]
    parser.add_argument("--kernels", choices=names, help="whose tiles; default: the first that the spec has")
    options = parser.parse_args(arguments)
    try:
        plan, target = make_plan(load(options.spec)), TARGETS[options.target]
        tunables = tunables_of(plan.spec.wrappers, plan.spec.attention_kind)
        found = [each for each in tunables if options.kernels in (None, each.name)]
        if not found:
            raise UsageError(f"{plan.spec.name} has no {options.kernels or 'attention'} kernels")
        tiles = candidate_tiles(found[0], plan, found[0].widest(plan.spec.model.num_heads), target)
        with progress() as report, report.steps("compile", len(tiles)) as step:
            unfit = unfit_tiles(found[0], plan, tiles, target, lambda _: step())
            for why in unfit.values():
                report.say(why)
    except MlagenError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps([asdict(tile) for tile in tiles if tile not in unfit], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
