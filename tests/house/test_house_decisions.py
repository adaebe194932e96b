"""Decision records have one form: a number, a date, a status, and the same sections in order."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "decisions"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
NUMBERS = {path.name[:4]: path for path in RECORDS}
HEAD = re.compile(r"Date: (\d{4}-\d\d-\d\d)\. Status: (accepted|superseded by \[\d{4}\]\(\S+\))(?:[.;]$|[.;] )")
ROW = re.compile(r"^\| \[(\d{4})\]\((\S+)\) \|", re.MULTILINE)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem[:4])
def test_a_record_begins_with_its_number_date_and_status(path: Path) -> None:
    title, blank, head = path.read_text(encoding="utf-8").splitlines()[:3]
    assert title.startswith(f"# {int(path.name[:4])}. ")
    assert not blank
    found = HEAD.match(head)
    assert found, (
        f"{path.name}:3: got {head!r}; takes 'Date: YYYY-MM-DD. Status: accepted.' or 'superseded by [NNNN](...).'"
    )
    datetime.date.fromisoformat(found[1])


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem[:4])
def test_a_record_has_its_sections_in_order(path: Path) -> None:
    sections = re.findall(r"^## (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    kept = [one for one in sections if one in ("Context", "Decision", "Consequences")]
    assert kept == ["Context", "Decision", "Consequences"]


def test_numbers_are_unique_and_the_index_is_in_order() -> None:
    assert len(NUMBERS) == len(RECORDS)
    rows = ROW.findall((FOLDER / "README.md").read_text(encoding="utf-8"))
    assert rows == [(path.name[:4], path.name) for path in RECORDS]
