"""What --help says."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
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
