"""Cases that no other cases cover: small calls with each tile of a package's tables, and each combine kernel.

An interpreter runs a kernel's text with its constexprs. It sees no warps and no stages, and of the target only the
constexprs. So one target is enough for those with tiles that agree in all else.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mlagen.verify.call.family import Check, Run
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import launch_of

TILES, SMALL, SPLITS, TARGETS = "each tile", "each small tile", "each combine", "each target"
PROMISES = {
    TILES: "each tile of the table gives the reference's result with these arguments",
    SMALL: "each tile of calls that are not aligned gives the reference's result with these arguments",
    TARGETS: "the kernels that each target has for these arguments give the reference's result",
    SPLITS: "each number of splits that has a combine kernel of its own gives the reference's result",
}
UNSEEN = ("num_warps", "num_stages", "programs_per_sm")  # fields of a tile that an interpreter does not see

AnyRun = Run[Any, Any]


def choices(said: str, given: str) -> list[str | None]:
    """The patterns of an argument that a spec lacks, takes or requires: None where it is not passed."""
    found: dict[str, list[str | None]] = {"none": [None], "optional": [None, given], "required": [given]}
    return found[said]


def module_of(run: AnyRun, name: str) -> Any:
    """A module of the package."""
    return importlib.import_module(f"{run.subject.package.__name__}.{name}")


def tiles_of(run: AnyRun, table: str, target: str) -> list[Any]:
    """The tiles of a table for a target, each once; the table may be one for all targets."""
    found = getattr(module_of(run, "_tiles"), table)
    rows = found[target] if isinstance(found, dict) else found
    # A row is a plain tuple that ends with its tile; a tile is one with names.
    tiles = [row[-1] if type(row) is tuple else row for row in (rows if isinstance(rows, list) else [rows])]
    return list(dict.fromkeys(tiles))


def on_targets(run: AnyRun) -> Iterator[AnyRun]:
    """On a CPU the run planned for each target of the package; on a GPU, or where a kernel is forced, as it is."""
    if run.subject.device == "cuda" or run.subject.kernel is not None:
        yield run
        return
    for target in run.subject.package.SPEC["spec"]["targets"]:
        yield replace(run, subject=replace(run.subject, target=target))


def each_target(run: AnyRun) -> list[Figure]:
    """The check of a call planned for each target."""
    return [figure for one in on_targets(run) for figure in one.compare(one.call())]


def _by_tile(run: AnyRun, tables: tuple[str, ...], by_e4m3: bool) -> Iterator[tuple[AnyRun, Any]]:
    """The run planned for each target, with each tile that gives a text which no earlier target gave."""
    launch, seen = launch_of(run.subject.package), set()
    for one in on_targets(run):
        with one.subject.planned_for(None):
            facts = launch.device_facts(torch.device(one.subject.device, 0))
        for table in tables:
            for tile in tiles_of(run, table, facts.target):
                values = {name: value for name, value in tile._asdict().items() if name not in UNSEEN}
                text = (*values.items(), *((facts.has_e4m3, facts.rounds_e4m3) if by_e4m3 else ()))
                if text not in seen:
                    seen.add(text)
                    yield one, tile


def each_tile(*tables: str, splits: tuple[int, ...] = (1,), by_e4m3: bool = False) -> Check:
    """The check of a call with every tile of some tables.

    Args:
        tables: names in the package's `_tiles`.
        splits: into how many a call is split, one after the other.
        by_e4m3: the kernels are compiled for whether the target has e4m3 in hardware.
    """

    def check(run: AnyRun) -> list[Figure]:
        figures = []
        own_kernel = run.subject.kernel is not None  # which has tiles of its own
        chosen = [(run, None)] if own_kernel else _by_tile(run, tables, by_e4m3)
        for one, tile in chosen:
            for number in splits:
                forced = {"num_splits": number} if tile is None else {"num_splits": number, "tile": tile}
                with launch_of(run.subject.package).force(**forced):
                    figures += one.compare(one.call())
        return figures

    return check


def each_combine(run: AnyRun) -> list[Figure]:
    """The check of a call in every number of splits that has a combine kernel of its own."""
    figures = []
    for number in module_of(run, "_splits").WARM_SPLITS:
        with launch_of(run.subject.package).force(num_splits=number):
            figures += run.compare(run.call())
    return figures
