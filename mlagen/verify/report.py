"""Verification results as a table, as Markdown and as errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlagen.errors import MismatchError
from mlagen.verify.call.results import CaseResult, Figure

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("cases", "run", "failed", "skipped", "worst error", "tolerance", "share")


@dataclass(frozen=True)
class Group:
    """Results of cases with the same name but for the last part.

    Attributes:
        name: that common part, `sparse_fwd: layout`.
        results: the cases on all targets.
    """

    name: str
    results: tuple[CaseResult, ...]

    @property
    def failed(self) -> int:
        """Cases that did not hold."""
        return sum(not result.ok for result in self.results)

    @property
    def skipped(self) -> int:
        """Cases that could not run."""
        return sum(result.skipped is not None for result in self.results)

    @property
    def worst(self) -> Figure | None:
        """The figure nearest to, or furthest over, its tolerance; None where bits were compared."""
        figures = [result.worst for result in self.results]
        return max((one for one in figures if one is not None), key=lambda one: one.share, default=None)

    def cells(self) -> tuple[str, ...]:
        """One cell a column."""
        worst = self.worst
        error = ("bits", "", "") if worst is None else _error_cells(worst)
        run = len(self.results) - self.skipped
        return (self.name, str(run), str(self.failed), str(self.skipped), *error)


def _error_cells(figure: Figure) -> tuple[str, str, str]:
    return f"{figure.name} {figure.error:.2g}", f"{figure.tolerance:.2g}", f"{figure.share:.0%}"


def groups(results: Iterable[CaseResult]) -> list[Group]:
    """Results by the part of their names before the last colon, in order of first appearance."""
    found: dict[str, list[CaseResult]] = {}
    for result in results:
        found.setdefault(result.case.rsplit(": ", 1)[0], []).append(result)
    return [Group(name, tuple(members)) for name, members in found.items()]


def mismatches(results: Iterable[CaseResult]) -> list[MismatchError]:
    """One error a failed case."""
    return [
        MismatchError(f"{result.package}: {result.case}, on {result.target}: {result.detail}")
        for result in results
        if not result.ok
    ]


def verify_table(results: Sequence[CaseResult]) -> Table:
    """The groups as a rich table; a group with a failed case is red."""
    from rich.table import Table

    table = Table(title=", ".join(dict.fromkeys(result.package for result in results)), title_justify="left")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number in (0, 4) else "right")
    for group in groups(results):
        table.add_row(*group.cells(), style="red" if group.failed else None)
    return table


def verify_markdown(results: Sequence[CaseResult]) -> str:
    """The groups as a Markdown table, one line a failed or skipped case below it."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(group.cells() for group in groups(results))]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    notes = [f"- failed: {error}" for error in mismatches(results)]
    notes += [f"- skipped: {result.case}, on {result.target}: {result.skipped}" for result in results if result.skipped]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"
