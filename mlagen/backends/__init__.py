"""Back ends: which templates make a package, with what values, and what there is to compile in it."""

from mlagen.backends.base import GeneratedFile
from mlagen.backends.triton import expected_products, files

__all__ = ["GeneratedFile", "expected_products", "files"]
