"""Every command that mlagen prints behind "fix with:" is run where it is printed, and mends the fault."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_specs import WRITER, Run
from rotation import some

from mlagen import GENERATOR
from mlagen.emit.render import GENERATED

ROOT = Path(__file__).parents[2]
MODULE = Path("generated", "writer", "cache.py")
TEXT = ("--no-compile", "--no-verify")
CHECK = "mlagen build --check"

pytestmark = [pytest.mark.compilation, pytest.mark.interpreter]


@pytest.fixture
def shell(
    run: Run, writer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a line in a shell that knows the command `mlagen`, in a workspace of one spec with its package.

    A line with a single command of mlagen runs in this process, which has imported it.
    """
    command = tmp_path / "bin" / "mlagen"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} -m mlagen "$@"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")

    def call(line: str) -> subprocess.CompletedProcess:
        first, *words = shlex.split(line)
        if first == "mlagen" and "&&" not in words:
            done = run(*words)
            return subprocess.CompletedProcess(line, done.exit_code, done.stdout, done.stderr)
        return subprocess.run(line, shell=True, capture_output=True, text=True, check=False)

    assert call(f"mlagen build {' '.join(TEXT)}").returncode == 0
    return call


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_bytes().decode()
    assert old in text
    path.write_bytes(text.replace(old, new, 1).encode())


def whole(path: Path, old: str, new: str) -> None:
    path.write_bytes(path.read_bytes().decode().replace(old, new).encode())


def conflict() -> None:
    edit(MODULE, GENERATED, f"<<<<<<< HEAD\n{GENERATED}1 DO NOT EDIT.\n=======\n{GENERATED}")
    edit(MODULE, "\n# body ", "\n>>>>>>> other\n# body ")


def other_spec(mine: bool) -> None:
    """A spec is given up; in its package lies a file of the user's or none."""
    Path("specs", "gone.yaml").write_text(WRITER.replace("name: writer", "name: gone"))
    command = [sys.executable, "-m", "mlagen", "build", "specs/gone.yaml", *TEXT]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    Path("specs", "gone.yaml").unlink()
    if mine:
        Path("generated", "gone", "mine.py").write_text("import torch\n")


def foreign() -> None:
    MODULE.write_text("import torch\n")


# The fault, the command that then prints a fix, and words of its output.
CHECKED: dict[str, tuple[Callable[[], object], str, str]] = {
    "a file is lost": (MODULE.unlink, CHECK, "cache.py: missing"),
    "a spec changed": (
        lambda: edit(Path("specs", "writer.yaml"), "A small model", "Another model"),
        CHECK,
        "__init__.py: changed",
    ),
    "a file was edited": (lambda: edit(MODULE, "import", "# mine\nimport"), CHECK, "cache.py: edited"),
    "a merge left its markers": (conflict, CHECK, "cache.py: edited, merge-conflict markers in lines 1, 3, 5"),
    "git made CRLF of ends of lines": (lambda: whole(MODULE, "\n", "\r\n"), CHECK, "changed, its lines end with CRLF"),
    "a user's file has the name of a generated one": (foreign, CHECK, "cache.py: foreign"),
    "a spec is gone": (lambda: other_spec(mine=False), CHECK, "generated/gone: orphan, its spec is gone"),
    "a spec is gone, and a user's file is in its package": (
        lambda: other_spec(mine=True),
        CHECK,
        "generated/gone: orphan, its spec is gone",
    ),
    "the folder is another, with a space": (lambda: None, f"{CHECK} --out 'my kernels'", "cache.py: missing"),
    "kernels are compiled ahead of text that is not there": (
        MODULE.unlink,
        "mlagen build --cache kernels --target sm80",
        "kernels are compiled ahead from the text that is imported; for a package in another folder, pass its --out",
    ),
}
DOCTORED: dict[str, tuple[Callable[[], object], str]] = {
    "a package was not compiled": (lambda: None, "proved"),
    "a package was edited": (lambda: edit(MODULE, "import", "# mine\nimport"), "edited by hand: cache.py"),
    "a package is of another mlagen": (
        lambda: [whole(path, f"by {GENERATOR} ", "by mlagen 0.0.1 ") for path in MODULE.parent.glob("*.py")],
        "built by mlagen 0.0.1",
    ),
}
# Of each file, how often it says it, and where that is run or why not.
SAID = {
    "mlagen/cli/build.py": (
        3,
        "CHECKED; that a Triton is lost is only known where two are installed, from the network",
    ),
    "mlagen/cli/console.py": (1, "test_a_wheel_that_is_not_proved_is_so_after_its_fix"),
    "mlagen/cli/machine.py": (1, "what pip installs comes from the network"),
    "mlagen/cli/record.py": (1, "needs a GPU"),
    "mlagen/cli/show.py": (1, "DOCTORED; what pip installs comes from the network"),
    "mlagen/compile/toolchain.py": (2, "what pip installs comes from the network"),
    "mlagen/compile/resources.py": (
        1,
        "changes of a spec in words: tests/compile/test_resources.py holds each to a build",
    ),
}


def fix_of(done: subprocess.CompletedProcess) -> str:
    found = re.findall(r"fix with: (.*)", done.stdout + done.stderr)
    assert found, (done.stdout, done.stderr)
    return found[-1]


@pytest.mark.parametrize("what", some(CHECKED, 4))
def test_a_checks_fix_mends_what_it_found(shell, what: str) -> None:
    happen, command, words = CHECKED[what]
    happen()
    before = shell(command)
    assert before.returncode == 1
    assert words in before.stdout + before.stderr
    mended = shell(fix_of(before))
    assert mended.returncode == 0, mended.stderr
    after = shell(command)
    assert after.returncode == 0, after.stdout + after.stderr
    if "user's file has" in what:
        assert MODULE.with_name("cache.py.mine").read_text() == "import torch\n"
    if "user's file is" in what:
        assert [path.name for path in Path("generated", "gone").iterdir()] == ["mine.py"]


def test_without_a_spec_the_command_that_writes_one_is_enough(shell) -> None:
    Path("specs", "writer.yaml").unlink()
    Path("specs").rmdir()
    before = shell(CHECK)
    assert before.returncode == 2
    assert shell(before.stderr.rpartition("write one: ")[2]).returncode == 0
    after = shell(CHECK)
    assert after.returncode == 1
    assert after.stderr.endswith("mlagen build specs/dsv32.yaml\n")


@pytest.mark.parametrize("what", DOCTORED)
def test_doctors_fix_mends_what_it_found(shell, what: str) -> None:
    happen, words = DOCTORED[what]
    happen()
    before = shell("mlagen doctor")
    assert before.returncode == 1
    assert words in before.stdout
    mended = shell(fix_of(before))
    assert mended.returncode == 0, mended.stderr
    after = shell("mlagen doctor")
    assert after.returncode == 0, after.stdout + after.stderr
    assert "fix with" not in after.stdout


def test_a_build_that_ran_no_kernel_says_so_and_its_command_runs_them(shell) -> None:
    errors = shell(f"mlagen build {' '.join(TEXT)}").stderr
    command = errors.rpartition("verify with: ")[2]
    assert command == "mlagen verify specs/writer.yaml\n"
    assert "not verified" in errors
    assert shell(command).returncode == 0


def test_an_edited_file_is_overwritten_with_the_option_that_its_refusal_names(shell) -> None:
    edit(MODULE, "import", "# mine\nimport")
    edit(Path("specs", "writer.yaml"), "A small model", "Another model")
    refused = shell(f"mlagen build {' '.join(TEXT)}")
    assert refused.returncode == 1
    assert "overwrite it with --force" in refused.stderr
    assert shell(f"mlagen build --force {' '.join(TEXT)}").returncode == 0
    assert "# mine" not in MODULE.read_text()


@pytest.mark.slow
def test_a_wheel_that_is_not_proved_is_so_after_its_fix(shell) -> None:
    spec = (ROOT / "specs" / "dsv2_lite.yaml").read_text(encoding="utf-8")
    Path("specs", "dsv2_lite.yaml").write_text(re.sub(r"(?m)^targets: .*$", "targets: [sm80]", spec))
    command = "mlagen package specs/dsv2_lite.yaml --for vllm"
    assert "not proved" in (before := shell(command)).stderr
    assert shell(fix_of(before)).returncode == 0
    after = shell(command)
    assert after.returncode == 0
    assert "not proved" not in after.stderr


def test_every_fix_is_run_or_it_is_said_why_not() -> None:
    found = {}
    for path in [*ROOT.glob("mlagen/**/*.py"), *ROOT.glob("templates/**/*.jinja")]:
        number = len(re.findall(r"fix with(?: one of)?:", path.read_text(encoding="utf-8")))
        if number:
            found[str(path.relative_to(ROOT))] = number
    assert found == {name: number for name, (number, _) in SAID.items()}
