"""Back ends: the templates of a package, and their contexts."""

from mlagen.backends.package import expected_products, files
from mlagen.backends.parts.base import GeneratedFile

__all__ = ["GeneratedFile", "expected_products", "files"]
