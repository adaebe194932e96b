"""Back ends: which templates make a package, with what values, and what there is to compile in it."""

from mlagen.backends.base import GeneratedFile
from mlagen.backends.triton import compile_jobs, files

__all__ = ["GeneratedFile", "compile_jobs", "files"]
