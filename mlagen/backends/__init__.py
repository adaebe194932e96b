"""Back ends: which templates make a package, and with what values."""

from mlagen.backends.base import GeneratedFile
from mlagen.backends.triton import expected_products, files

__all__ = ["GeneratedFile", "expected_products", "files"]
