"""Resources for people: a table for the terminal and one for reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from mlagen.compile.resources import Resources, check_limits
from mlagen.plan.targets import TARGETS

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


def target_table(proofs: Mapping[str, Sequence[Resources]], breaks: Callable[[Resources], bool]) -> Table:
    """Lay out for the terminal the most that any kernel variant takes of each target, a row a target.

    Args:
        proofs: compiled kernels by the version of Triton that compiled them; with several versions a row is of all.
        breaks: whether a compiled kernel breaks a limit.

    Returns:
        A rich table; rows with a variant over a limit in red, with the number of them.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("target")
    for name in ("kernels", "variants", "registers", "", "shared memory", "", "loop spills", "over a limit"):
        table.add_column(name, justify="right")
    everything = [one for resources in proofs.values() for one in resources]
    for target in dict.fromkeys(one.target for one in everything):
        found = [one for one in everything if one.target == target]
        over = {version: sum(map(breaks, _of(target, resources))) for version, resources in proofs.items()}
        tightest = max(found, key=_register_share)
        largest = max(found, key=lambda one: one.shared / one.shared_limit)
        table.add_row(
            target,
            str(len({(one.module, one.kernel) for one in found})),
            f"{len({one.key for one in found}):,}",
            f"{tightest.registers} of {_register_limit(tightest)}",
            f"{100 * _register_share(tightest):.0f} %",
            f"{largest.shared:,} of {largest.shared_limit:,}",
            f"{100 * largest.shared / largest.shared_limit:.0f} %",
            f"{max(one.loop_spills for one in found):,}",
            _over(over),
            style="red" if any(over.values()) else None,
        )
    return table


def _of(target: str, resources: Sequence[Resources]) -> list[Resources]:
    return [one for one in resources if one.target == target]


def _register_limit(taken: Resources) -> int:
    return TARGETS[taken.target].register_limit(taken.num_warps)


def _register_share(taken: Resources) -> float:
    return taken.registers / _register_limit(taken)


def _over(over: Mapping[str, int]) -> str:
    """How many variants break a limit; of several Tritons under which."""
    if not any(over.values()):
        return "-"
    if len(over) == 1:
        return str(*over.values())
    return ", ".join(f"{number} under {version}" for version, number in over.items() if number)
