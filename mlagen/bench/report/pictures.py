"""Pictures of the documents, drawn from reports and layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlagen.bench.report.rows import Row
from mlagen.bench.report.svg import MARKS, Canvas
from mlagen.bench.report.tables import ratio
from mlagen.layout import CacheLayout, PadField, ScalesField

WIDTH = 600  # pixels: narrow, so that a telephone shows it at half its size at least
LEVEL = 0.995  # a ratio that is 1.00 when it is written
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Picture:
    """A picture of a document.

    Attributes:
        svg: text of the file.
        alt: the content in words.
    """

    svg: str
    alt: str


@dataclass(frozen=True)
class Bar:
    """One row of the chart of speed.

    Attributes:
        kernel: its name.
        shape: the call's shape.
        ratio: the best peer's time over mlagen's.
        peer: name of the best peer.
    """

    kernel: str
    shape: str
    ratio: float
    peer: str


def speed(cards: Mapping[str, Sequence[Bar]]) -> Picture:
    """Draw the ratio to the best peer of each chosen row, a group of bars a card, on a logarithmic axis."""
    values = [bar.ratio for bars in cards.values() for bar in bars]
    low, high = math.floor(min(*values, 0.9) * 10) / 10, math.ceil(max(*values, 1.1) * 10) / 10
    left, right, step, top = 262.0, WIDTH - 168.0, 35, 62
    canvas = Canvas(WIDTH, top + sum(len(bars) * step + 28 for bars in cards.values()))

    def at(value: float) -> float:
        return left + (right - left) * math.log(value / low) / math.log(high / low)

    canvas.text(16, 28, f"Speed against the best peer: {', '.join(cards)}", size=17, font_weight="bold")
    canvas.text(16, 48, "1.0: as fast as the fastest peer in the same process. Left of it, mlagen is slower.", "faint")
    y = top
    for card, bars in cards.items():
        bottom = y + len(bars) * step
        for number in range(round(low * 10), round(high * 10) + 1):
            x = at(number / 10)
            canvas.line([(x, y), (x, bottom)], "ink" if number == 10 else "grid")
            canvas.text(x, bottom + 16, f"{number / 10:.1f}", "faint", 12, text_anchor="middle")
        if len(cards) > 1:
            canvas.text(16, bottom + 16, card, "faint", 12)
        for number, bar in enumerate(bars):
            middle = y + step * (number + 0.5)
            slower = bar.ratio < LEVEL
            canvas.text(16, middle - 2, bar.kernel)
            canvas.text(16, middle + 12, bar.shape, "faint", 10.5)
            x, one = at(bar.ratio), at(1.0)
            canvas.rect(min(x, one), middle - 8, abs(x - one), 16, "orange" if slower else "blue")
            canvas.text(right + 12, middle + 4, ratio(bar.ratio), "orange" if slower else "blue", font_weight="bold")
            canvas.text(right + 50, middle + 4, bar.peer, "faint", 12)
        y = bottom + 28
    said = "; ".join(f"{bar.kernel} {ratio(bar.ratio)}" for bars in cards.values() for bar in bars)
    alt = f"Speed against the best peer on {', '.join(cards)}, 1.0 is equal: {said}"
    return Picture(canvas.svg(alt), alt)


def roofline(kernel: str, groups: Mapping[str, Sequence[Row]]) -> Picture:
    """Draw mlagen and its best peer under the roof, a point a shape.

    Rows with FLOPs have TFLOP/s over FLOPs a byte. Others have GB/s over bytes moved, under a flat roof.

    Args:
        kernel: the family's name.
        groups: rows by name, at most as many groups as markers.
    """
    rows = [row for group in groups.values() for row in group]
    by_flops = all(row.flops for row in rows)

    def rate(row: Row, seconds: float) -> float:
        return row.flops / seconds / TERA if by_flops else row.bytes_moved / seconds / GIGA

    points: list[tuple[str, float, float, float | None]] = []  # group, place, rate of mlagen, of the best peer
    for name, group in groups.items():
        for row in group:
            across = row.flops / row.bytes_moved if by_flops else row.bytes_moved / 1e6
            peer = row.best_peer.quoted_seconds if row.best_peer else None
            if ours := row.ours.quoted_seconds:
                points.append((name, across, rate(row, ours), rate(row, peer) if peer else None))
    top = max(row.roof.flops_per_s / TERA if by_flops else row.roof.bytes_per_s / GIGA for row in rows)
    slope = max(row.roof.bytes_per_s for row in rows) / TERA
    rates = [each for *_, own, other in points for each in (own, other) if each]
    places = [place for _, place, *_ in points] + ([top / slope] if by_flops else [])
    plot = _Plot((min(places) / 1.7, max(places) * 1.7), (min(rates) / 1.7, max(top, *rates) * 1.5))
    canvas = plot.canvas
    plot.axes("FLOPs per byte" if by_flops else "MB moved", "TFLOP/s" if by_flops else "GB/s")
    left = max(plot.x[0], plot.y[0] / slope)
    roof_line = [(left, left * slope), (top / slope, top)] if by_flops else [(plot.x[0], top)]
    canvas.line([plot.at(*point) for point in (*roof_line, (plot.x[1], top))], "ink", 1.8)
    roof = f"roof: {top:,.0f} TFLOP/s, {slope * 1e3:,.0f} GB/s" if by_flops else f"roof: {top:,.0f} GB/s"
    shapes = dict(zip(groups, MARKS, strict=False))
    for name, place, own, other in points:
        if other:
            canvas.line([plot.at(place, other), plot.at(place, own)], "grey", 1.2)
            canvas.mark(shapes[name], *plot.at(place, other), "orange", hollow=True)
        canvas.mark(shapes[name], *plot.at(place, own), "blue")
    plot.legend(f"{kernel} on {rows[0].device.removeprefix('NVIDIA ').split()[0]}", shapes, roof)
    alt = f"Roofline of {kernel}: {len(points)} shapes of mlagen and of the best peer at each"
    return Picture(canvas.svg(alt), alt)


class _Plot:
    """A plot with two logarithmic axes.

    Args:
        x, y: ranges of the axes.
    """

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x, self.y = x, y
        self.left, self.top, self.right, self.bottom = 62.0, 44.0, WIDTH - 18.0, 372.0
        self.canvas = Canvas(WIDTH, 464)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of a point on the canvas."""
        across = math.log(x / self.x[0]) / math.log(self.x[1] / self.x[0])
        up = math.log(y / self.y[0]) / math.log(self.y[1] / self.y[0])
        return self.left + (self.right - self.left) * across, self.bottom - (self.bottom - self.top) * up

    def axes(self, across: str, up: str) -> None:
        """Draw grid lines and the names of the axes."""
        for tick in _ticks(self.x):
            x, _ = self.at(tick, self.y[0])
            self.canvas.line([(x, self.top), (x, self.bottom)], "grid")
            self.canvas.text(x, self.bottom + 16, _plain(tick), "faint", 12, text_anchor="middle")
        for tick in _ticks(self.y):
            _, y = self.at(self.x[0], tick)
            self.canvas.line([(self.left, y), (self.right, y)], "grid")
            self.canvas.text(self.left - 8, y + 4, _plain(tick), "faint", 12, text_anchor="end")
        self.canvas.text(self.right, self.bottom + 34, across, size=12.5, text_anchor="end")
        self.canvas.text(16, 34, up, size=12.5)

    def legend(self, title: str, shapes: Mapping[str, str], roof: str) -> None:
        """Name the picture, the groups, the two colours and the roof."""
        self.canvas.text(self.right, 28, title, size=15, font_weight="bold", text_anchor="end")
        y, x = self.bottom + 58, self.left
        entries = [(name, mark, "grey", False) for name, mark in shapes.items()] if len(shapes) > 1 else []
        entries += [("mlagen", "circle", "blue", False), ("best peer", "circle", "orange", True)]
        for name, mark, colour, hollow in entries:
            self.canvas.mark(mark, x + 4, y - 4, colour, hollow=hollow)
            self.canvas.text(x + 14, y, name, "faint", 12)
            x += 32 + 6.6 * len(name)
        self.canvas.line([(self.left - 3, y + 18), (self.left + 11, y + 18)], "ink", 1.8)
        self.canvas.text(self.left + 14, y + 22, roof, "faint", 12)


def _ticks(axis: tuple[float, float]) -> list[float]:
    """Numbers of an axis: powers of ten, and 2 and 5 times those where they are few."""
    powers = range(math.floor(math.log10(axis[0])), math.ceil(math.log10(axis[1])) + 1)
    digits = (1, 2, 5) if len(powers) <= 5 else (1,)
    return [digit * 10.0**power for power in powers for digit in digits if axis[0] <= digit * 10.0**power <= axis[1]]


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def layouts(every: Sequence[tuple[CacheLayout, str]]) -> Picture:
    """Draw the bytes of one token in each cache layout, to scale, largest first.

    Args:
        every: layouts, with the columns of each in words.
    """
    every = sorted(every, key=lambda each: -each[0].row_bytes)
    step, top, left = 52, 72, 16
    canvas = Canvas(WIDTH, top + step * len(every) + 40)
    scale = (WIDTH - 2 * left) / every[0][0].row_bytes
    canvas.text(left, 28, "One token in each cache layout, by bytes", size=17, font_weight="bold")
    canvas.text(left, 47, "After a gap: bytes that follow the rows of all tokens of the page.", "faint", 12)
    for number, (layout, columns) in enumerate(every):
        y = top + number * step
        canvas.text(left, y + 8, layout.name, font_weight="bold", size=12.5)
        tail = f"{columns} columns, {layout.row_bytes:,} bytes"
        canvas.text(left + 14 + 8 * len(layout.name), y + 8, tail, "faint", 12)
        for field in layout.fields:
            first = layout.plane_bytes[0] if field.plane else 0
            x = left + (first + field.offset) * scale + 6 * field.plane
            colour = _colour(field)
            width = max(field.nbytes * scale - 1, 1.5)
            canvas.rect(x, y + 14, width, 22, colour, 1)
            label = f"{field.count} {field.dtype}"
            if width > 6.5 * len(label):
                canvas.text(x + width / 2, y + 29, label, "paper", 11, text_anchor="middle")
    x, y = float(left), top + step * len(every) + 20
    for name, colour in KINDS:
        canvas.rect(x, y - 10, 12, 12, colour, 1)
        canvas.text(x + 18, y, name, "faint", 12)
        x += 38 + 6.3 * len(name)
    said = "; ".join(f"{layout.name} {layout.row_bytes:,}" for layout, _ in every)
    alt = f"Bytes of a token by cache layout: {said}"
    return Picture(canvas.svg(alt), alt)


KINDS = (
    ("latent, or latent and RoPE as one", "blue"),
    ("RoPE", "green"),
    ("scales", "orange"),
    ("padding", "grey"),
)


def _colour(field: object) -> str:
    if isinstance(field, ScalesField):
        return "orange"
    if isinstance(field, PadField):
        return "grey"
    return "green" if getattr(field, "name", "") == "rope" else "blue"
