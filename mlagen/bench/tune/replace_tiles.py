"""Finds tiles for Tritons under which those of the tables spill, and prints them as entries of `replacements.yaml`.

    python -m mlagen.bench.tune.replace_tiles --triton 3.8 --target sm90 specs/dsv32.yaml

Every variant that a call of a spec's package can launch is compiled, without a GPU. For each tile that spills in a
loop, others are tried in the order of their likeness to it, until all variants of one hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mlagen.bench.tune.progress import progress
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
from mlagen.compile.candidates import Place, place_of, tiles_like
from mlagen.emit import apply, compare, render
from mlagen.errors import LimitError, MlagenError
from mlagen.plan import TARGETS, Plan, load_plan
from mlagen.plan.tiles.replacements import Replacement, read_replacements
from mlagen.plan.tritons import minor, minor_text

MOST_TRIES = 24  # of tiles in the place of one


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
        """Variants that spill in loops, by the place of their tile: the name of its table, and their resources."""
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
        for tile in tiles_like(place.tile, place.target):
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
        """The plan with these entries, its package, and the jobs with a table's tile on targets (none: on all)."""
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
