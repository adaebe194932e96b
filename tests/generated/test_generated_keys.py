"""Triton's cache knows a kernel by one key, whichever kernel of its package is launched first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GENERATED = Path(__file__).parents[2] / "generated"


def keys(package: str, environment: dict[str, str]) -> list[dict[str, str]]:
    """The kernels' keys, asked for in the order of their names and in the reverse order."""
    command = [sys.executable, str(Path(__file__).with_name("keys.py")), str(GENERATED / package)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("package", ["dsv32", "dsv4_flash", "dsv3"])
def test_a_key_does_not_depend_on_earlier_launches(package: str) -> None:
    there, back = keys(package, {"TRITON_INTERPRET": "0"})
    assert len(there) > 3
    assert there == back
