"""Kernels hold under a Triton besides the pinned one: another one for each commit, all of them in the slow tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checked_in import package_of
from rotation import SEED

from mlagen.compile import installed, toolchain
from mlagen.errors import ToolError
from mlagen.plan.tritons import TRITONS
from mlagen.proofs.sources import OPS, family_names

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
PACKAGES = [package_of(name) for name in ("dsv4_flash", "dsv41", "dsv3", "glm53", "odd_prefill")]  # of all families
OTHERS = [version for version in TRITONS if version != installed().version]
DRAWN = OTHERS[SEED % len(OTHERS)]


@pytest.mark.parametrize(
    "version", [pytest.param(version, marks=[pytest.mark.slow] * (version != DRAWN)) for version in OTHERS]
)
def test_ordinary_calls_of_every_family_hold_in_its_interpreter(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_RETRIES", "1")
    try:
        folder = toolchain(version).folder
    except ToolError as error:
        pytest.skip(f"{error}: {error.hint}")
    script = Path(__file__).with_name("typical_calls.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run([sys.executable, script, *PACKAGES], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert (found["triton"], found["failed"]) == (version, [])
    assert {family for family, _ in found["ran"]} == set(family_names()) - {OPS}
    assert "sm90, simulated" in {target for _, target in found["ran"]}
