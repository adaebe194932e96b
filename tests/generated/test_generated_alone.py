"""A generated package needs torch, triton and the standard library, nothing of mlagen, and raises no warning."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

ALONE = Path(__file__).with_name("alone.py")
PACKAGES = sorted(path.parent for path in (Path(__file__).parents[2] / "generated").glob("*/__init__.py"))
by_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
# Unmended, Triton's interpreter is right for fp16 alone, and 3.6's takes no tensor as a loop bound under numpy 2.4.
BARE_INTERPRETER = not importlib.metadata.version("triton").startswith("3.6.")


def alone(package: Path, mode: str, cwd: Path, **environment: str) -> list[str]:
    """Lines that the package's wrappers print in a process of their own, in another folder."""
    command = [sys.executable, "-I", "-B", "-W", "error", str(ALONE), str(package), mode]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")} | environment
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(cwd.iterdir()) == []
    return done.stdout.splitlines()


@by_package
def test_wrappers_refuse_a_wrong_argument_before_any_launch(package, tmp_path):
    lines = alone(package, "refuse", tmp_path)
    element = "torch.float16" if package.name == "odd" else "torch.bfloat16"
    device = "device: got cpu, takes a CUDA or ROCm device"
    assert lines == [
        f"triton_mla_sparse_attention: q: got torch.float64, takes {element}",
        "triton_mla_sparse_attention: q: got NoneType, takes a tensor",
        f"triton_mla_sparse_attention: {device}",
        f"flash_mla_sparse_fwd: q: got torch.float64, takes {element}",
        "flash_mla_sparse_fwd: q: got NoneType, takes a tensor",
        f"flash_mla_sparse_fwd: {device}",
        f"concat_and_cache_mla: kv_c: got torch.float64, takes {element}",
        "concat_and_cache_mla: kv_c: got NoneType, takes a tensor",
    ]


@pytest.mark.skipif(not BARE_INTERPRETER, reason="this Triton's interpreter needs mending")
def test_the_fp16_package_runs_each_wrapper_on_the_interpreter(tmp_path):
    (package,) = [package for package in PACKAGES if package.name == "odd"]
    assert alone(package, "run", tmp_path, TRITON_INTERPRET="1") == [
        "triton_mla_sparse_attention",
        "flash_mla_sparse_fwd",
        "concat_and_cache_mla",
    ]
