"""What the shell completes: specs. Commands, options and choices click knows by itself."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem


class SpecPath(click.Path):
    """A path of a spec, for which a shell offers *.yaml files: beside what was typed, and one folder further."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        """The specs that begin with what was typed; where there are none, whatever the shell itself would offer."""
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
    """What a folder holds under names that begin so; nothing of one that cannot be read, and nothing hidden."""
    try:
        return sorted(path for path in Path(folder).iterdir() if path.name.startswith(start) and path.name[0] != ".")
    except OSError:
        return []
