"""`mlagen verify --random`: random calls of packages in several processes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from mlagen.cli.console import err, print_json
from mlagen.cli.progress import stage
from mlagen.emit import apply, compare, render
from mlagen.errors import MismatchError
from mlagen.plan import load_plan
from mlagen.verify.random.pool import Settings, random_calls


def verify_at_random(
    paths: Sequence[Path], device: str, seconds: float, seed: int, processes: int, only: Sequence[str], as_json: bool
) -> None:
    """Make random calls of the packages of specs, and print the counts and the wrong calls.

    Args:
        paths: specs.
        device: "cpu" or "cuda".
        seconds: duration of the calls, for all packages together.
        seed: seed of the random calls.
        processes: number of processes that call at the same time.
        only: shell patterns of family/kernel; empty: all.
        as_json: print only the report, as JSON.

    Raises:
        MismatchError: a call was wrong.
    """
    packages = [render(load_plan(path)) for path in paths]
    with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
        folders = []
        for package in packages:
            folders.append(Path(temporary) / package.name)
            apply(compare(package, folders[-1]))
        settings = Settings(
            folders=tuple(str(folder) for folder in folders),
            sources=tuple(f"generated/{package.name}" for package in packages),
            device=device,
            seconds=seconds,
            seed=seed,
            processes=processes,
            only=tuple(only),
        )
        names = packages[0].name if len(packages) == 1 else f"{len(packages)} packages"
        with stage(f"{names}: random calls on {device}"):
            report = random_calls(settings, lambda line: err.print(line, markup=False, soft_wrap=True))
    if as_json:
        print_json(report.to_json())
    else:
        for name, counts in sorted(report.stations.items()):
            click.echo(f"{name:48} {counts.calls:8} calls {counts.wrong:6} wrong")
    if report.total.wrong:
        raise MismatchError(
            f"{report.total.wrong} of {report.total.calls} random calls were wrong; the lines above repeat them"
        )
