"""Reductions and scans a slice at a time, against those that call the combine function once an element."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROBE = Path(__file__).with_name("reductions_probe.py")
ROOT = Path(__file__).parents[2]


DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32"]


def results(mode: str, folder: Path) -> dict[str, np.ndarray]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    out = folder / f"{mode}.npz"
    subprocess.run([sys.executable, str(PROBE), mode, str(out)], check=True, env=env, timeout=300)
    with np.load(out) as saved:
        return dict(saved)


@pytest.mark.interpreter
def test_slices_give_the_bits_that_elements_give_and_a_sort_is_a_sort(tmp_path: Path) -> None:
    """One test, since the results of both take longer than all that is asked of them."""
    fixed, bare = results("fixed", tmp_path), results("bare", tmp_path)
    assert {name.partition(" ")[0] for name in bare} == {f"torch.{dtype}" for dtype in DTYPES}
    assert [name for name in bare if fixed[name].tobytes() != bare[name].tobytes()] == []
    names = [name.removesuffix(" numpy sort") for name in fixed if name.endswith(" numpy sort")]
    assert names
    assert [name for name in names if not np.array_equal(fixed[f"{name} sort"], fixed[f"{name} numpy sort"])] == []
