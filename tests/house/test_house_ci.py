"""The pre-commit hook and the GitHub Action run existing commands, and fail on drift."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from checked_in import GOLDEN, spec_of
from test_house_docs import parse

import mlagen
from mlagen.cli import main

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
UNNEEDED = {"numpy", "torch", "triton"}  # by `build --check`


def loaded(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def scripts() -> list[str]:
    return [step["run"] for step in loaded("action.yml")["runs"]["steps"] if "run" in step]


def test_the_hook_runs_a_command_that_exists_with_its_options() -> None:
    (hook,) = loaded(".pre-commit-hooks.yaml")
    command, *words = shlex.split(hook["entry"])
    assert command == "mlagen"
    parse(main, words)
    assert words == ["build", "--check"]
    assert hook["pass_filenames"] is False
    assert f"id: {hook['id']}" in GUIDE


@pytest.mark.parametrize(
    ("path", "matters"),
    [("specs/a.yaml", True), ("specs/tuned/a/sm90.yaml", True), ("generated/a/cache.py", True), ("docs/a.md", False)],
)
def test_the_hook_runs_when_specs_or_packages_change(path: str, matters: bool) -> None:
    (hook,) = loaded(".pre-commit-hooks.yaml")
    assert bool(re.search(hook["files"], path)) == matters


def test_the_action_runs_a_command_that_exists_with_its_options() -> None:
    lines = [line for script in scripts() for line in script.splitlines() if line.startswith("mlagen ")]
    assert len(lines) == 1
    parse(main, shlex.split(lines[0])[1:])
    assert "--check" in lines[0]


def test_the_action_uses_each_of_its_inputs_and_no_other() -> None:
    action = loaded("action.yml")
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(action["inputs"])
    for name, given in action["inputs"].items():
        assert given["description"].endswith(".")
        assert isinstance(given["default"], str)
        assert f"| `{name}` |" in GUIDE
    # An input in a script's text would run as a part of it.
    assert not any("${{" in script for script in scripts())


def test_the_action_installs_the_checks_requirements_at_the_packages_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [each for each in project["dependencies"] if re.split(r"[<>=]", each)[0] not in UNNEEDED]
    for text in (scripts()[0], GUIDE):
        (line,) = (line for line in text.splitlines() if "'click" in line)
        assert re.findall(r"'([^']+)'", line) == needed


def test_the_guide_names_this_version() -> None:
    versions = re.findall(r"mlagen-(\d+\.\d+\.\d+)", GUIDE)
    assert versions == [mlagen.__version__]


def test_the_guide_shows_forms_that_exist() -> None:
    hook, action = (
        yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    )
    (shown,) = hook["repos"][0]["hooks"]
    (published,) = loaded(".pre-commit-hooks.yaml")
    assert hook["repos"][0]["repo"] == "local"
    assert {name: shown[name] for name in shown if name != "language"} == {
        name: published[name] for name in shown if name != "language"
    }
    (folder,) = re.findall(r"git submodule add \S+ (\S+)", GUIDE)
    used = [step["uses"] for step in action["jobs"]["kernels"]["steps"]]
    assert used == ["actions/checkout@v5", f"./{folder}"]


CHECK = f"""#!{sys.executable}
import sys
import importlib.metadata
known = importlib.metadata.version
def version(name):
    if name in {sorted(UNNEEDED)!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.version = version
for name in {sorted(UNNEEDED)!r}:
    sys.modules[name] = None  # an import of it fails
from mlagen.cli import main
main(prog_name="mlagen")
"""


@pytest.mark.thorough
def test_the_actions_check_tells_drift_without_torch(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "mlagen"
    command.parent.mkdir()
    command.write_text(CHECK)
    command.chmod(0o755)
    (tmp_path / "specs").mkdir()
    for name in ("odd", "odd_fp8"):
        (tmp_path / "specs" / f"{name}.yaml").write_bytes(spec_of(name).read_bytes())

    def check(specs: str, out: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", scripts()[-1]],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "SPECS": specs, "OUT": str(out)},
            capture_output=True,
            text=True,
            check=False,
        )

    assert check("specs/odd.yaml specs/odd_f*.yaml", GOLDEN).returncode == 0
    drifted = check("", tmp_path / "generated")
    assert drifted.returncode == 1, drifted.stderr
    assert "fix with: mlagen build --out" in drifted.stderr
