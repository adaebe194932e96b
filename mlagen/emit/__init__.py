"""From a plan to text, and from text to files."""

from mlagen.emit.render import Package, RenderedFile, render, render_sglang
from mlagen.emit.write import Drift, apply, compare

__all__ = ["Drift", "Package", "RenderedFile", "apply", "compare", "render", "render_sglang"]
