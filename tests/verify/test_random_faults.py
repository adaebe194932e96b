"""Verification notices at least 97 of 100 random faults that change anything."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checked_in import package_of
from random_faults import FEWEST_NOTICED, PACKAGES, SM90, faults_of, harmless

from mlagen.verify.random.reached import REACHED

TOOL = Path(__file__).with_name("random_faults.py")
ROOT = Path(__file__).parents[2]


PLACES = [(package, None) for package in PACKAGES] + [(package, module) for module, package in SM90.items()]


@pytest.mark.parametrize(("package", "module"), PLACES)
def test_a_fault_changes_one_line_and_leaves_a_module_that_can_be_read(package: str, module: str | None) -> None:
    faults = faults_of(package_of(package), module)
    assert len(faults) > (200 if module is None else 80)
    assert module is None or {fault.module for fault in faults} == {module}
    for fault in faults[::17]:
        source = (package_of(package) / f"{fault.module}.py").read_text()
        broken = fault.apply(source)
        ast.parse(broken)
        pairs = zip(source.splitlines(), broken.splitlines(), strict=True)
        assert [number for number, (one, other) in enumerate(pairs, 1) if one != other] == [fault.line]


def test_every_sm90_module_is_broken() -> None:
    assert SM90.keys() == REACHED.keys()


def test_a_harmless_fault_is_one_that_can_be_put_into_a_package() -> None:
    known = {fault.key for package, module in PLACES for fault in faults_of(package_of(package), module)}
    assert sorted(harmless().keys() - known) == []


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(TOOL), *arguments], env=env, capture_output=True, text=True, check=False)


@pytest.mark.mutants
def test_some_faults_are_noticed() -> None:
    done = run("odd", "--faults", "2", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr[-1000:]
    assert done.stdout.splitlines()[-2].split() == ["odd", "2", "2", "0", "0"]


@pytest.mark.mutants
def test_some_faults_of_an_sm90_kernel_are_noticed() -> None:
    done = run("--sm90", "_topk_sm90", "--faults", "2", "--seed", "5")
    assert done.returncode == 0, done.stdout + done.stderr[-1000:]
    assert done.stdout.splitlines()[-2].split() == ["dsv32/_topk_sm90", "2", "2", "0", "0"]


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize("arguments", [("--faults", "20", "--seed", "1"), ("--faults", "7", "--seed", "1", "--sm90")])
def test_most_of_a_hundred_faults_are_noticed(arguments: tuple[str, ...]) -> None:
    assert FEWEST_NOTICED == 0.97
    done = run(*arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
