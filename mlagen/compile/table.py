"""Resources for people: a table for the terminal and one for reports."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from mlagen.compile.resources import Resources, check_limits

_TEXT = ("kernel", "variant", "target")
_NUMBERS = ("warps", "stages", "registers", "spills", "in loops", "shared", "limit", "share")


def _cells(taken: Resources) -> list[str]:
    return [
        taken.kernel,
        taken.variant,
        taken.target,
        str(taken.num_warps),
        str(taken.num_stages),
        str(taken.registers),
        f"{taken.spills:,}",
        f"{taken.loop_spills:,}",
        f"{taken.shared:,}",
        f"{taken.shared_limit:,}",
        f"{100 * taken.shared / taken.shared_limit:.0f} %",
    ]


def resource_table(resources: Sequence[Resources]) -> Table:
    """Lay resources out for the terminal.

    Args:
        resources: compiled kernels, in the order of the rows.

    Returns:
        A rich table; shared memory and its limit in bytes, rows over a limit in red.
    """
    table = Table(box=None, header_style="bold")
    for name in _TEXT:
        table.add_column(name, overflow="fold")
    for name in _NUMBERS:
        table.add_column(name, justify="right", no_wrap=True)
    for taken in resources:
        # Text, since a variant's square brackets would read as rich markup.
        table.add_row(*map(Text, _cells(taken)), style="red" if check_limits([taken]) else None)
    return table


def resource_markdown(resources: Sequence[Resources]) -> str:
    """Lay resources out as a Markdown table, the same text on every run.

    Args:
        resources: compiled kernels, in the order of the rows.

    Returns:
        The table with a newline at its end; shared memory and its limit in bytes.
    """
    rows = [[*_TEXT, *_NUMBERS], ["---"] * len(_TEXT) + ["---:"] * len(_NUMBERS)]
    rows += [[cell.replace("|", "\\|") for cell in _cells(taken)] for taken in resources]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
