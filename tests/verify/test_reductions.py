"""Reductions and scans a slice at a time, against those that call the combine function once an element."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.interpreter

PROBE = Path(__file__).with_name("reductions_probe.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    found = {}
    for mode in ("fixed", "bare"):
        out = tmp_path_factory.mktemp(mode) / "results.npz"
        subprocess.run([sys.executable, str(PROBE), mode, str(out)], check=True, env=env, timeout=300)
        with np.load(out) as saved:
            found[mode] = dict(saved)
    return found


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32"])
def test_slices_give_the_bits_that_elements_give(results: dict[str, dict[str, np.ndarray]], dtype: str) -> None:
    names = [name for name in results["bare"] if name.startswith(f"torch.{dtype} ")]
    assert names
    assert [name for name in names if results["fixed"][name].tobytes() != results["bare"][name].tobytes()] == []


def test_a_sort_is_a_sort(results: dict[str, dict[str, np.ndarray]]) -> None:
    fixed = results["fixed"]
    names = [name.removesuffix(" numpy sort") for name in fixed if name.endswith(" numpy sort")]
    assert names
    assert [name for name in names if not np.array_equal(fixed[f"{name} sort"], fixed[f"{name} numpy sort"])] == []
