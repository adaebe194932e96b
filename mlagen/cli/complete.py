"""Shell completion of spec files. Click completes commands, options and choices by itself."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem


class SpecPath(click.Path):
    """A spec's path. The shell offers the *.yaml files of the typed folder and of its subfolders."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, readable=False)  # reading the spec reports the error

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        """Return the specs that start with the typed text, or the shell's own completion if there are none."""
        folder, _, start = incomplete.rpartition("/")
        folder += "/" if folder or incomplete.startswith("/") else ""
        found: list[str] = []
        for path in _listed(folder or ".", start):
            if path.suffix == ".yaml":
                found.append(f"{folder}{path.name}")
            elif path.is_dir():
                found += (f"{folder}{path.name}/{each.name}" for each in _listed(path, "") if each.suffix == ".yaml")
        return [CompletionItem(name) for name in found] or super().shell_complete(ctx, param, incomplete)


def _listed(folder: str | Path, start: str) -> list[Path]:
    """Return a folder's visible entries with a prefix; none if the folder cannot be read."""
    try:
        return sorted(path for path in Path(folder).iterdir() if path.name.startswith(start) and path.name[0] != ".")
    except OSError:
        return []
