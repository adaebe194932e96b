"""What the commands share: the two consoles, JSON, errors and progress."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from mlagen.errors import MlagenError, SpecErrors, UsageError

WIDE = 200  # columns where output is no terminal: a file or a pipe folds nothing


def _console(stderr: bool) -> Console:
    console = Console(highlight=False, stderr=stderr)
    if not console.is_terminal:
        console.width = WIDE
    return console


out = _console(stderr=False)
err = _console(stderr=True)

SPEC = click.argument("spec", type=click.Path(path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")


def report_error(error: MlagenError) -> None:
    """Prints an error and its hint on stderr, a line each; all lines of a spec's errors."""
    for one in error.errors if isinstance(error, SpecErrors) else (error,):
        err.print(Text(str(one), style="red"), soft_wrap=True)
        if one.hint:
            err.print(Text(one.hint), soft_wrap=True)


def print_json(value: Any) -> None:
    """Prints plain values as JSON on stdout."""
    click.echo(json.dumps(value, indent=2))


def command_line(context: click.Context) -> str:
    """The command that is running, as one would type it."""
    words = ["mlagen", str(context.info_name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        values = value if parameter.multiple else [value]
        if isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        elif isinstance(parameter, click.Argument):
            words += map(str, values)
        else:
            words += [word for each in values for word in (parameter.opts[0], str(each))]
    return shlex.join(words)


def spec_files(paths: tuple[Path, ...]) -> list[Path]:
    """The specs a command was given, or all of the folder `specs`.

    Raises:
        UsageError: none was given and there is no such folder, or it is empty.
    """
    found = list(paths) or sorted(Path("specs").glob("*.yaml"))
    if not found:
        raise UsageError("no spec given, and no specs/*.yaml here")
    return found


class Stage:
    """A bar on stderr for work that is counted; nothing where stderr is no terminal."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def step(self, _: object = None) -> None:
        """One more is done."""
        self._progress.advance(self._task)


@contextmanager
def stage(title: str, total: int | None) -> Iterator[Stage]:
    """Shows the progress of a stage of `total` steps; None where the number is not known."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        yield Stage(progress, progress.add_task(title, total=total))
