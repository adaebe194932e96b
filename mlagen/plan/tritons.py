"""The Tritons that packages are proved with, and which rows of a tile table hold under each.

A row names the first and the last minor version that it holds for, or none: then it holds for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")  # one release a minor version, which stands for all of that version's

Minor = tuple[int, ...]
Span = tuple[Minor, Minor]  # the first and the last minor version


def minor(version: str) -> Minor:
    """The leading two numbers of a version: (3, 8) of 3.8.0+git123."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def minor_text(minor: Minor) -> str:
    """A minor version as it is written: 3.8."""
    return ".".join(map(str, minor))


def minors(versions: Iterable[str]) -> tuple[str, ...]:
    """Return the leading two numbers of each version, each once: 3.8 of 3.8.0."""
    return tuple(dict.fromkeys(minor_text(minor(version)) for version in versions))


MINORS: tuple[Minor, ...] = tuple(minor(version) for version in TRITONS)


def proved_for(installed: Minor) -> Minor:
    """Return the minor version with rows for the installed one: the newest of MINORS up to it, else the oldest."""
    return max((each for each in MINORS if each <= installed), default=MINORS[0])


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


def span_of(run: Sequence[Minor]) -> Span | None:
    """Return the span for a row that holds only for these neighbours in MINORS; None if it holds for all."""
    return None if tuple(run) == MINORS else (run[0], run[-1])


def span_text(span: Span | None) -> str:
    """Return the minor versions of a span, or any."""
    return "any" if span is None else " to ".join(dict.fromkeys(map(minor_text, span)))


def rows_under(table: Table[Row], target: str, triton: Minor) -> tuple[Row, ...]:
    """The rows that a table has for a target under a Triton; of these, the first that holds a call is taken."""
    proved = proved_for(triton)
    return tuple(row for row in dict(table)[target] if holds(row, proved))


def has_versions(table: Sequence[tuple[str, Sequence[TableRow]]]) -> bool:
    """Return whether a row of the table holds only for some Tritons."""
    return any(row.tritons is not None for _, rows in table for row in rows)
