"""The checked-in packages follow from their specs, byte for byte, and are formatted like the rest of the repository."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys

import pytest
from checked_in import FOLDERS, PACKAGES, ROOT, SPECS, key_of

from mlagen import diffs
from mlagen.emit import compare, render
from mlagen.plan import load_plan
from mlagen.proofs import NAME, Proofs

MODULES = [path for package in PACKAGES for path in sorted(package.glob("*.py"))]


proofs = functools.cache(Proofs)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_package_equals_the_rendering_of_its_spec_and_proofs(path, shared):
    plan, folder = load_plan(path), FOLDERS[path.parent]
    tritons = proofs(folder).tritons(key_of(path.stem, shared))
    drifts = compare(render(plan, tritons), folder / path.stem)
    report = "".join(f"{drift.path.relative_to(ROOT)}: {drift.kind}\n{drift.diff()[:2000]}" for drift in drifts)
    assert not drifts, f"fix with: mlagen build {path.relative_to(ROOT)} --out {folder.relative_to(ROOT)}\n{report}"


@pytest.mark.parametrize("specs", FOLDERS, ids=lambda path: path.name)
def test_every_package_has_a_spec_and_one_form(specs):
    found = [path.stem for path in FOLDERS[specs].iterdir() if path.is_dir() or path.suffix == diffs.SUFFIX]
    assert sorted(set(found) - {"__pycache__"}) == sorted([NAME, *(path.stem for path in specs.glob("*.yaml"))])
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    "path", [path for folder in FOLDERS.values() for path in sorted(folder.glob("*.diff"))], ids=lambda path: path.stem
)
def test_a_diff_is_less_than_a_third_of_its_package(path):
    lines = sum(text.count("\n") for text in diffs.unpack(path).values())
    assert 3 * path.read_text(encoding="utf-8").count("\n") < lines


def test_packages_contain_only_python():
    strangers = [
        path
        for folder in FOLDERS.values()
        for path in folder.glob("*/*")
        if path.suffix != ".py" and path.parent.name != NAME and path.name != "__pycache__"
    ]
    assert strangers == []


def roots_of(text):
    """The top-level modules that a module imports from outside its package."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [] if node.level else [node.module or ""]
        else:
            continue
        found |= {name.partition(".")[0] for name in names}
    return found


@pytest.mark.thorough
def test_modules_import_only_torch_triton_and_the_standard_library():
    wrong = {}
    for text, path in {path.read_text(encoding="utf-8"): path for path in MODULES}.items():
        if strangers := roots_of(text) - sys.stdlib_module_names - {"torch", "triton"}:
            wrong[f"{path.parent.name}/{path.name}"] = strangers
    assert wrong == {}


@pytest.mark.parametrize("arguments", [["format", "--diff"], ["check", "--output-format=concise"]], ids=lambda a: a[0])
def test_ruff_finds_no_fault(arguments):
    assert MODULES
    folders = [str(folder.relative_to(ROOT)) for folder in FOLDERS.values()]
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[:4000] + done.stderr
