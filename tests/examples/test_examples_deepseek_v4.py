"""The example of a DeepSeek V4 layer agrees with plain torch, in the interpreter and on a GPU, and notices a fault."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checked_in import package_of
from rotation import some

EXAMPLE = Path(__file__).parents[2] / "examples" / "deepseek_v4" / "layer.py"
SHORT = ("--device", "cpu", "--tokens", "20", "--topk", "4")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(packages: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The example with these options."""
    command = [sys.executable, str(EXAMPLE), "--packages", str(packages), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def agreeing(packages: Path, *options: str) -> list[str]:
    """The lines of an example that agrees."""
    done = run(packages, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.interpreter
@pytest.mark.parametrize("name", some(("dsv4_flash", "dsv4_flash_out_rope"), 1))  # the second rotates its output back
def test_a_layer_with_an_indexer_agrees_with_plain_torch(name: str) -> None:
    lines = agreeing(package_of(name).parent, *SHORT, "--package", name)
    steps = ("first chunk", "second chunk", "decode", "three drafts", "after the rejected drafts", "decode")
    assert [line.split(":")[0] for line in lines] == [f"request {one}, {step}" for step in steps for one in (0, 1)]


@pytest.mark.slow
@pytest.mark.interpreter
def test_a_layer_without_one_agrees_with_plain_torch() -> None:
    assert len(agreeing(package_of("dsv4_flash").parent, *SHORT[:3], "124", "--ratio", "128")) == 12


@pytest.mark.slow
@pytest.mark.interpreter
def test_rows_at_a_wrong_position_are_noticed(tmp_path: Path) -> None:
    shutil.copytree(package_of("dsv4_flash"), tmp_path / "dsv4_flash")
    kernels = tmp_path / "dsv4_flash" / "_compressor_kernels.py"
    text = kernels.read_text()
    right = "position + 1 - compress_ratio"
    assert right in text
    kernels.write_text(text.replace(right, "position"))
    done = run(tmp_path, *SHORT)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert "output off by" in done.stdout


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("ratio", ["4", "128"])
def test_a_layer_agrees_with_plain_torch_on_a_gpu(ratio: str) -> None:
    assert len(agreeing(package_of("dsv4_flash").parent, "--tokens", "3000", "--ratio", ratio)) == 12
