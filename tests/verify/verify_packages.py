"""Tiny packages for tests of the worker processes: only refusals, so that no kernel is needed."""

from pathlib import Path

from checked_in import package_of
from verify_specs import spec

GENERATED = package_of("odd")  # it has this package's launches and facts
INIT = """
import os, sys, time
from . import _launch

SPEC = {{"spec": {spec!r}}}
{extra}

def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype="auto", scale=None):
    {body}
"""
REFUSES_ALL = 'raise ValueError("kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype")'


def write_package(folder: Path, body: str = REFUSES_ALL, extra: str = "") -> Path:
    """A package `fake` with one wrapper of this body."""
    package = folder / "fake"
    package.mkdir()
    said = spec(wrappers=["concat_and_cache_mla"], kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16)
    for name in ("_launch.py", "_internals.py", "_facts.py"):
        (package / name).write_text((GENERATED / name).read_text())
    (package / "__init__.py").write_text(INIT.format(spec=said, body=body, extra=extra))
    return package
