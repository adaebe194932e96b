"""The hand-written package of kernels, and jobs for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlagen.compile import CompileJob

PACKAGE = Path(__file__).parent / "package"

JOBS: dict[str, dict[str, Any]] = {
    "_tiny_kernel": {
        "module": "tiny",
        "signature": (("a_ptr", "*bf16"), ("b_ptr", "*bf16"), ("out_ptr", "*fp32"), ("rows", "i32")),
        "constexprs": (("BLOCK_M", 64), ("SCALE", 0.5), ("bias_ptr", None)),
    },
    "_pipelined_kernel": {
        "module": "misfits",
        "signature": (("a_ptr", "*bf16"), ("b_ptr", "*bf16"), ("out_ptr", "*fp32"), ("K", "i32")),
        "constexprs": (("BLOCK", 128),),
        "num_warps": 8,
        "num_stages": 4,
    },
    "_wide_kernel": {
        "module": "misfits",
        "signature": (("x_ptr", "*fp32"), ("out_ptr", "*fp32")),
        "constexprs": (("BLOCK", 4096), ("STEPS", 4)),
        "num_warps": 1,
    },
    "_broken_kernel": {"module": "misfits", "signature": (("x_ptr", "*fp32"),), "constexprs": (("BLOCK", 32),)},
    "_noisy_kernel": {"module": "noisy", "signature": (("x_ptr", "*fp32"),), "constexprs": ()},
    "_copy_kernel": {
        "module": "gluonic",
        "signature": (("x_ptr", "*fp32"), ("out_ptr", "*fp32")),
        "constexprs": (("BLOCK", 128),),
    },
    "_kernel": {"module": "deadly", "signature": (("x_ptr", "*fp32"),), "constexprs": ()},
}

MakeJob = Callable[..., CompileJob]


@pytest.fixture(scope="session")
def make_job() -> MakeJob:
    """Make a job for a kernel and a target; keywords change its fields."""

    def make(kernel: str, target: str, /, **changes: Any) -> CompileJob:
        base = {"num_warps": 4, "num_stages": 2}
        return CompileJob(**{**base, **JOBS[kernel], "kernel": kernel, "target": target, **changes})

    return make


@pytest.fixture(scope="session")
def package() -> Path:
    """The package in place; nobody writes to it."""
    return PACKAGE


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the package under another name, to change."""
    return Path(shutil.copytree(PACKAGE, tmp_path / "copied", ignore=shutil.ignore_patterns("__pycache__")))
