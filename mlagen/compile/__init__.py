"""Compile: generated kernels for every target, without a GPU; what they take of it, and whether it fits."""

from mlagen.compile.cache import default_cache_dir
from mlagen.compile.pool import compile_jobs, triton_version
from mlagen.compile.resources import Resources, check_limits
from mlagen.compile.table import resource_markdown, resource_table

__all__ = [
    "Resources",
    "check_limits",
    "compile_jobs",
    "default_cache_dir",
    "resource_markdown",
    "resource_table",
    "triton_version",
]
