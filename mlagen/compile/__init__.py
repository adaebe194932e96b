"""Compilation of generated kernels for every target, without a GPU, and checks of their resources."""

from mlagen.compile.folder import default_cache_dir
from mlagen.compile.job import CompileJob
from mlagen.compile.kernels import write_kernels
from mlagen.compile.pool import compile_jobs, content_keys, list_variants
from mlagen.compile.resources import Resources, check_limits
from mlagen.compile.settle import Judge, Settler
from mlagen.compile.table import resource_markdown, resource_table, target_table
from mlagen.compile.toolchain import Toolchain, cached_tritons, installed, parse_tritons, toolchain, tritons_dir

__all__ = [
    "CompileJob",
    "Judge",
    "Resources",
    "Settler",
    "Toolchain",
    "cached_tritons",
    "check_limits",
    "compile_jobs",
    "content_keys",
    "default_cache_dir",
    "installed",
    "list_variants",
    "parse_tritons",
    "resource_markdown",
    "resource_table",
    "target_table",
    "toolchain",
    "tritons_dir",
    "write_kernels",
]
