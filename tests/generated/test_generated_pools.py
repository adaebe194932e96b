"""GLM-5.3-Flash's sparse path by one package, from keys and gates of tokens to attention, against plain torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checked_in import spec_of

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan

PATH = Path(__file__).with_name("pools_path.py")


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PATH), str(folder)], capture_output=True, text=True, check=False)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package for one target."""
    text = spec_of("glm53").read_text().replace("name: glm53", "name: pools", 1)
    start, _, rest = text.partition("targets:")
    text = f"{start}targets: [sm80]{rest[rest.index(chr(10)) :]}"
    (tmp_path / "pools.yaml").write_text(text)
    apply(compare(render(load_plan(tmp_path / "pools.yaml")), tmp_path / "pools"))
    return tmp_path / "pools"


@pytest.mark.interpreter
def test_prefill_and_decode_attend_to_the_tokens_of_the_best_pools(package: Path) -> None:
    done = run(package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["prefill", "decode", "decode", "three drafts"]


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.interpreter
def test_another_transform_of_the_query_is_noticed(package: Path) -> None:
    kernels = package / "_kpool_kernels.py"
    text = kernels.read_text()
    old = "    x = _hadamard(x).to(tl.bfloat16)\n    rows = values_ptr"
    assert old in text
    kernels.write_text(text.replace(old, "    x = x.to(tl.bfloat16)\n    rows = values_ptr"))
    done = run(package)
    assert (done.returncode, done.stderr) == (1, "")
    assert "picks pools that score" in done.stdout
