"""Back ends: the templates of a package, and their contexts."""

from mlagen.backends.base import GeneratedFile
from mlagen.backends.triton import expected_products, files

__all__ = ["GeneratedFile", "expected_products", "files"]
