"""The default output of `mlagen build`: a line per target, family and file, every failure, and a bar on terminals."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_specs import WRITER, Run

from mlagen.cli.prove import Cases
from mlagen.compile import installed
from mlagen.plan import TARGETS
from mlagen.verify import CaseResult, Figure

pytestmark = pytest.mark.compilation

COMPILE_ONE = ("--no-verify", "--target", "sm80")


@pytest.fixture
def nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of sm80 get less than no shared memory once they are compiled; the plan does not know."""
    none = {**TARGETS, "sm80": replace(TARGETS["sm80"], shared_limit=-1)}
    monkeypatch.setattr("mlagen.compile.pool.TARGETS", none)


def test_each_target_has_a_line_and_each_written_file(run: Run, writer: Path) -> None:
    result = run("build", "--no-verify")
    title, header, *rows = result.stdout.splitlines()
    assert title == f"writer, compiled with Triton {installed().version}: the most that a variant takes"
    assert " ".join(header.split()) == "target kernels variants registers shared memory loop spills over a limit"
    assert [row.split()[:3] for row in rows[:2]] == [["sm80", "1", "2"], ["gfx942", "1", "2"]]
    assert [row.split()[-2:] for row in rows[:2]] == [["0", "-"]] * 2
    assert re.search(r" \d+ of 255 +\d+ % +0 of 166,912 +0 % ", rows[0])
    assert all(row.startswith("generated/writer/") for row in rows[2:])
    assert run("build", "--no-verify").stdout.splitlines() == [title, header, *rows[:2]]


def test_verbose_also_prints_every_variant(run: Run, writer: Path) -> None:
    plain, verbose = run("build", *COMPILE_ONE).stdout, run("build", *COMPILE_ONE, "-v").stdout
    assert "_write_kernel" not in plain
    assert verbose.count("_write_kernel") == 2
    assert "\nsm80 " in verbose


@pytest.mark.interpreter
def test_each_verified_family_has_a_line_and_verbose_each_group(run: Run, writer: Path) -> None:
    title, header, *rest = run("build", "--no-compile", "--device", "cpu").stdout.splitlines()
    assert title == "writer, verified"
    assert " ".join(header.split()) == "cases of run of failed skipped largest error, of its tolerance"
    (row,) = [row.split() for row in rest if not row.startswith("generated/")]
    assert row[0] == "cache"
    assert 0 < int(row[1]) < int(row[2])
    assert row[3:5] == ["0", "0"]
    verbose = run("build", "--no-compile", "--device", "cpu", "--verbose", "--all-cases").stdout
    assert "refuses " in verbose


@pytest.mark.usefixtures("nothing_fits")
def test_a_refusal_shows_its_cause_once_with_its_arithmetic_and_the_number_of_variants(run: Run, writer: Path) -> None:
    result = run("build", "--no-verify")
    assert result.exit_code == 1
    (refusal,) = (line for line in result.stderr.splitlines() if line.startswith("_cache_kernels._write_kernel ["))
    assert refusal.endswith("shared memory 0 bytes - limit -1 bytes = 1 bytes too many (2 variants)")
    assert result.stderr.count("fix with one of: ") == 1
    assert "generated/writer: 12 files, nothing written, errors above: 1; not compiled" in result.stderr
    assert not Path("generated").exists()


def test_a_failed_case_shows_in_its_family_and_in_a_line_of_its_own(
    run: Run, writer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = (Figure("out", 2.0, 0.5),)
    off = CaseResult("writer", "writer: bits", "sm80", False, None, figures, 0.1, "out is off by 2", "cache")
    passed = CaseResult("writer", "refuses: k", "sm80", True, None, (), 0.1, "", "cache")
    monkeypatch.setattr("mlagen.cli.prove.Prover.verify", lambda *_: Cases(results=[off, passed]))
    result = run("build", "--no-compile", "--device", "cpu")
    assert result.exit_code == 1
    assert [" ".join(row.split()) for row in result.stdout.splitlines()[2:]] == ["cache 2 1 0 400%"]
    assert result.stderr.splitlines() == [
        "writer: writer: bits, on sm80: out is off by 2",
        "generated/writer: 12 files, nothing written, errors above: 1; not compiled; 2 cases: 0 known before, 1 failed",
    ]
    assert not Path("generated").exists()


@pytest.mark.usefixtures("nothing_fits")
def test_several_specs_are_reported_one_after_another_and_counted(run: Run, writer: Path) -> None:
    (writer.parent / "other.yaml").write_text(WRITER.replace("name: writer", "name: other").replace("sm80, ", ""))
    result = run("build", "--no-verify")
    assert result.exit_code == 1
    assert result.stdout.startswith("other, compiled with")
    assert "generated/other/cache.py" in result.stdout.splitlines()
    assert "writer" not in result.stdout
    assert result.stderr.splitlines()[-1] == "2 packages: 1 written, 0 unchanged, 1 failed: writer"


@pytest.mark.usefixtures("nothing_fits")
def test_json_names_the_failures(run: Run, writer: Path) -> None:
    result = run("build", *COMPILE_ONE, "--json")
    assert result.exit_code == 1
    assert result.stdout.count('"_cache_kernels._write_kernel [') == 1


def on_terminal(*arguments: str) -> tuple[str, str]:
    """(stdout, stderr) of mlagen where stderr is a terminal of 100 columns and stdout a pipe."""
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "mlagen", *arguments]
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, env=environment) as process:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # Linux raises it once the other end is closed
            while read := os.read(leader, 1 << 16):
                shown += read
        os.close(leader)
        assert process.stdout is not None
        return process.stdout.read().decode(), shown.decode()


@pytest.mark.usefixtures("writer")
def test_a_terminal_shows_the_current_job_and_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))  # else there is nothing to compile
    out, err = on_terminal("build", *COMPILE_ONE)
    assert f"writer: compile with triton {installed().version}: sm80 _write_kernel" in err
    assert "2/2" in err
    assert " left" in err
    assert "\x1b" not in out
    assert "writer: compile" not in out


@pytest.mark.usefixtures("writer")
def test_a_pipe_shows_no_bar_even_where_it_gets_colours() -> None:
    command = [sys.executable, "-m", "mlagen", "build", *COMPILE_ONE]
    done = subprocess.run(command, env={**os.environ, "FORCE_COLOR": "1"}, capture_output=True, text=True, check=True)
    *lines, summary, command = done.stderr.splitlines()
    assert all(line.startswith(("render 1 package", "writer: compile with triton ")) for line in lines)
    assert "generated/writer: " in summary
    assert "verify with: mlagen verify specs/writer.yaml" in command
