"""Charts of a benchmark as SVG, drawn by matplotlib and coloured by the page they stand in.

Colours are CSS variables, so that a page has light and dark of one chart; text is text, in the page's font.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, takewhile
from types import MappingProxyType
from typing import Any, TypeAlias
from xml.etree import ElementTree

import numpy as np

from mlagen.bench.report.rows import Row
from mlagen.bench.report.tables import of_roof, ratio, shape_name, tera, us
from mlagen.bench.trial import OURS
from mlagen.errors import UsageError

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator
    from matplotlib.transforms import ScaledTranslation
except ImportError as failed:
    raise UsageError(f"an HTML page needs matplotlib ({failed})", hint="pip install 'mlagen[html]'") from failed

# matplotlib takes colours, not CSS: each of these stands for a variable until the SVG is written.
_VARIABLES = {
    f"#0000{number:02x}": f"var(--{name})"
    for number, name in enumerate(
        ("ink", "faint", "grid", "paper", "ours", "variant", "peer1", "peer2", "peer3", "peer4"), 1
    )
}
_INK, _FAINT, _GRID, _PAPER, _OURS, _VARIANT, *_PEERS = _VARIABLES
_MARKERS = {"s": "■", "^": "▲", "D": "◆", "v": "▼"}
_SETTINGS: Any = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "mlagen",
    "font.size": 9.5,
    "text.color": _INK,
    "text.parse_math": False,  # names are plain text
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "grid.color": _GRID,
}
Box: TypeAlias = tuple[float, float, float, float]

_REFERENCE = re.compile(r"^#|url\(#")
_VARIABLE = re.compile("|".join(_VARIABLES))
_INCH = 72  # points, and pixels of the charts: lengths below are both
_ASIDE = 6.0  # kernels of one shape stand so far apart in a roofline
_CHARACTER, _LINE = 4.8, 11.0  # width and height of text, about
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Style:
    """How a kernel looks: by colour and another sign.

    Attributes:
        colour: as matplotlib takes it.
        marker: likewise.
        symbol: the marker as a character.
    """

    colour: str
    marker: str
    symbol: str

    @property
    def css(self) -> str:
        """The colour in a page."""
        return _VARIABLES[self.colour]


def styles_of(rows: Sequence[Row]) -> dict[str, Style]:
    """A style for each kernel of some rows; the same in all charts of a page."""
    peers = zip(cycle(_PEERS), cycle(_MARKERS.items()), strict=False)
    styles = {}
    for each in (each for row in rows for each in row.contenders):
        if each.name == OURS:
            styles[each.name] = Style(_OURS, "o", "●")
        elif not each.is_peer:
            styles[each.name] = Style(_VARIANT, "P", "✚")
        elif each.name not in styles:
            colour, marker = next(peers)
            styles[each.name] = Style(colour, *marker)
    return styles


def labels(rows: Sequence[Row]) -> tuple[list[str], str]:
    """Names of shapes without the parts that all of them share, and those parts."""
    parts = [shape_name(row).split(", ") for row in rows]
    shared = [part for part in parts[0][1:] if all(part in each for each in parts)] if len(rows) > 1 else []
    return [", ".join(part for part in each if part not in shared) for each in parts], ", ".join(shared)


def roofline(rows: Sequence[Row], styles: Mapping[str, Style], key: str) -> str:
    """FLOP/s over FLOPs a byte, logarithmic, under the roof; a point a kernel and shape, ours with the shape's name.

    Args:
        rows: of one kind of shape and under one roof; something ran at each, and all have FLOPs.
        styles: of their kernels.
        key: first part of the chart's ids; unique in a page.
    """
    roof = rows[0].roof
    top, ridge = roof.flops_per_s / TERA, roof.flops_per_s / roof.bytes_per_s
    ran = [(row, each, each.quoted_seconds) for row in rows for each in row.contenders]
    points = [(row, each, row.flops / seconds / TERA) for row, each, seconds in ran if seconds]
    intensity = [row.flops / row.bytes_moved for row in rows]
    left, right = min(*intensity, ridge) / 1.6, max(*intensity, ridge) * 1.4
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=_inches(680, 380), dpi=_INCH)
        axes = figure.add_axes((0.075, 0.115, 0.915, 0.875))
        axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(min(y for *_, y in points) / 1.6, top * 1.7))
        axes.set(xlabel="FLOPs per byte", ylabel="TFLOP/s")
        axes.grid(lw=0.6)
        axes.tick_params(which="both", length=0)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(_plain)
            axis.set_minor_locator(NullLocator())
        axes.plot([left, ridge, right], [left * roof.bytes_per_s / TERA, top, top], color=_INK, lw=1.6)
        _write(axes, (right, top), f"{top:,.0f} TFLOP/s", (0, 4), ha="right", va="bottom")
        run, rise = axes.transData.transform((10, 10)) - axes.transData.transform((1, 1))
        _write(
            axes, (left, left * roof.bytes_per_s / TERA), f"{roof.bytes_per_s / GIGA:,.0f} GB/s", (6, 14),
            rotation=math.degrees(math.atan2(rise, run)), rotation_mode="anchor",
        )  # fmt: skip
        titles, ours = {}, []
        names = list(dict.fromkeys(each.name for _, each, _ in points))
        line = [_box(axes, x, min(x * roof.bytes_per_s / TERA, top)) for x in np.geomspace(left, right, 150)]
        taken = [(*box[:3], box[3] + 16) for box in line]  # the roof and the text on it
        for number, (row, each, y) in enumerate(points):
            titles[f"point{number}"] = (
                f"{each.name}, {shape_name(row)}: {us(each.quoted_seconds)} us, {tera(row, each)} TFLOP/s, "
                f"{of_roof(row, each)} of the roof"
            )
            style = styles[each.name]
            shift = (names.index(each.name) - (len(names) - 1) / 2) * _ASIDE
            aside = ScaledTranslation(shift / _INCH, 0, figure.dpi_scale_trans)
            axes.plot(
                row.flops / row.bytes_moved, y, style.marker, color=style.colour, ms=6, mec=_PAPER, mew=0.5,
                transform=axes.transData + aside, gid=f"point{number}", clip_on=False,
            )  # fmt: skip
            taken.append(_box(axes, row.flops / row.bytes_moved, y, shift))
            if each.name == OURS:
                ours.append((row, taken[-1]))
        _name_points(axes, ours, taken)
        return _svg(figure, key, f"Roofline of {rows[0].shape.kind}", titles)


def _box(axes: Axes, x: float, y: float, aside: float = 0.0) -> Box:
    """The box of a marker, in pixels: left, bottom, right, top."""
    at_x, at_y = axes.transData.transform((x, y))
    return at_x + aside - 4, at_y - 4, at_x + aside + 4, at_y + 4


def _name_points(axes: Axes, points: Sequence[tuple[Row, Box]], taken: list[Box]) -> None:
    """Names shapes near their points, as near as there is free room, left before right."""
    names, _ = labels([row for row, _ in points])
    words = [name.split(" ") for name in names]
    shared = len(list(takewhile(lambda each: len({*each}) == 1, zip(*(each[:-1] for each in words), strict=False))))
    texts = [" ".join(each[shared:]) for each in words] if len(names) > 1 else names
    offsets = [(dx, dy) for dx in (1, -1, 20, -20, 40, -40, 60, 80, 100, 120) for dy in range(-96, 97, 6)]
    offsets.sort(key=lambda each: math.hypot(*each))
    for text, (_, point) in sorted(zip(texts, points, strict=True), key=lambda each: -each[1][1][1]):
        boxes = [_beside(point, *offset, len(text) * _CHARACTER) for offset in offsets]
        number = next((n for n, box in enumerate(boxes) if not any(_meet(box, other) for other in taken)), 0)
        left, bottom, right, top = boxes[number]
        taken.append(boxes[number])
        leftward = offsets[number][0] > 0
        leader = {"arrowstyle": "-", "color": _FAINT, "lw": 0.6, "shrinkA": 0, "shrinkB": 2}
        axes.annotate(
            text, ((point[0] + point[2]) / 2, (point[1] + point[3]) / 2),
            (right if leftward else left, (bottom + top) / 2), "figure pixels", "figure pixels",
            ha="right" if leftward else "left", va="center", fontsize=8.5,
            arrowprops=None if offsets[number][1] == 0 else leader,
        )  # fmt: skip


def _beside(point: Box, dx: float, dy: float, width: float) -> Box:
    """A line of text of some width so far to the left of a point, or to the right of it where dx is negative."""
    y = (point[1] + point[3]) / 2 + dy
    left = point[0] - dx - width if dx > 0 else point[2] - dx
    return left, y - _LINE / 2, left + width, y + _LINE / 2


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def bars(row: Row, styles: Mapping[str, Style], key: str) -> str:
    """The time of each kernel at a shape as a bar from zero, ours first; its ratio to ours; the best peer marked.

    Args:
        row: the shape.
        styles: of its kernels.
        key: first part of the chart's ids; unique in a page.
    """
    ran = [each for each in row.contenders if each.seconds is not None]
    best = row.best_peer
    longest = max((each.quoted_seconds or 0.0 for each in ran), default=1.0)
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=_inches(300, 20 * len(ran) + 2), dpi=_INCH)
        axes = figure.add_axes((0.37, 0, 0.31, 1))
        axes.set(xlim=(0, longest), ylim=(len(ran) - 0.5, -0.5))
        axes.axis("off")
        for y, each in enumerate(ran):
            weight = "bold" if each == best or each.name == OURS else "normal"
            axes.barh(y, each.quoted_seconds or 0.0, 0.62, color=styles[each.name].colour)
            _write(axes, (0, y), each.name, (-6, 0), ha="right", va="center", weight=weight)
            _write(axes, (each.quoted_seconds or 0.0, y), us(each.quoted_seconds), (4, 0), va="center", weight=weight)
            if each.name != OURS and each.quoted_ratio is not None:
                text = f"{'best ' if each == best else ''}×{ratio(each.quoted_ratio)}"
                axes.text(
                    0.63 / 0.31, y, text, transform=axes.get_yaxis_transform(), ha="right", va="center", weight=weight
                )
        return _svg(figure, key, f"Time of {row.shape}, us")


def _write(axes: Axes, at: tuple[float, float], text: str, offset: tuple[float, float], **how: Any) -> None:
    axes.annotate(text, at, offset, textcoords="offset points", annotation_clip=False, **how)


def _plain(value: float, _: object) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _inches(width: float, height: float) -> tuple[float, float]:
    """A size in inches of one in points."""
    return width / _INCH, height / _INCH


def _svg(figure: Figure, key: str, title: str, titles: Mapping[str, str] = MappingProxyType({})) -> str:
    """A figure as an SVG element to stand in HTML.

    Args:
        figure: the figure.
        key: first part of its ids.
        title: a description for those who do not see it.
        titles: texts that show over the groups of these ids.
    """
    buffer = io.BytesIO()
    canvas: Any = FigureCanvasSVG(figure)  # its methods have no types
    canvas.print_svg(buffer, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(buffer.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        given = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        element.attrib = {name: _attribute(name, value, key) for name, value in given.items()}
        if each := titles.get(given.get("id", "")):
            title_of = ElementTree.Element("title")
            title_of.text = each
            element.insert(0, title_of)
        for sheet in element.findall("{*}style"):  # its rules would hold for the whole page
            element.remove(sheet)
    root.attrib = {"role": "img", "aria-label": title, "viewBox": root.attrib["viewBox"]}
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(name: str, value: str, key: str) -> str:
    """An attribute with the page's colours, and with ids of only this chart."""
    if name == "id":
        return f"{key}-{value}"
    value = _REFERENCE.sub(rf"\g<0>{key}-", value)
    return _VARIABLE.sub(lambda found: _VARIABLES[found[0]], value)
