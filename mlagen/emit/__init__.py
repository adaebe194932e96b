"""From a plan to text, and from text to files."""

from mlagen.emit.render import ENGINES, Package, RenderedFile, render, render_plugin
from mlagen.emit.write import Drift, apply, compare

__all__ = ["ENGINES", "Drift", "Package", "RenderedFile", "apply", "compare", "render", "render_plugin"]
