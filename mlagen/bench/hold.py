"""Finds tiles for the Tritons under which those of the tables spill, and prints them as entries of `held.yaml`.

    python -m mlagen.bench.hold --triton 3.8 --target sm90 specs/dsv32.yaml

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

from mlagen.bench.progress import progress
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
from mlagen.plan import TARGETS, Tile, VarlenTile, load_plan
from mlagen.plan.fits import DENSE_DECODE, DENSE_FWD, SPARSE_DECODE, SPARSE_FWD
from mlagen.plan.held import AnyTile, Held, read_held
from mlagen.plan.tritons import minor, minor_text

FAMILIES = {
    "sparse_attention": SPARSE_FWD,
    "kvcache_attention": SPARSE_DECODE,
    "dense_attention": DENSE_DECODE,
    "varlen_attention": DENSE_FWD,
}
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


def place_of(job: CompileJob) -> Place | None:
    """The place of the tile that a job compiles; None where its kernel takes none from a table."""
    family, given = FAMILIES.get(job.module), dict(job.constexprs)
    if family is None or "BLOCK_N" not in given:
        return None
    numbers = {name: int(given[name] or 0) for name in ("BLOCK_H", "BLOCK_M", "BLOCK_N") if name in given}
    if family == DENSE_FWD:
        tile: AnyTile = VarlenTile(numbers["BLOCK_M"], numbers["BLOCK_N"], job.num_warps, job.num_stages)
        aligned = given.get("ALIGNMENT", 16) == 16
    else:
        ahead = bool(given.get("INDICES_AHEAD") or given.get("PAGES_AHEAD"))
        tile = Tile(numbers["BLOCK_H"], numbers["BLOCK_N"], job.num_warps, job.num_stages, ahead)
        aligned = all(given.get(name, 16) == 16 for name in ("ALIGNMENT", "INDEX_GROUP"))
        aligned = aligned and given.get("WHOLE_PAGES", True) is True
    return Place(family, "tiles" if aligned else "unaligned", job.target, tile)


def like(tile: AnyTile, target: str) -> Iterator[AnyTile]:
    """Other tiles of its kind that a program of the target may take, the most alike first."""
    stages = tuple(number for number in NUM_STAGES if number > 1 or TARGETS[target].backend == "hip")
    if isinstance(tile, VarlenTile):
        found: list[AnyTile] = [VarlenTile(*one) for one in itertools.product(BLOCKS, BLOCKS, NUM_WARPS, stages)]
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
        held: entries that hold already.
    """

    def __init__(self, spec: Path, version: str, targets: Sequence[str], held: Sequence[Held]) -> None:
        self._spec, self._targets, self._held = spec, targets, tuple(held)
        self._minor = minor(version)
        self._toolchain: Toolchain = toolchain(version)

    def spilling(self) -> dict[Place, tuple[str, list[Resources]]]:
        """What spills in loops, by the place of its tile; (what the place's table holds for, what was compiled)."""
        with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
            found: dict[Place, tuple[str, list[Resources]]] = {}
            for fits, job, taken in self._compiled(Path(temporary), self._held, None):
                place = place_of(job)
                if place is not None and taken.loop_spills:
                    found.setdefault(place, (fits, []))[1].append(taken)
            return found

    def instead(self, place: Place, fits: str) -> Held | None:
        """An entry with a tile that holds in another's place; None where none of MOST_TRIES does."""
        tries = 0
        for tile in like(place.tile, place.target):
            entry = Held(fits, place.table, place.target, place.tile, (self._minor,), tile)
            if any(one.target == place.target and one.fits == fits and one.tile == tile for one in self._held):
                continue  # it is replaced itself
            with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
                try:
                    taken = [one for _, _, one in self._compiled(Path(temporary), (*self._held, entry), entry)]
                except LimitError:
                    continue  # it does not fit shared memory
            tries += 1
            if taken and not check_limits(taken):
                return entry
            print(f"# {tile}: {max((one.loop_spills for one in taken), default='not taken')}", file=sys.stderr)
            if tries == MOST_TRIES:
                return None
        return None

    def _compiled(
        self, folder: Path, held: Sequence[Held], entry: Held | None
    ) -> Iterator[tuple[str, CompileJob, Resources]]:
        """What a package with these entries takes; of an entry, of the tile that it names, and no further than fits."""
        plan = load_plan(self._spec, held)
        package = folder / plan.spec.name
        apply(compare(render(plan), package))
        targets = [one for one in plan.spec.targets if one in self._targets] if self._targets else plan.spec.targets
        if entry is not None:
            targets = [one for one in targets if one == entry.target]
        jobs = list_variants(package, targets, toolchain=self._toolchain)
        if entry is not None:
            wanted = Place(entry.fits.split(" ")[0], entry.table, entry.target, entry.instead)
            jobs = [job for job in jobs if place_of(job) == wanted]
            for job in jobs:  # one after the other, since the first that spills is enough
                for taken in compile_jobs(package, [job], toolchain=self._toolchain):
                    yield entry.fits, job, taken
                    if check_limits([taken]):
                        return
            return
        for job, taken in zip(jobs, compile_jobs(package, jobs, toolchain=self._toolchain), strict=True):
            yield plan.fits.get(FAMILIES.get(job.module, ""), ""), job, taken


def text_of(entry: Held) -> str:
    """An entry as `held.yaml` has it."""
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
    parser = argparse.ArgumentParser(prog="python -m mlagen.bench.hold", description="Finds tiles that hold.")
    parser.add_argument("specs", type=Path, nargs="+", help="the specs")
    parser.add_argument("--triton", help="versions, such as 3.8,3.9, or all; default: the installed one")
    parser.add_argument(
        "--target", action="append", choices=tuple(TARGETS), default=[], help="default: all of the spec"
    )
    options = parser.parse_args(arguments)
    held = list(read_held())
    try:
        with progress() as report:
            for version, spec in itertools.product(parse_tritons(options.triton), options.specs):
                search = Search(spec, version, options.target, held)
                for place, (fits, taken) in search.spilling().items():
                    most = max(one.loop_spills for one in taken)
                    report.say(f"{spec.stem}, triton {version}, {place.target}: {fits}: {place.tile}: up to {most}")
                    entry = search.instead(place, fits)
                    if entry is None:
                        report.say(f"no tile holds in the place of {place.tile}")
                        continue
                    held.append(entry)
                    print(text_of(entry), end="", flush=True)
    except MlagenError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
