"""The example of the indexer picks the keys that plain torch picks, in the interpreter and on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "indexer"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(packages: Path, *options: str) -> list[str]:
    """The output of the example. It fails if a set or an output differs from the reference."""
    spec = EXAMPLE / "dsv32_indexer.yaml"
    apply(compare(render(load_plan(spec)), packages / "dsv32_indexer"))
    command = [sys.executable, str(EXAMPLE / "sparse_path.py"), "--packages", str(packages), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.interpreter
def test_the_whole_path_agrees_with_plain_torch(tmp_path):
    lines = run(tmp_path, "--device", "cpu", "--tokens", "70", "--topk", "24")
    assert [line.split(":")[0] for line in lines] == [
        "prefill of 70 tokens",
        "prefill of 46 tokens",
        "decode after 70 tokens",
        "decode after 46 tokens",
    ]


@needs_gpu
@pytest.mark.gpu
def test_the_whole_path_agrees_with_plain_torch_on_a_gpu(tmp_path):
    assert len(run(tmp_path, "--tokens", "5000")) == 4
