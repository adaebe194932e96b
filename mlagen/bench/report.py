"""Rows of a benchmark as JSON and as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mlagen.bench.run import Contender, Row
from mlagen.bench.trial import OURS

NOTE = (
    "Median of rounds in which the kernels take turns, by graph replay over inputs that exceed L2 together; prefill, "
    "and decode over rows from 130 us on, by events, L2 overwritten before each. ×: the other kernel's time over ours "
    "in the same round; above 1, ours is faster. Roof: FLOPs or bytes, whichever takes longer; prefill counts a KV row "
    "once, decode once a token. Error: relative Frobenius norm; of integers, the share that is wrong."
)


def to_json(row: Row) -> dict[str, Any]:
    """A plain dict: seconds, bytes and FLOPs under the names of Row and Contender; a NaN error becomes null."""
    data = asdict(row)
    data["shape"] = {"kind": row.shape.kind, **data["shape"]}
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
    return "\n\n".join([f"{rows[0].device}.", NOTE, *parts]) + "\n"


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
    products = any(row.flops for row in rows)
    header = [rows[0].shape.kind, "ours us", *(["TFLOP/s"] if products else []), "GB/s", "of the roof"]
    header += [*(f"{name} us (×)" for name in ran), "error", *(["from Python us"] if eager else [])]
    lines = [_line(header), _line(["---"] + ["---:"] * (len(header) - 1))]
    for row in rows:
        cells = [str(row.shape).removeprefix(f"{row.shape.kind} "), *_rates(row, products=products)]
        cells += [_against(_of(row, name)) for name in ran]
        cells.append("" if row.ours.error is None else f"{row.ours.error:.1e}")
        if eager:
            cells.append(_eager(row))
        lines.append(_line(cells))
    origins = "; ".join(dict.fromkeys(row.roof_origin for row in rows))
    return "\n".join([*lines, "", f"Roof: {origins}.", *_reasons(rows)])


def _rates(row: Row, *, products: bool) -> list[str]:
    """Our time, rates and share of the roof; blank where we did not run."""
    seconds = row.ours.seconds
    if seconds is None:
        return [""] * (4 if products else 3)
    rates = [f"{row.flops / seconds / 1e12:.0f}"] if products else []
    return [
        _us(seconds),
        *rates,
        f"{row.bytes_moved / seconds / 1e9:,.0f}",
        f"{row.roof_seconds / seconds:.2f}",
    ]


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
