"""Help and messages, on terminals and in pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from cli_specs import SPEC
from click.testing import CliRunner

from mlagen.cli import main


def groups(command: click.Group, *words: str) -> Iterator[tuple[str, ...]]:
    """The words of every command that has commands of its own."""
    yield words
    for name, child in command.commands.items():
        if isinstance(child, click.Group):
            yield from groups(child, *words, name)


@pytest.mark.parametrize("columns", [50, 80, 200])
@pytest.mark.parametrize("words", list(groups(main)))
def test_every_summary_is_a_whole_sentence(words: tuple[str, ...], columns: int) -> None:
    shown = CliRunner().invoke(main, [*words, "--help"], env={"COLUMNS": str(columns)}, terminal_width=columns).stdout
    command: click.Command = main
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    assert isinstance(command, click.Group)
    _, _, listed = shown.partition("Commands:\n")
    assert "..." not in listed
    assert all(len(line) <= columns for line in listed.splitlines())
    said = " ".join(listed.split())
    for name, child in command.commands.items():
        sentence = " ".join(str(child.help).split("\n\n")[0].split())
        assert sentence.endswith(".")
        assert f"{name} {sentence.partition('. ')[0].removesuffix('.')}." in said


def piped(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlagen", *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "80", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


LONG = "/".join(["a folder of a name of some length"] * 7)


@pytest.mark.parametrize("colours", ["", "1"])
def test_a_pipe_gets_one_line_a_message_however_long(workspace: Path, colours: str) -> None:
    colour = {"FORCE_COLOR": colours} if colours else {}
    done = piped(workspace, "build", f"{LONG}/absent.yaml", **colour)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"{LONG}/absent.yaml: no such file" in line


@pytest.mark.thorough
def test_a_pipe_gets_one_line_a_path_however_long(workspace: Path) -> None:
    done = piped(workspace, "build", "--no-compile", "--no-verify", "--out", LONG)
    assert done.returncode == 0
    assert f"{LONG}/small/sparse_fwd.py" in done.stdout.splitlines()
    line, _ = done.stderr.splitlines()
    assert line.startswith(f"{LONG}/small: 12 files, 12 written; not compiled")


def test_a_table_in_a_pipe_is_as_wide_as_its_cells(workspace: Path) -> None:
    (workspace / "specs" / "small.yaml").write_text(SPEC)
    shown = piped(workspace, "show", "plan", "specs/small.yaml").stdout
    rows = [line for line in shown.splitlines() if line.lstrip().startswith(("sm80", "gfx942"))]
    assert len(rows) >= 2
    assert all(len(line) < 500 for line in shown.splitlines())
