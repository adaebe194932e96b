"""DeepSeek V4.1's sparse path of two levels by one package, from keys to attention, against plain torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checked_in import spec_of

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan

PATH = Path(__file__).with_name("candidates_path.py")


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PATH), str(folder)], capture_output=True, text=True, check=False)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """DeepSeek V4.1's package for one target."""
    start, _, rest = spec_of("dsv41").read_text().replace("name: dsv41", "name: levels", 1).partition("targets:")
    (tmp_path / "levels.yaml").write_text(f"{start}targets: [sm80]{rest[rest.index(chr(10)) :]}")
    apply(compare(render(load_plan(tmp_path / "levels.yaml")), tmp_path / "levels"))
    return tmp_path / "levels"


@pytest.mark.interpreter
def test_a_decode_step_attends_to_the_best_keys_of_the_best_blocks(package: Path) -> None:
    done = run(package)
    assert (done.returncode, done.stdout) == (0, "as plain torch\n"), done.stdout + done.stderr


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("tl.max(tl.where(logits", "tl.min(tl.where(logits", "keeps blocks that score"),
        ("+ columns % CANDIDATE_BLOCK", "+ (columns + 1) % CANDIDATE_BLOCK", "picks"),
    ],
)
@pytest.mark.slow
@pytest.mark.mutants
def test_broken_kernels_are_noticed(package: Path, old: str, new: str, fault: str) -> None:
    kernels = package / "_candidates_kernels.py"
    text = kernels.read_text()
    assert old in text
    kernels.write_text(text.replace(old, new))
    done = run(package)
    assert done.returncode == 1
    assert fault in done.stdout, done.stdout + done.stderr
