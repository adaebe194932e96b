"""The example of contexts that ranks share agrees with attention over all rows, on CPUs, and notices a wrong merge."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checked_in import package_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "ranks" / "ranks.py"
SMALL = ("--device", "cpu", "--context", "150", "--requests", "2", "--heads", "16", "--topk", "40")


def run(example: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of the example."""
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    packages = ("--packages", str(package_of("dsv3").parent))
    command = [*launch, str(example), *SMALL, *packages, *options]
    place = {"PYTHONPATH": str(EXAMPLE.parents[2])}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | place)


@pytest.mark.interpreter
def test_ranks_agree_with_one() -> None:
    done = run(EXAMPLE, "--interleave", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["dsv3", "dsv32_fp8"]


@pytest.mark.slow
@pytest.mark.interpreter
def test_parts_that_count_alike_are_noticed(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    right = "torch.exp(every[rank] - torch.logsumexp(every, 0))"
    assert right in text
    broken = tmp_path / "ranks.py"
    broken.write_text(text.replace(right, "torch.full_like(every[rank], 1 / world)"))
    done = run(broken, "--only", "dsv3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "outputs off by" in done.stdout
