"""The example of SGLang's cast agrees with float64 on a CPU, and notices a scale that is ignored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checked_in import package_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "sglang" / "cast.py"
SMALL = ("--device", "cpu", "--requests", "2", "--keys", "100", "--heads", "16", "--pool", "300")


def run(example: Path) -> subprocess.CompletedProcess[str]:
    """The example at a small size."""
    command = [sys.executable, str(example), *SMALL, "--packages", str(package_of("dsv3_fp8").parent)]
    place = {"PYTHONPATH": str(EXAMPLE.parents[2])}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | place)


@pytest.mark.interpreter
def test_results_agree_with_float64() -> None:
    done = run(EXAMPLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("16 heads, a pool of 300 tokens: off by package, q bf16")


@pytest.mark.slow
@pytest.mark.interpreter
def test_a_wrong_scale_is_noticed(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    right = '"k_scale": torch.ones(1'
    assert right in text
    broken = tmp_path / "cast.py"
    broken.write_text(text.replace(right, '"k_scale": 2 * torch.ones(1'))
    assert run(broken).returncode == 1
