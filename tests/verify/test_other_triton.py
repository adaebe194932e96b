"""Kernels hold under a Triton beside the pinned one: another one for each commit, all of them in the slow tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rotation import SEED

from mlagen.compile import installed, toolchain
from mlagen.errors import ToolError
from mlagen.plan.tritons import TRITONS
from mlagen.verify import mismatches, verify_package

pytestmark = pytest.mark.interpreter

GENERATED = Path(__file__).parents[2] / "generated"
OTHERS = [version for version in TRITONS if version != installed().version]
DRAWN = OTHERS[SEED % len(OTHERS)]
PACKAGES = ("dsv4_flash", "dsv3", "odd_prefill")  # which have kernels of every family


@pytest.mark.parametrize(
    "version", [pytest.param(version, marks=[pytest.mark.slow] * (version != DRAWN)) for version in OTHERS]
)
def test_ordinary_calls_of_every_family_hold_in_its_interpreter(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_RETRIES", "1")
    try:
        folder = toolchain(version).folder
    except ToolError as error:
        pytest.skip(f"{error}: {error.hint}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    command = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == version
    families = set()
    for package in PACKAGES:
        only = ["*typical*", "schedule*"]
        results = verify_package(GENERATED / package, workers=1, targets=["sm90"], only=only)
        assert [str(error) for error in mismatches(results)] == []
        families |= {one.family for one in results}
    assert len(families) == 12
