"""Cases in numpy notice each wait, arrive, barrier and fence of the sm90 kernels that is left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from gluon_syncs import MODULES, REDUNDANT, mutants

from mlagen.verify.random.reached import REACHED

TOOL = Path(__file__).with_name("gluon_syncs.py")
ROOT = Path(__file__).parents[2]
NAMES = [f"{package}/{module}" for package, modules in MODULES.items() for module in modules]


def test_every_sm90_module_is_among_them():
    assert {name.partition("/")[2] for name in NAMES} == REACHED.keys()


def test_a_redundant_statement_exists_and_has_a_reason():
    known = {f"{package}/{sync.name}" for package, sync in mutants("*", "*")}
    listed = yaml.safe_load(REDUNDANT.read_text(encoding="utf-8"))
    assert sorted(listed.keys() - known) == []
    assert all(reason.strip() for reason in listed.values())


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize("name", NAMES)
def test_what_synchronises_a_kernel_is_missed(name):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(TOOL), "--modules", name]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
