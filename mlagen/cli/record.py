"""`mlagen record`: adds reports of random calls on a GPU to the records of sm90 kernels."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from mlagen.cli.console import OUT, counted, err, out
from mlagen.errors import UnprovedError
from mlagen.verify.gpu_records import FILE, RECORD, Kernel, add_report, names_of, records_of, unrecorded


def unrecorded_of(folders: Iterable[Path]) -> list[Kernel]:
    """Return the sm90 kernels of packages that have no GPU record for their text."""
    return [kernel for folder in folders for kernel in unrecorded([folder], records_of(folder.parent))]


def say_unrecorded(folders: Iterable[Path]) -> None:
    """Print on stderr the sm90 kernels of packages that have no GPU record for their text."""
    if kernels := unrecorded_of(folders):
        err.print(f"sm90 kernels without a GPU record for their text: {names_of(kernels)}", markup=False)


def require_recorded(folders: Iterable[Path]) -> None:
    """Raise UnprovedError unless each sm90 kernel of the packages has a record for its text."""
    if kernels := unrecorded_of(folders):
        raise UnprovedError(
            f"{counted(len(kernels), 'sm90 kernel')} without a GPU record for the present text: {names_of(kernels)}",
            hint=f"fix with: {RECORD}",
        )


@click.command()
@click.argument("reports", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@OUT
def record(reports: tuple[Path, ...], folder: Path) -> None:
    """Add REPORTS of random calls on a GPU to the records of sm90 kernels.

    `python -m mlagen.verify.random --report` writes a report. It counts only if no call was wrong and its packages
    equal those in the folder --out, byte for byte.
    """
    for report in reports:
        keys = add_report(report, folder)
        out.print(
            f"{report}: {counted(len(keys), 'sm90 kernel')} recorded in {folder / FILE}", markup=False, soft_wrap=True
        )
