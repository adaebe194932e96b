"""Shell completion, with click's own scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlagen.cli import main
from mlagen.plan import TARGETS

SHELLS = ("bash", "zsh", "fish")


def asked(instruction: str, **environment: str) -> str:
    """The output of mlagen for a shell."""
    variables = {"_MLAGEN_COMPLETE": instruction, **environment}
    done = CliRunner().invoke(main, [], env=variables, prog_name="mlagen")
    assert done.exit_code == 0
    return done.stdout


def completed(line: str, shell: str = "bash") -> list[str]:
    """The completions of the last word of a line."""
    words = line.split(" ")
    if shell == "fish":
        environment = {"COMP_WORDS": line, "COMP_CWORD": words[-1]}
    else:
        environment = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    found = asked(f"{shell}_complete", **environment).splitlines()
    if shell == "bash":
        return [each.removeprefix("plain,") for each in found]
    if shell == "zsh":
        return found[1::3]
    return [each.removeprefix("plain,").partition("\t")[0] for each in found]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_is_printed(shell: str) -> None:
    script = asked(f"{shell}_source")
    assert "_mlagen_completion" in script
    assert f"_MLAGEN_COMPLETE={shell}_complete" in script


@pytest.mark.parametrize("shell", SHELLS)
def test_a_command_is_completed(shell: str) -> None:
    assert completed("mlagen bu", shell) == ["build"]


@pytest.mark.parametrize("shell", SHELLS)
def test_specs_are_offered_from_here_and_a_folder_further(workspace: Path, shell: str) -> None:
    (workspace / "specs" / "schema.json").touch()
    (workspace / "specs" / "tuned").mkdir()
    (workspace / "specs" / "tuned" / "other.yaml").touch()
    (workspace / ".hidden.yaml").touch()
    (workspace / "mine.yaml").touch()
    assert completed("mlagen build ", shell) == ["mine.yaml", "specs/small.yaml"]
    assert completed("mlagen build sp", shell) == ["specs/small.yaml"]
    assert completed("mlagen build specs/s", shell) == ["specs/small.yaml"]
    assert completed("mlagen build specs/", shell) == ["specs/small.yaml", "specs/tuned/other.yaml"]
    assert completed(f"mlagen build {workspace}/m", shell) == [f"{workspace}/mine.yaml"]


@pytest.mark.parametrize("command", ["build", "verify", "show plan", "show layout", "tune", "bench"])
def test_every_command_that_takes_a_spec_offers_them(workspace: Path, command: str) -> None:
    assert completed(f"mlagen {command} ") == ["specs/small.yaml"]


def test_where_no_spec_fits_the_shell_offers_files_itself(workspace: Path) -> None:
    (workspace / "locked").mkdir(mode=0o000)
    assert completed("mlagen build nothing/") == ["file,nothing/"]
    assert completed("mlagen build locked/") == ["file,locked/"]


@pytest.mark.parametrize("command", ["build", "verify"])
def test_targets_are_offered(command: str) -> None:
    assert completed(f"mlagen {command} --target ") == list(TARGETS)
    assert completed(f"mlagen {command} --target gfx") == [name for name in TARGETS if name.startswith("gfx")]


@pytest.mark.thorough
def test_bash_itself_completes(workspace: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    command = workspace / "bin" / "mlagen"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom mlagen.cli import main\nmain(prog_name='mlagen')\n")
    command.chmod(0o755)
    script = f"""
        PATH={command.parent}:$PATH
        eval "$(_MLAGEN_COMPLETE=bash_source mlagen)"
        COMP_WORDS=(mlagen build specs/s) COMP_CWORD=2
        _mlagen_completion mlagen
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run([bash, "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "specs/small.yaml\n"
