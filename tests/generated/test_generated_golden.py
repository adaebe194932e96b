"""The checked-in packages follow from their specs, byte for byte, and are formatted like the rest of the repository."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from mlagen.emit import compare, render
from mlagen.plan import load_plan
from mlagen.proofs import NAME, Proofs, rendered_key

ROOT = Path(__file__).parents[2]
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
GENERATED = ROOT / "generated"
MODULES = sorted(GENERATED.glob("*/*.py"))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_package_equals_the_rendering_of_its_spec_and_proofs(path):
    plan = load_plan(path)
    tritons = Proofs(GENERATED).tritons(rendered_key(render(plan)))
    drifts = compare(render(plan, tritons), GENERATED / path.stem)
    told = "".join(f"{drift.path.relative_to(ROOT)}: {drift.kind}\n{drift.diff()[:2000]}" for drift in drifts)
    assert not drifts, f"fix with: mlagen build {path.relative_to(ROOT)}\n{told}"


def test_every_package_has_a_spec():
    packages = {path.name for path in GENERATED.iterdir() if path.is_dir() and path.name not in ("__pycache__", NAME)}
    assert packages == {path.stem for path in SPECS}


def test_packages_contain_only_python():
    strangers = [
        path
        for path in GENERATED.glob("*/*")
        if path.suffix != ".py" and path.parent.name != NAME and path.name != "__pycache__"
    ]
    assert strangers == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_module_imports_only_torch_triton_and_the_standard_library(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [] if node.level else [node.module or ""]
        else:
            continue
        roots = {name.partition(".")[0] for name in names}
        assert roots <= sys.stdlib_module_names | {"torch", "triton"}


@pytest.mark.parametrize("arguments", [["format", "--diff"], ["check", "--output-format=concise"]], ids=lambda a: a[0])
def test_ruff_finds_no_fault(arguments):
    assert MODULES
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "generated"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[:4000] + done.stderr
