"""Finds tiles for Tritons under which those of the tables spill, and prints them as entries of `replacements.yaml`.

    python -m mlagen.bench.tune.replace_tiles --triton 3.8 --target sm90 specs/dsv32.yaml

Every variant that a call of a spec's package can launch is compiled, without a GPU. For each tile that spills in a
loop, others are tried in the order of their likeness to it, until all variants of one hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mlagen.bench.tune.progress import progress
from mlagen.bench.tune.tunable import tile_of
from mlagen.compile import (
    CompileJob,
    Resources,
    Toolchain,
    check_limits,
    compile_jobs,
    list_variants,
    parse_tritons,
    toolchain,
)
from mlagen.emit import apply, compare, render
from mlagen.errors import LimitError, MlagenError
from mlagen.plan import TARGETS, DenseFwdPlan, DenseFwdTile, Plan, Tile, load_plan
from mlagen.plan.replacements import Replacement, read_replacements
from mlagen.plan.tiles import AnyTile
from mlagen.plan.tritons import Minor, minor, minor_text, rows_under

BLOCKS = (16, 32, 64, 128)
NUM_WARPS = (4, 8)
NUM_STAGES = (1, 2, 3)
WEIGHTS = {"block_h": 8, "block_m": 8, "block_n": 4, "num_warps": 1, "num_stages": 2, "indices_ahead": 3}
MOST_TRIES = 24  # of tiles in the place of one


@dataclass(frozen=True)
class Place:
    """Where a tile stands: of which family, in which of its tables, on which target."""

    family: str
    table: str
    target: str
    tile: AnyTile


def place_of(job: CompileJob, plan: Plan, triton: Minor) -> Place | None:
    """The place of the tile that a job compiles; None where its kernel takes none from a table.

    Small tiles of dense attention serve aligned calls over small pages too: what stands in no row of the table that
    aligned calls read is of the other one.
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


def like(tile: AnyTile, target: str) -> Iterator[AnyTile]:
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


class Search:
    """The tiles of one spec under one Triton.

    Args:
        spec: the spec's file.
        version: the Triton.
        targets: which targets to look at; none: all of the spec.
        replacements: entries that hold already.
    """

    def __init__(self, spec: Path, version: str, targets: Sequence[str], replacements: Sequence[Replacement]) -> None:
        self._spec, self._targets, self._replacements = spec, targets, tuple(replacements)
        self._minor = minor(version)
        self._toolchain: Toolchain = toolchain(version)

    def spilling(self) -> dict[Place, tuple[str, list[Resources]]]:
        """What spills in loops, by the place of its tile; (what the place's table holds for, what was compiled)."""
        found: dict[Place, tuple[str, list[Resources]]] = {}
        with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
            plan, package, placed = self._listed(Path(temporary), self._replacements, self._targets)
            compiled = compile_jobs(package, [job for job, _ in placed], toolchain=self._toolchain)
        for (_, place), taken in zip(placed, compiled, strict=True):
            if taken.loop_spills:
                found.setdefault(place, (plan.fits[place.family], []))[1].append(taken)
        return found

    def instead(self, place: Place, fits: str) -> Replacement | None:
        """An entry with a tile that holds in another's place; None where none of MOST_TRIES does."""
        tries = 0
        for tile in like(place.tile, place.target):
            entry = Replacement(fits, place.table, place.target, place.tile, (self._minor,), tile)
            if any(self._replaces(one, entry) for one in self._replacements):
                continue
            try:
                most = self._most_spills(entry)
            except LimitError:
                continue  # it does not fit shared memory
            if most == 0:
                return entry
            print(f"# {tile}: {'not taken' if most is None else most}", file=sys.stderr)
            tries += 1
            if tries == MOST_TRIES:
                return None
        return None

    def _replaces(self, one: Replacement, entry: Replacement) -> bool:
        """Whether an entry replaces the tile that another one would bring in."""
        same = (one.fits, one.table, one.target) == (entry.fits, entry.table, entry.target)
        return same and one.tile == entry.instead and self._minor in one.tritons

    def _most_spills(self, entry: Replacement) -> int | None:
        """Stack instructions in loops of an entry's tile, of the first variant with any; None where no call takes it.

        Raises:
            LimitError: the tile does not fit its target.
        """
        wanted = Place(entry.fits.split(" ")[0], entry.table, entry.target, entry.instead)
        with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
            _, package, placed = self._listed(Path(temporary), (*self._replacements, entry), [entry.target])
            jobs = [job for job, place in placed if place == wanted]
            for job in jobs:  # one after the other, since the first that does not hold is enough
                (taken,) = compile_jobs(package, [job], toolchain=self._toolchain)
                broken = check_limits([taken])
                if taken.loop_spills:
                    return taken.loop_spills
                if broken:
                    raise broken[0]
        return 0 if jobs else None

    def _listed(
        self, folder: Path, replacements: Sequence[Replacement], targets: Sequence[str]
    ) -> tuple[Plan, Path, list[tuple[CompileJob, Place]]]:
        """The plan with these entries, its package, and the jobs on targets, none: all, whose tile is a table's."""
        plan = load_plan(self._spec, replacements)
        package = folder / plan.spec.name
        apply(compare(render(plan), package))
        chosen = [one for one in plan.spec.targets if not targets or one in targets]
        jobs = list_variants(package, chosen, toolchain=self._toolchain)
        placed = [(job, place_of(job, plan, self._minor)) for job in jobs]
        return plan, package, [(job, place) for job, place in placed if place is not None]


def text_of(entry: Replacement) -> str:
    """An entry as `replacements.yaml` has it."""
    tritons = ", ".join(f'"{minor_text(triton)}"' for triton in entry.tritons)
    table = f" table: {entry.table}," if entry.table != "tiles" else ""
    tile, other = (_flow(asdict(one)) for one in (entry.tile, entry.instead))
    return (
        f"  - {{fits: {entry.fits},{table} target: {entry.target}, tritons: [{tritons}],\n"
        f"     tile: {tile},\n     instead: {other}}}\n"
    )


def _flow(values: dict[str, object]) -> str:
    return f"{{{', '.join(f'{name}: {json.dumps(value)}' for name, value in values.items())}}}"


def main(arguments: list[str] | None = None) -> int:
    """Prints the entries that are missing."""
    parser = argparse.ArgumentParser(
        prog="python -m mlagen.bench.tune.replace_tiles", description="Finds tiles that hold."
    )
    parser.add_argument("specs", type=Path, nargs="+", help="the specs")
    parser.add_argument("--triton", help="versions, such as 3.8,3.9, or all; default: the installed one")
    parser.add_argument(
        "--target", action="append", choices=tuple(TARGETS), default=[], help="default: all of the spec"
    )
    options = parser.parse_args(arguments)
    replacements = list(read_replacements())
    try:
        with progress() as report:
            for version, spec in itertools.product(parse_tritons(options.triton), options.specs):
                search = Search(spec, version, options.target, replacements)
                for place, (fits, taken) in search.spilling().items():
                    most = max(one.loop_spills for one in taken)
                    report.say(f"{spec.stem}, triton {version}, {place.target}: {fits}: {place.tile}: up to {most}")
                    entry = search.instead(place, fits)
                    if entry is None:
                        report.say(f"no tile holds in the place of {place.tile}")
                        continue
                    replacements.append(entry)
                    print(text_of(entry), end="", flush=True)
    except MlagenError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
