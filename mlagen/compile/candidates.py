"""Replacements for kernels over a limit: other tiles of portable kernels, other registers of sm90 kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mlagen.compile.job import CompileJob
from mlagen.plan import TARGETS, DenseFwdPlan, DenseFwdTile, Plan, Tile
from mlagen.plan.sm90.kernel import Registers, Split
from mlagen.plan.tiles.findings import REGISTERS
from mlagen.plan.tiles.tile import AnyTile
from mlagen.plan.tritons import Minor, rows_under

BLOCKS = (16, 32, 64, 128)
NUM_WARPS = (4, 8)
NUM_STAGES = (1, 2, 3)
WEIGHTS = {"block_h": 8, "block_m": 8, "block_n": 4, "num_warps": 1, "num_stages": 2, "indices_ahead": 3}
# Registers a thread of three warpgroups together: ptxas gives each 168, and setmaxnreg moves them in steps of 8.
ALL_REGISTERS = 3 * 168
FAR = 3  # most steps that a candidate changes either number of registers by


@dataclass(frozen=True)
class Place:
    """Position of a tile: family, table and target."""

    family: str
    table: str
    target: str
    tile: AnyTile


def tile_of(job: CompileJob) -> Tile | None:
    """Return the tile of a job of attention over latent rows; None if its kernel has no tile."""
    given = dict(job.constexprs)
    if job.block_h is None or "BLOCK_N" not in given:
        return None
    ahead = bool(given.get("INDICES_AHEAD") or given.get("PAGES_AHEAD"))
    return Tile(job.block_h, int(given["BLOCK_N"] or 0), job.num_warps, job.num_stages, ahead)


def place_of(job: CompileJob, plan: Plan, triton: Minor) -> Place | None:
    """The place of the tile that a job compiles; None where its kernel takes none from a table.

    Small tiles of dense attention serve aligned calls over small pages as well. A tile that is in no row of the table
    for aligned calls is of the other table.
    """
    family = next((one for one in plan.tiled if job.module == f"_{one.NAME}_kernels"), None)
    if family is None:
        return None
    given = dict(job.constexprs)
    tile: AnyTile | None = tile_of(job)
    if isinstance(family, DenseFwdPlan):
        block_m, block_n = (int(given[name] or 0) for name in ("BLOCK_M", "BLOCK_N"))
        tile = DenseFwdTile(block_m, block_n, job.num_warps, job.num_stages)
    if tile is None:
        return None
    rows: Sequence[Any] = rows_under(family.tiles, job.target, triton)
    tabled = job.tabled and any(row.tile == tile for row in rows)
    return Place(family.NAME, "tiles" if tabled else "unaligned", job.target, tile)


def tiles_like(tile: AnyTile, target: str) -> Iterator[AnyTile]:
    """Other tiles of its kind that a program of the target may take, the most alike first."""
    stages = tuple(number for number in NUM_STAGES if number > 1 or TARGETS[target].backend == "hip")
    if isinstance(tile, DenseFwdTile):
        found: list[AnyTile] = [DenseFwdTile(*one) for one in itertools.product(BLOCKS, BLOCKS, NUM_WARPS, stages)]
    else:
        blocks = tuple(block for block in BLOCKS if block <= max(64, tile.block_h))
        found = [Tile(*one) for one in itertools.product(blocks, BLOCKS, NUM_WARPS, stages, (False, True))]
        found = [one for one in found if isinstance(one, Tile) and one.block_h <= tile.block_h]

    def unlikeness(other: AnyTile) -> tuple[float, int]:
        steps = 0.0
        for field in fields(tile):
            here, there = (int(getattr(one, field.name)) for one in (tile, other))
            apart = abs(math.log2(here) - math.log2(there)) if "block" in field.name else abs(here - there)
            steps += WEIGHTS[field.name] * apart
        return steps, -other.num_warps  # more warps hold more accumulators

    return iter(sorted((one for one in found if one != tile), key=unlikeness))


def splits_like(registers: Registers, triton: Minor) -> Iterator[Split]:
    """Other splits of registers than the one under a Triton: those under other Tritons first, then the nearest."""
    now = registers.at(triton)
    known = dict.fromkeys((registers.split, *(split for _, split in registers.under)))
    least, most, step = REGISTERS
    steps = range(-FAR * step, (FAR + 1) * step, step)
    near = [(now[0] + first, now[1] + second) for first, second in itertools.product(steps, steps)]
    near.sort(key=lambda split: (abs(split[0] - now[0]) + abs(split[1] - now[1]), split))
    for split in dict.fromkeys((*known, *near)):
        shares = (*split, ALL_REGISTERS - sum(split))
        if split != now and all(least <= share <= most for share in shares):
            yield split
