"""What the commands share: the two consoles, JSON, errors and progress."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from mlagen.cli.complete import SpecPath
from mlagen.cli.estimate import Estimate, kind_of
from mlagen.errors import MlagenError, SpecErrors, UsageError
from mlagen.plan import TARGETS
from mlagen.spec import instead

WIDE = 1 << 20  # columns where output is no terminal: a file or a pipe folds nothing


def _console(stderr: bool) -> Console:
    console = Console(highlight=False, stderr=stderr)
    if not console.file.isatty():  # is_terminal is true of a pipe too where FORCE_COLOR asks for colours
        console.width = WIDE
    return console


out = _console(stderr=False)
err = _console(stderr=True)

SPEC = click.argument("spec", type=SpecPath())
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")


class TargetName(click.Choice[str]):
    """The name of a target; for a GPU that is none, the error says which target's kernels it runs."""

    def __init__(self) -> None:
        super().__init__(list(TARGETS))

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name; fails with what to name instead."""
        other = instead(value)
        if other is not None:
            self.fail(f"got '{value}'; takes {', '.join(TARGETS)}; {other}", param, ctx)
        return super().convert(value, param, ctx)


class Group(click.Group):
    """Commands whose summaries are whole sentences: what does not fit a line is wrapped, not cut."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands with the first sentence of the help of each."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(WIDE)) for name, command in commands if command and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def report_error(error: MlagenError) -> None:
    """Prints an error and its hint on stderr, a line each; all lines of a spec's errors."""
    for one in error.errors if isinstance(error, SpecErrors) else (error,):
        err.print(Text(str(one), style="red"), soft_wrap=True)
        if one.hint:
            err.print(Text(one.hint), soft_wrap=True)


def print_json(value: Any) -> None:
    """Prints plain values, and parts of a spec among them, as JSON on stdout."""
    click.echo(json.dumps(value, indent=2, default=lambda part: part.model_dump(mode="json")))


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


def numbered(name: str, number: int, total: int) -> str:
    """What a bar calls one of several packages; its name alone where there is but one."""
    return name if total == 1 else f"{name} ({number} of {total})"


class Stage:
    """A bar on stderr for work that is counted; nothing where stderr is no terminal."""

    def __init__(self, progress: Progress, task: TaskID, title: str) -> None:
        self._progress = progress
        self._task = task
        self._title = title
        self._begin = time.monotonic()
        self._estimate = Estimate(())

    def expect(self, tasks: Sequence[Any]) -> None:
        """Says which jobs or cases there are to do, once they are known."""
        self._begin = time.monotonic()
        self._estimate = Estimate(map(kind_of, tasks))
        self._progress.update(self._task, total=len(tasks))

    def step(self, result: Any) -> None:
        """One more is done; takes its result."""
        self._estimate.done(kind_of(result), None if getattr(result, "cached", False) else result.seconds)
        now = time.monotonic()
        left = self._estimate.seconds_left(now - self._begin)
        self._progress.update(self._task, advance=1, end=None if left is None else now + left)

    def show(self, what: str) -> None:
        """Says what is being done now, behind the stage's title."""
        self._progress.update(self._task, description=f"{self._title}: {what}")


class _LeftColumn(ProgressColumn):
    """The time that is left, where there is an estimate of it."""

    def render(self, task: Task) -> Text:
        end = task.fields.get("end")
        if end is None:
            return Text()
        minutes, seconds = divmod(max(int(end - time.monotonic()), 0), 60)
        hours, minutes = divmod(minutes, 60)
        return Text(f"{hours}:{minutes:02}:{seconds:02} left", style="progress.remaining")


@contextmanager
def stage(title: str) -> Iterator[Stage]:
    """Shows the progress of a stage, whose steps `Stage.expect` tells."""
    columns = (
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _LeftColumn(),
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True)),  # cut where the line ends
    )
    off = not err.file.isatty()  # is_terminal is true of a pipe too where FORCE_COLOR asks for colours
    with Progress(*columns, console=err, expand=True, transient=True, disable=off) as progress:
        yield Stage(progress, progress.add_task(title, total=None), title)
