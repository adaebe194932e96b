"""Code that all commands share: the two consoles, options, JSON and errors."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.text import Text

from mlagen.cli.complete import SpecPath
from mlagen.errors import MlagenError, SpecErrors, UsageError
from mlagen.plan import TARGETS, Plan
from mlagen.spec import name_instead

MOST_ERRORS = 20  # lines of a spec's errors; one mistake, for example an anchor, can cause many
WIDE = 1 << 20  # columns of a file or a pipe, so that no line is folded


def _console(stderr: bool) -> Console:
    console = Console(highlight=False, stderr=stderr)
    if not console.file.isatty():  # with FORCE_COLOR, is_terminal is true of a pipe as well
        console.width = WIDE
    return console


out = _console(stderr=False)
err = _console(stderr=True)

SPEC = click.argument("spec", type=SpecPath())
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
GENERATED = Path("generated")  # where `build` keeps packages and their proofs
OUT = click.option(
    "--out",
    "folder",
    type=click.Path(path_type=Path),
    default=GENERATED,
    show_default=True,
    help="Folder of packages.",
)


class TargetName(click.Choice[str]):
    """The name of a target. For the name of another GPU, the error names the target that it runs."""

    def __init__(self) -> None:
        super().__init__(list(TARGETS))

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name. Fails with the target to name instead."""
        other = name_instead(value)
        if other is not None:
            self.fail(f"got '{value}'; takes {', '.join(TARGETS)}; {other}", param, ctx)
        return super().convert(value, param, ctx)


class Group(click.Group):
    """Commands with whole sentences as summaries: long ones are wrapped, not cut."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, each with the first sentence of its help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(WIDE)) for name, command in commands if command and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def report_error(error: MlagenError) -> None:
    """Print an error and its hint on stderr, a line each; of SpecErrors, the first ones."""
    errors = error.errors if isinstance(error, SpecErrors) else (error,)
    for one in errors[:MOST_ERRORS]:
        err.print(Text(str(one), style="red"), soft_wrap=True)
        if one.hint:
            err.print(Text(one.hint), soft_wrap=True)
    if len(errors) > MOST_ERRORS:
        err.print(f"and {counted(len(errors) - MOST_ERRORS, 'more error')}")


def print_json(value: Any) -> None:
    """Print plain values as JSON on stdout. Parts of a spec are allowed among them."""
    click.echo(json.dumps(value, indent=2, default=lambda part: part.model_dump(mode="json")))


def print_written(
    path: Path, spec: Path, commands: Sequence[str], values: Mapping[str, Any], *, proved: bool, as_json: bool
) -> None:
    """Print the path of a packed package on stdout, and on stderr the next commands.

    Args:
        path: the written file or folder.
        spec: file of the spec, for the command that proves the package.
        commands: the next commands.
        values: the same as plain values, for JSON in place of the path.
        proved: whether the package is proved. If not, the command that proves it comes first.
        as_json: print JSON.
    """
    if as_json:
        print_json({**values, "proved": proved})
    else:
        out.print(str(path), markup=False, soft_wrap=True)
    said = [] if proved else [f"not proved; fix with: mlagen build {shlex.quote(str(spec))}"]
    for line in (*said, *commands):
        err.print(line, markup=False, soft_wrap=True)


def command_line(context: click.Context) -> str:
    """Return the running command as typed."""
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
    """Return the specs that a command was given, or all specs of the folder `specs`.

    Raises:
        UsageError: no spec was given, and `specs` is empty or does not exist.
    """
    found = list(dict.fromkeys(paths)) or sorted(Path("specs").glob("*.yaml"))
    if not found:
        raise UsageError(
            "got no spec, and no specs/*.yaml is here; pass the path of a spec, or write one: "
            "mkdir -p specs && mlagen init dsv32 --gpu all > specs/dsv32.yaml"
        )
    return found


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 file, 2 files."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def chosen_targets(plan: Plan, targets: Sequence[str]) -> list[str]:
    """Return the spec's targets that the user chose; all of them if none was.

    Raises:
        UsageError: the spec has none of them.
    """
    chosen: list[str] = [target for target in plan.spec.targets if not targets or target in targets]
    if not chosen:
        has = ", ".join(plan.spec.targets)
        raise UsageError(f"{plan.spec.name}: none of its targets ({has}) is {', '.join(targets)}")
    return chosen


def numbered(name: str, number: int, total: int) -> str:
    """Return the label of a package in a progress bar, with its number if there are several."""
    return name if total == 1 else f"{name} ({number} of {total})"
