"""`mlagen verify`: which cases an option picks, and options that pick none."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_specs import SPEC, WRITER, Run

pytestmark = pytest.mark.interpreter


def test_a_pattern_that_matches_no_case_is_refused_with_one_that_does(run: Run) -> None:
    result = run("verify", "--device", "cpu", "--only", "sparse_fwd")
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("--only")]
    assert line.startswith("--only: got sparse_fwd, which matches no case on cpu; takes patterns of whole names, ")
    assert "which begin with layout, " in line
    assert line.endswith("; did you mean '*sparse_fwd*'?")
    assert result.stdout == ""
    assert run("verify", "--device", "cpu", "--target", "sm80", "--only", "*sparse_fwd: typical*").exit_code == 0


def test_a_pattern_without_a_similar_name_has_no_advice(run: Run) -> None:
    result = run("verify", "--device", "cpu", "--only", "nothing*")
    assert result.exit_code == 2
    assert "did you mean" not in result.stderr


def test_of_several_specs_one_may_have_no_case_that_matches(run: Run, workspace: Path) -> None:
    (workspace / "specs" / "small.yaml").write_text(SPEC)
    (workspace / "specs" / "another.yaml").write_text(WRITER.replace("name: writer", "name: another"))
    result = run("verify", "--device", "cpu", "--target", "sm80", "--only", "sparse_fwd: typical*", "--json")
    assert result.exit_code == 0, result.stderr
    assert '"package": "small"' in result.stdout
    assert '"package": "another"' not in result.stdout


@pytest.mark.parametrize("seconds", ["0", "-5", "soon"])
def test_random_calls_take_a_time_above_zero(run: Run, seconds: str) -> None:
    result = run("verify", "--random", seconds)
    assert result.exit_code == 2
    assert "--random" in result.stderr


@pytest.mark.parametrize("option", [("--target", "sm80"), ("--markdown",)])
def test_random_calls_refuse_options_that_only_cases_have(run: Run, option: tuple[str, ...]) -> None:
    result = run("verify", "--random", "1", *option)
    assert result.exit_code == 2
    assert result.stderr == "--random takes no --target and no --markdown\n"
