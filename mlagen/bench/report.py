"""Rows of a benchmark as JSON and as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mlagen.bench.run import OURS, Contender, Row

NOTE = (
    "Median of rounds in which the kernels take turns. Calls below 130 us: graph replay over inputs that exceed L2 "
    "together; longer ones: events, L2 overwritten before each. ×: the other kernel's time over ours in the same "
    "round; above 1, ours is faster. Roof: FLOPs or bytes, whichever takes longer; prefill counts a KV row once, "
    "decode once a token."
)


def to_json(row: Row) -> dict[str, Any]:
    """A plain dict: seconds, bytes and FLOPs under the names of Row and Contender; a NaN error becomes null."""
    data = asdict(row)
    data["shape"] = asdict(row.shape)
    for contender in data["contenders"]:
        if contender["error"] is not None and not math.isfinite(contender["error"]):
            contender["error"] = None
    data["contenders"] = list(data["contenders"])
    return data


def markdown(rows: Sequence[Row]) -> str:
    """A table a kind of shape: time, rates and share of the roof of ours, then each other's time and ratio.

    Kernels that ran at no shape are listed below it with their reason; so are the reasons of single gaps.
    """
    if not rows:
        return ""
    parts = []
    for kind in dict.fromkeys(row.shape.kind for row in rows):
        parts.append(_table([row for row in rows if row.shape.kind == kind]))
    heads = f"{rows[0].device}; roof {rows[0].roof_origin}.\n\n{NOTE}"
    return "\n\n".join([heads, *parts]) + "\n"


def line(row: Row) -> str:
    """A row in one line, for those who wait."""
    parts = [
        f"{each.name} {_us(each.seconds)} us" if each.seconds is not None else f"{each.name}: {each.absent}"
        for each in row.contenders
    ]
    return f"{row.shape}: {'; '.join(parts)}"


def _table(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(each.name for row in rows for each in row.contenders if each.name != OURS))
    ran = [name for name in names if any(_of(row, name).seconds is not None for row in rows)]
    eager = any(each.eager_seconds is not None for row in rows for each in row.contenders)
    header = [rows[0].shape.kind, "ours us", "TFLOP/s", "GB/s", "of the roof", *(f"{name} us (×)" for name in ran)]
    header += ["error"] + (["from Python us"] if eager else [])
    lines = [_line(header), _line(["---"] + ["---:"] * (len(header) - 1))]
    for row in rows:
        ours = row.ours
        cells = [str(row.shape).removeprefix(f"{row.shape.kind} ")]
        if ours.seconds is None:
            cells += ["", "", "", ""]
        else:
            cells += [
                _us(ours.seconds),
                f"{row.flops / ours.seconds / 1e12:.0f}",
                f"{row.bytes_moved / ours.seconds / 1e9:,.0f}",
                f"{row.roof_seconds / ours.seconds:.2f}",
            ]
        cells += [_against(_of(row, name)) for name in ran]
        cells.append("" if ours.error is None else f"{ours.error:.1e}")
        if eager:
            cells.append(_eager(row))
        lines.append(_line(cells))
    reasons = _reasons(rows)
    return "\n".join([*lines, *(["", *reasons] if reasons else [])])


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Why there are gaps, a line each; with the shapes, unless it holds for all of them."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for each in row.contenders:
            if each.absent:
                where.setdefault((each.name, each.absent), []).append(str(row.shape))
    return [
        f"- {name}: {reason}" + ("" if len(shapes) == len(rows) else f" ({'; '.join(shapes)})")
        for (name, reason), shapes in where.items()
    ]


def _of(row: Row, name: str) -> Contender:
    return next((each for each in row.contenders if each.name == name), Contender(name, absent="not measured"))


def _against(contender: Contender) -> str:
    if contender.seconds is None:
        return "–"
    ratio = "" if contender.ratio is None else f" ({contender.ratio:.2f})"
    return f"{_us(contender.seconds)}{ratio}"


def _eager(row: Row) -> str:
    timed = [each for each in row.contenders if each.eager_seconds is not None]
    return ", ".join(f"{each.name} {_us(each.eager_seconds)}" for each in timed if each.eager_seconds is not None)


def _us(seconds: float) -> str:
    """Microseconds to a tenth, or whole ones from 100 on."""
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
