"""The Tritons that packages are proved with, and which rows of a tile table hold under each.

A row names the first and the last minor version that it holds for, or none: then it holds for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")  # one release a minor version, which stands for all of that version's

Minor = tuple[int, int]
Span = tuple[Minor, Minor]  # the first and the last minor version


def minor_of(version: str) -> Minor:
    """The minor version of a release, such as (3, 7) of "3.7.1" and (3, 8) of "3.8.0+git123"."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


MINORS: tuple[Minor, ...] = tuple(minor_of(version) for version in TRITONS)


def minor_text(minor: Minor) -> str:
    """A minor version as it is written, such as 3.7."""
    return ".".join(map(str, minor))


def minors(versions: Iterable[str]) -> tuple[str, ...]:
    """The minor versions of releases as they are written, each once: 3.8 of 3.8.0."""
    return tuple(dict.fromkeys(minor_text(minor_of(version)) for version in versions))


def proved_for(minor: Minor) -> Minor:
    """The minor version whose rows a package takes under another: the newest that is not newer, or else the oldest."""
    return max((each for each in MINORS if each <= minor), default=MINORS[0])


@dataclass(frozen=True)
class TableRow:
    """A row of a tile table.

    Attributes:
        tritons: the first and the last minor version that the row holds for; None: all.
    """

    tritons: Span | None = field(default=None, kw_only=True)


Row = TypeVar("Row", bound=TableRow)
Table = Sequence[tuple[str, tuple[Row, ...]]]  # (target, its rows)


def holds(row: TableRow, triton: Minor) -> bool:
    """Whether a row holds under a minor version of TRITONS."""
    return row.tritons is None or row.tritons[0] <= triton <= row.tritons[1]


def span_of(minors: Sequence[Minor]) -> Span | None:
    """What a row names that holds for these neighbours in MINORS alone."""
    return None if tuple(minors) == MINORS else (minors[0], minors[-1])


def rows_under(table: Table[Row], target: str, triton: Minor) -> tuple[Row, ...]:
    """The rows that a table has for a target under a Triton; of these, the first that holds a call is taken."""
    proved = proved_for(triton)
    return tuple(row for row in dict(table)[target] if holds(row, proved))


def table_under(table: Table[Row], triton: Minor) -> tuple[tuple[str, tuple[Row, ...]], ...]:
    """A table as a package has it under a Triton: without the rows of others."""
    return tuple(
        (target, tuple(replace(row, tritons=None) for row in rows_under(table, target, triton))) for target, _ in table
    )


def has_versions(table: Sequence[tuple[str, Sequence[TableRow]]]) -> bool:
    """Whether a row of the table holds for some Tritons alone."""
    return any(row.tritons is not None for _, rows in table for row in rows)
