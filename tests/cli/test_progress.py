"""Long work says so where no bar is shown: the phase, how many of how many, now and then."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_specs import Run

from mlagen.cli import progress
from mlagen.cli.console import err
from mlagen.compile import installed

TASK = SimpleNamespace(kernel="_sort", target="sm90", cached=True)


def test_a_line_has_the_phase_and_the_number_of_tasks_that_are_done(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.stage("small: compile") as bar:
        assert bar.line() == "small: compile"
        bar.show("list variants")
        assert bar.line() == "small: compile: list variants"
        bar.expect([TASK] * 1200)
        bar.step(TASK)
        assert bar.line() == "small: compile: 1 of 1,200 done"


def test_lines_come_after_the_first_seconds_and_then_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(err, "print", lambda line, **_: shown.append(line))
    pauses: list[float] = []

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == 3

    with progress.stage("small: compile") as bar:
        progress.say(bar, wait)
    assert 0.0 <= pauses[0] <= progress.FIRST_LINE_S  # less if earlier stages printed nothing
    assert pauses[1:] == [progress.LINE_S] * 2
    assert shown[:2] == ["small: compile"] * 2


@pytest.mark.compilation
@pytest.mark.usefixtures("writer", "started")
def test_a_build_into_a_pipe_names_its_phases(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))  # else there is nothing to compile
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    result = run("build", "--no-verify", "--target", "sm80", "--json")
    title = f"writer: compile with triton {installed().version}"
    lines = result.stderr.splitlines()
    assert f"{title}: list variants" in lines
    assert {f"{title}: {number} of 2 done" for number in range(2)} & {line.partition(",")[0] for line in lines}
    assert "compile with" not in result.stdout
