"""From a plan to text, and from text to files."""

from mlagen.emit.render import ENGINES, Package, RenderedFile, render, render_plugin
from mlagen.emit.replace import check_place
from mlagen.emit.write import Drift, apply, check_edits, compare, orphans, removable

__all__ = [
    "ENGINES",
    "Drift",
    "Package",
    "RenderedFile",
    "apply",
    "check_edits",
    "check_place",
    "compare",
    "orphans",
    "removable",
    "render",
    "render_plugin",
]
