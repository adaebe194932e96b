"""Verification notices at least 97 of 100 random faults that change anything."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from random_faults import FEWEST_NOTICED, GENERATED, PACKAGES, faults_of

TOOL = Path(__file__).with_name("random_faults.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_fault_changes_one_line_and_leaves_a_module_that_can_be_read(package: str) -> None:
    faults = faults_of(GENERATED / package)
    assert len(faults) > 200
    for fault in faults[::17]:
        source = (GENERATED / package / f"{fault.module}.py").read_text()
        broken = fault.apply(source)
        ast.parse(broken)
        pairs = zip(source.splitlines(), broken.splitlines(), strict=True)
        assert [number for number, (one, other) in enumerate(pairs, 1) if one != other] == [fault.line]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(TOOL), *arguments], env=env, capture_output=True, text=True, check=False)


@pytest.mark.mutants
def test_some_faults_are_noticed() -> None:
    done = run("odd", "--faults", "3", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr[-1000:]
    assert done.stdout.splitlines()[-2].split() == ["odd", "3", "3", "0", "0"]


@pytest.mark.slow
@pytest.mark.mutants
def test_most_of_a_hundred_faults_are_noticed() -> None:
    assert FEWEST_NOTICED == 0.97
    done = run("--faults", "20", "--seed", "1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
