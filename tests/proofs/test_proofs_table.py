"""A file of proofs reads back as it was written, and believes no row that was changed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlagen.proofs.table import Table, read_table

ROWS = {"bb": ["sm90", "_kernel", {"3.7.1": [168, 1024]}], "aa": ["gfx942", "_other", {}], "cc": [1, None, 0.5]}
HEADER = {"columns": ["one", "two"], "code": "0123"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "compile.json"
    path.write_text(Table(HEADER, ROWS).text())
    return path


def test_a_file_reads_back_as_it_was_written(path: Path) -> None:
    found = read_table(path)
    assert (found.header, found.rows, found.faults) == (HEADER, ROWS, [])
    assert found.text() == path.read_text()
    assert list(json.loads(path.read_text())["rows"]) == sorted(ROWS)


def test_a_row_is_a_line(path: Path) -> None:
    assert sum(line.startswith("    ") for line in path.read_text().splitlines()) == len(ROWS)


def changed(path: Path, old: str, new: str) -> list[str]:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return read_table(path).faults


def test_a_changed_figure_is_not_believed(path: Path) -> None:
    assert changed(path, "168", "167") == ["1 row was changed by hand"]
    assert sorted(read_table(path).rows) == ["aa", "cc"]


def test_a_deleted_row_is_noticed(path: Path) -> None:
    line = path.read_text().splitlines(keepends=True)[6]
    assert '"aa"' in line
    assert changed(path, line, "") == ["rows were added or deleted by hand"]
    assert sorted(read_table(path).rows) == ["bb", "cc"]


def test_a_changed_header_is_noticed(path: Path) -> None:
    assert changed(path, '"0123"', '"4567"') == ["rows were added or deleted by hand"]


def test_a_file_with_conflict_markers_keeps_its_rows(path: Path) -> None:
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*text[:7], "<<<<<<< ours\n", text[7], "=======\n", ">>>>>>> theirs\n", *text[8:]]))
    found = read_table(path)
    assert found.rows == ROWS
    assert found.faults == ["3 lines are no rows"]


@pytest.mark.parametrize("text", ["", "{}", "[]", "no json", '{"format": 99}'])
def test_another_file_holds_nothing(path: Path, text: str) -> None:
    path.write_text(text)
    found = read_table(path)
    assert (found.rows, found.faults) == ({}, ["is of another format"])


def test_no_file_is_an_empty_one(tmp_path: Path) -> None:
    assert read_table(tmp_path / "compile.json") == Table({})
