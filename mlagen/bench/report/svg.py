"""A small SVG canvas: the same bytes everywhere, and light or dark as the page around it."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

FONTS = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"
# Each colour: in a light page, in a dark one.
COLOURS = {
    "paper": ("#ffffff", "#14171c"),
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#59636e", "#9aa4af"),
    "grid": ("#d8dee4", "#343a43"),
    "blue": ("#2463c9", "#5b9cf5"),
    "orange": ("#b4530a", "#e8933f"),
    "green": ("#3d7a3d", "#6cb56c"),
    "pale": ("#d3e1f7", "#2a4673"),
    "grey": ("#727c87", "#7d8894"),
}
# Corners of each marker around its centre; a circle has none.
MARKS: dict[str, tuple[tuple[float, float], ...]] = {
    "circle": (),
    "square": ((-3.6, -3.6), (3.6, -3.6), (3.6, 3.6), (-3.6, 3.6)),
    "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
    "triangle": ((0, -4.8), (4.8, 3.8), (-4.8, 3.8)),
}
Point = tuple[float, float]


class Canvas:
    """Collects shapes. All lengths are in pixels; y grows downwards; a colour is a key of COLOURS.

    Args:
        width, height: of the picture.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, colour: str, radius: float = 2) -> None:
        """Fill a rectangle."""
        size = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}"'
        self._parts.append(f'<rect class="{colour}" {size}/>')

    def line(self, points: Sequence[Point], colour: str, width: float = 1) -> None:
        """Draw a line through points."""
        self._parts.append(f'<polyline class="{colour} line" stroke-width="{_n(width)}" points="{_path(points)}"/>')

    def text(self, x: float, y: float, text: str, colour: str = "ink", size: float = 13, **how: str) -> None:
        """Write a line of text with its baseline at y; `how`: attributes of SVG, `_` for a hyphen."""
        given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in how.items())
        place = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"{given}'
        self._parts.append(f'<text class="{colour}" {place}>{escape(text)}</text>')

    def mark(self, kind: str, x: float, y: float, colour: str, *, hollow: bool = False) -> None:
        """Draw a marker, a key of MARKS, centred at a point."""
        path = _path([(x + dx, y + dy) for dx, dy in MARKS[kind]])
        shape = f'polygon points="{path}"' if path else f'circle cx="{_n(x)}" cy="{_n(y)}" r="4"'
        drawn = f'class="{colour} line hollow" stroke-width="1.6"' if hollow else f'class="{colour}"'
        self._parts.append(f"<{shape} {drawn}/>")

    def svg(self, title: str) -> str:
        """Return the picture as the text of a file.

        Args:
            title: the content in words, for readers who do not see it.
        """
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONTS}">',
            f"<title>{escape(title)}</title>",
            f"<style>{self._rules(0)} @media (prefers-color-scheme: dark) {{ {self._rules(1)} }}</style>",
            f'<rect class="paper" width="{self.width}" height="{self.height}" rx="6"/>',
            *self._parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _rules(self, theme: int) -> str:
        """Return CSS rules of the colours in use, for fills and for lines."""
        drawn = "".join(self._parts)
        used = {name: values[theme] for name, values in COLOURS.items() if f'class="{name}' in drawn}
        paper = COLOURS["paper"][theme]
        fills = [f".paper {{ fill: {paper} }}", *(f".{name} {{ fill: {value} }}" for name, value in used.items())]
        lines = [f".{name}.line {{ stroke: {value}; fill: none }}" for name, value in used.items()]
        return " ".join([*fills, *lines, f".hollow.line {{ fill: {paper} }}"])


def _path(points: Sequence[Point]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _n(value: float) -> str:
    """A length to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")
