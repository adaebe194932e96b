"""Rows of a benchmark as JSON, as tables, and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlagen.bench.report.against import Change, Comparison
from mlagen.bench.report.rows import Contender, Row
from mlagen.bench.trial import OURS

TERMS = {
    "Shape": "tokens x heads for prefill and decode; requests x tokens per request x heads over a paged cache; "
    "otherwise tokens",
    "Time": "the median of rounds. Kernels take turns without a pause, so all share the card's heat. By graph: a CUDA "
    "graph is replayed over inputs that together exceed L2. By events: L2 is overwritten before each call",
    "×": "the other kernel's time over ours in the same round. Above 1, ours is faster",
    "Behind another kernel": "the time that a call adds to a graph behind a small kernel of someone else's. There it "
    "cannot overlap its own predecessor, as it can in a graph that repeats one call. Measured for calls shorter than "
    "100 us, and then the quoted time",
    "Best peer": "the fastest other kernel that ran. ×best is its ×, behind another kernel if that was measured",
    "Roof": "the time of the FLOPs or of the bytes, whichever is longer. Prefill counts a KV row once, decode once per "
    "token",
    "Error": "the relative Frobenius norm; for integers, the share of wrong values",
    "After a pause": "a round on a card that was idle before, for shapes bound by FLOPs, since its power limit slows a "
    "hot card",
    "From Python": "the wall time of a call launched from Python. For a short call, this is its cost on the host",
}
JUDGED = (
    "Then / now: the earlier time over this one. The card is power-limited, so a row is judged by the change of its "
    "ratio to a peer that ran both times, or by its time if no peer did. A row is slower if it lost more than the "
    "spread of the rounds, their 10th to 90th percentile over the median."
)
NONE = "–"


@dataclass(frozen=True)
class Table:
    """A table of text, first column left-aligned.

    Attributes:
        header: names of the columns.
        rows: cells.
        notes: sentences below the table.
        items: gaps, with their reasons.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    items: tuple[str, ...] = ()


def to_json(row: Row) -> dict[str, Any]:
    """A plain dict: seconds, bytes and FLOPs under the names of Row and Contender; a NaN error becomes null."""
    data = asdict(row)
    data["shape"] = {"family": row.shape.family, "kind": row.shape.kind, **data["shape"]}
    roof = data.pop("roof")
    data["roof_seconds"] = row.roof_seconds
    data["roof_origin"] = roof["origin"]
    data["roof_flops_per_s"] = roof["flops_per_s"] if math.isfinite(roof["flops_per_s"]) else None
    data["roof_bytes_per_s"] = roof["bytes_per_s"]
    best = row.best_peer
    data["best_peer"] = best and best.name
    data["ratio_to_best_peer"] = best and best.quoted_ratio
    for contender in data["contenders"]:
        if contender["error"] is not None and not math.isfinite(contender["error"]):
            contender["error"] = None
    data["contenders"] = list(data["contenders"])
    return data


def markdown(rows: Sequence[Row], comparison: Comparison | None = None) -> str:
    """A table a kind of shape: time, rates and share of the roof of ours, then each other's time and ratio.

    Kernels that ran at no shape are listed below it with their reason; so are the reasons of single gaps.
    """
    if not rows:
        return ""
    said = conditions(rows)
    parts = [_origin(said), "\n".join(f"- **{name}**: {text}." for name, text in TERMS.items())]
    if comparison:
        parts += [f"{comparison.summary}.", _markdown(changes_table(comparison))]
    packages = dict.fromkeys(row.package for row in rows)
    for package in packages:
        if len(packages) > 1:
            parts.append(f"## {package}")
        for kind in by_kind([row for row in rows if row.package == package]):
            parts += map(_markdown, [rows_table(kind), *other_times(kind)])
    return "\n\n".join(parts) + "\n"


def line(row: Row) -> str:
    """A row in one line, for those who wait."""
    parts = [
        f"{each.name} {us(each.seconds)} us" if each.seconds is not None else f"{each.name}: {each.absent}"
        for each in row.contenders
    ]
    return f"{row.shape}: {'; '.join(parts)}"


def conditions(rows: Sequence[Row]) -> dict[str, str]:
    """Device, versions, origin, rounds and roofs of a run; empty where an older file does not say."""
    found: dict[str, list[str | None]] = {
        "Device": [row.device for row in rows],
        "torch": [row.torch for row in rows],
        "triton": [row.triton for row in rows],
        "Driver": [row.driver for row in rows],
        "Peers": list(_peers(rows)),
        "Date": [row.date for row in rows],
        "Commit": [row.commit for row in rows],
        "Rounds": [str(row.rounds) if row.rounds else None for row in rows],
        "Roof": [row.roof.origin for row in rows],
    }
    return {name: "; ".join(dict.fromkeys(each for each in said if each)) for name, said in found.items()}


def _peers(rows: Sequence[Row]) -> tuple[str, ...]:
    """Packages of peers that ran in any row; `none` where each row says that none did."""
    ran = tuple(each for row in rows for each in row.peers or ())
    return ran or (("none",) if all(row.peers is not None for row in rows) else ())


def _origin(said: Mapping[str, str]) -> str:
    """Return the card, versions, date and commit of a run, as far as the report has them."""
    names = {"torch": "torch", "triton": "triton", "Driver": "driver"}
    parts = [", ".join([said["Device"], *(f"{names[name]} {said[name]}" for name in names if said[name])])]
    when = [f"{word} {said[name]}" for name, word in (("Date", "on"), ("Commit", "at commit")) if said[name]]
    parts += [f"Measured {' '.join(when)}"] if when else []
    parts += [f"Peers: {said['Peers']}"] if said["Peers"] else []
    return f"{'. '.join(parts)}."


def by_kind(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of each kind of shape."""
    return [[row for row in rows if row.shape.kind == kind] for kind in dict.fromkeys(row.shape.kind for row in rows)]


def shape_name(row: Row) -> str:
    """A row's shape without its kind."""
    return str(row.shape).removeprefix(f"{row.shape.kind} ")


def rows_table(rows: Sequence[Row]) -> Table:
    """Rows of one kind of shape."""
    names = list(dict.fromkeys(each.name for row in rows for each in row.contenders if each.name != OURS))
    ran = [name for name in names if any(row.of(name).seconds is not None for row in rows)]
    columns: dict[str, list[str]] = {rows[0].shape.kind: [shape_name(row) for row in rows]}
    columns["ours us"] = [us(row.ours.seconds) for row in rows]
    if any(row.ours.behind_seconds for row in rows):
        columns["behind another kernel"] = [us(row.ours.behind_seconds) for row in rows]
    columns["by"] = [row.ours.method or "" for row in rows]
    if any(row.flops for row in rows):
        columns["TFLOP/s"] = [tera(row, row.ours) for row in rows]
    columns["GB/s"] = [giga(row, row.ours) for row in rows]
    columns["of the roof"] = [of_roof(row, row.ours) for row in rows]
    if any(row.best_peer for row in rows):
        columns["best peer"] = [row.best_peer.name if row.best_peer else NONE for row in rows]
        columns["×best"] = [ratio(row.best_peer.quoted_ratio if row.best_peer else None) for row in rows]
    for name in ran:
        columns[f"{name} us (×)"] = [_against(row.of(name)) for row in rows]
    columns["error"] = [error(row.ours) for row in rows]
    origins = "; ".join(dict.fromkeys(row.roof.origin for row in rows))
    return Table(tuple(columns), tuple(zip(*columns.values(), strict=True)), (f"Roof: {origins}.",), _reasons(rows))


def other_times(rows: Sequence[Row]) -> list[Table]:
    """Times behind another kernel, after a pause and from Python of each kernel, where they were measured."""
    tables = _behind(rows)
    for name, attribute in (("after a pause", "cool_seconds"), ("from Python", "eager_seconds")):
        timed = [row for row in rows if any(getattr(each, attribute) for each in row.contenders)]
        kernels = dict.fromkeys(each.name for row in timed for each in row.contenders if getattr(each, attribute))
        cells = tuple((shape_name(row), *(us(getattr(row.of(each), attribute)) for each in kernels)) for row in timed)
        if timed:
            tables.append(Table((f"{rows[0].shape.kind}, {name}", *(f"{each} us" for each in kernels)), cells))
    return tables


def _behind(rows: Sequence[Row]) -> list[Table]:
    """Times behind another kernel; none where no call is short."""
    timed = [row for row in rows if any(each.behind_seconds for each in row.contenders)]
    kernels = dict.fromkeys(each.name for row in timed for each in row.contenders if each.behind_seconds)
    if not timed:
        return []
    header = (f"{rows[0].shape.kind}, behind another kernel", *(f"{each} us (×)" for each in kernels))

    def cell(each: Contender) -> str:
        return _against(replace(each, seconds=each.behind_seconds, ratio=each.behind_ratio))

    return [Table(header, tuple((shape_name(row), *(cell(row.of(name)) for name in kernels)) for row in timed))]


def changes_table(comparison: Comparison) -> Table:
    """Return the change of each shape since an earlier run."""
    header = ("shape", "then us", "now us", "then / now", "peer", "× then", "× now", "change", "spread", "verdict")
    several = len({each.now.package for each in comparison.changes}) > 1
    return Table(header, tuple(_change(each, several) for each in comparison.changes), (JUDGED,))


def _change(each: Change, several: bool) -> tuple[str, ...]:
    then, now = each.peers() or (Contender(""), Contender(""))
    return (
        f"{each.now.package}: {each.now.shape}" if several else str(each.now.shape),
        us(each.then.ours.seconds),
        us(each.now.ours.seconds),
        ratio(each.speedup),
        each.peer or NONE,
        ratio(then.ratio),
        ratio(now.ratio),
        NONE if each.change is None else f"{each.change - 1:+.1%}",
        percent(each.spread),
        each.verdict,
    )


def _reasons(rows: Sequence[Row]) -> tuple[str, ...]:
    """Why there are gaps, a line each; with the shapes, unless it holds for all of them."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for each in row.contenders:
            if each.absent:
                where.setdefault((each.name, each.absent), []).append(str(row.shape))
    return tuple(
        f"{name}: {reason}" + ("" if len(shapes) == len(rows) else f" ({'; '.join(shapes)})")
        for (name, reason), shapes in where.items()
    )


def us(seconds: float | None) -> str:
    """Microseconds to a tenth, or whole ones from 100 on."""
    if seconds is None:
        return NONE
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def tera(row: Row, each: Contender) -> str:
    """TFLOP/s of a kernel, by the quoted time."""
    return NONE if each.quoted_seconds is None or not row.flops else f"{row.flops / each.quoted_seconds / 1e12:.0f}"


def giga(row: Row, each: Contender) -> str:
    """GB/s of a kernel, likewise."""
    return NONE if each.quoted_seconds is None else f"{row.bytes_moved / each.quoted_seconds / 1e9:,.0f}"


def of_roof(row: Row, each: Contender) -> str:
    """Share of the roof that a kernel reaches, likewise."""
    return NONE if each.quoted_seconds is None else f"{row.roof_seconds / each.quoted_seconds:.2f}"


def ratio(value: float | None) -> str:
    """A ratio to two digits."""
    return NONE if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return NONE if value is None else f"{value:.1%}"


def error(each: Contender) -> str:
    """A kernel's error."""
    return NONE if each.error is None else f"{each.error:.1e}"


def _against(contender: Contender) -> str:
    if contender.seconds is None:
        return NONE
    return us(contender.seconds) + ("" if contender.ratio is None else f" ({contender.ratio:.2f})")


def _markdown(table: Table) -> str:
    lines = [_line(table.header), _line(["---"] + ["---:"] * (len(table.header) - 1)), *map(_line, table.rows)]
    return "\n".join([*lines, *(f"\n{note}" for note in table.notes), *(f"- {_inline(item)}" for item in table.items)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_inline, cells))} |"


def _inline(text: str) -> str:
    """Text that ends no cell and opens no tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")
