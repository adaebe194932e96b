"""A file of proofs: JSON with one line a row, and digests that give away a change by hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1  # of the files; counts up when a row is written in another way
ROW_DIGITS, FILE_DIGITS = 8, 32  # of their digests


@dataclass
class Table:
    """The content of a file of proofs.

    Attributes:
        header: plain values that all rows depend on.
        rows: the rows that are believed, by key, without their digests.
        faults: phrases about changes by hand; none for a file as mlagen wrote it.
    """

    header: dict[str, Any]
    rows: dict[str, list[Any]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The file: the same for the same rows, sorted by key."""
        rows = [_signed(f"{json.dumps(key)}: {json.dumps(self.rows[key])}") for key in sorted(self.rows)]
        lines = ["{", f'  "format": {FORMAT},']
        lines += [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in self.header.items()]
        lines += [f'  "digest": "{_file_digest(self.header, rows)}",', '  "rows": {']
        return "\n".join([*lines, ",\n".join(f"    {row}" for row in rows), "  }", "}", ""])


def read_table(path: Path) -> Table:
    """Read a file of proofs, line by line: one that a merge left with conflict markers keeps its rows.

    Returns:
        The table; an empty one where there is no file or one of another format. `faults` names the changes.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Table({})
    except (OSError, ValueError) as error:
        return Table({}, faults=[f"cannot be read: {error}"])
    header: dict[str, Any] = {}
    rows: list[str] = []
    changed = strange = 0
    for line in text.splitlines():
        if line.startswith("    ") and line.strip():
            row = line.strip().removesuffix(",")
            believed = row == _signed(f"{row[: -len(_SIGNATURE)]}]")
            rows += [row] if believed else []
            changed += not believed
        elif line.strip() not in ("{", "}", "", '"rows": {'):
            entry = _entry(line)
            header |= entry
            strange += not entry
    digest, written_as = header.pop("digest", None), header.pop("format", None)
    if written_as != FORMAT:
        return Table({}, faults=["is of another format"])
    faults = [f"{changed} {'row was' if changed == 1 else 'rows were'} changed by hand"] if changed else []
    faults += [f"{strange} {'line is no row' if strange == 1 else 'lines are no rows'}"] if strange else []
    if not faults and digest != _file_digest(header, rows):
        faults.append("rows were added or deleted by hand")
    return Table(header, {key: row[:-1] for key, row in _entry(",".join(rows)).items()}, faults)


_SIGNATURE = f', "{"0" * ROW_DIGITS}"]'


def _signed(row: str) -> str:
    """A row `key: [values]` with its digest as the last value."""
    return f'{row[:-1]}, "{_sha256(row)[:ROW_DIGITS]}"]'


def _file_digest(header: Mapping[str, Any], rows: Sequence[str]) -> str:
    return _sha256(json.dumps(header) + "".join(rows))[:FILE_DIGITS]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _entry(text: str) -> dict[str, Any]:
    """The names and values that a text holds; nothing where it is none of such."""
    try:
        return dict(json.loads(f"{{{text.rstrip().removesuffix(',')}}}"))
    except ValueError:
        return {}
