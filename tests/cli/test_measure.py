"""`mlagen bench` on a machine without a GPU: reports of earlier runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_specs import Run

Rows = list[dict[str, Any]]

JSON = Path(__file__).with_name("older_run.json")  # of a version that said less of a run


@pytest.fixture
def rows() -> Rows:
    """Two rows of a run that says how far its rounds lie apart."""
    rows: Rows = json.loads(JSON.read_text())[:2]
    for contender in (each for row in rows for each in row["contenders"]):
        contender |= {"spread": 0.01, "ratio_spread": 0.01}
    return rows


def saved(folder: Path, name: str, rows: Rows) -> str:
    (folder / name).write_text(json.dumps(rows))
    return name


def test_an_earlier_run_is_shown_without_a_gpu(run: Run, workspace: Path) -> None:
    done = run("bench", "--from", os.fspath(JSON), "--markdown", "rows.md", "--html", "rows.html")
    assert done.exit_code == 0
    assert (workspace / "rows.md").read_text() == done.stdout
    assert done.stdout.startswith("NVIDIA H200.")
    page = (workspace / "rows.html").read_text()
    assert f"<code>mlagen bench --from {JSON} --markdown rows.md --html rows.html</code>" in page


def test_rows_round_trip(run: Run, workspace: Path) -> None:
    (workspace / "again.json").write_text(run("bench", "--from", os.fspath(JSON), "--json").stdout)
    again = run("bench", "--from", "again.json", "--json").stdout
    assert again == (workspace / "again.json").read_text()
    older, newer = json.loads(JSON.read_text()), json.loads(again)
    assert newer[0]["best_peer"] == "FA3 p1"
    for before, after in zip(older, newer, strict=True):
        assert after["shape"].items() >= before["shape"].items()
        assert after["roof_seconds"] == before["roof_seconds"]
        pairs = zip(before["contenders"], after["contenders"], strict=True)
        assert all(new.items() >= old.items() for old, new in pairs)
    assert run("bench", "--from", "again.json").stdout == run("bench", "--from", os.fspath(JSON)).stdout


def test_a_slowdown_is_an_honest_no(run: Run, workspace: Path, rows: Rows) -> None:
    then = saved(workspace, "then.json", rows)
    same = run("bench", "--from", then, "--against", then)
    assert (same.exit_code, "0 of 2 shapes slower than in then.json" in same.stderr) == (0, True)
    for contender in rows[1]["contenders"][1:]:
        contender["ratio"] *= 0.9
    now = saved(workspace, "now.json", rows)
    slower = run("bench", "--from", now, "--against", then, "--html", "page.html", "--markdown", "page.md")
    assert slower.exit_code == 1
    assert "1 of 2 shapes slower than in then.json" in slower.stderr
    for name in ("page.html", "page.md"):
        assert "1 of 2 shapes slower than in then.json" in (workspace / name).read_text()
    assert run("bench", "--from", then, "--against", now).exit_code == 0


def test_a_run_of_other_shapes_is_no_comparison(run: Run, workspace: Path, rows: Rows) -> None:
    other = saved(workspace, "other.json", [row | {"package": "glm5"} for row in rows])
    done = run("bench", "--from", os.fspath(JSON), "--against", other)
    assert done.exit_code == 2
    assert "other.json has no shape of this run" in done.stderr
    assert "| prefill | ours us |" in done.stdout


def test_a_run_that_cannot_be_judged_says_so(run: Run) -> None:
    done = run("bench", "--from", os.fspath(JSON), "--against", os.fspath(JSON))
    assert done.exit_code == 0
    assert "24 not judged" in done.stderr


def test_files_and_families_are_chosen(run: Run, workspace: Path, rows: Rows) -> None:
    other = saved(workspace, "other.json", [row | {"package": "glm5"} for row in rows])
    both = json.loads(run("bench", "--from", os.fspath(JSON), "--from", other, "--json").stdout)
    assert [row["package"] for row in both] == ["dsv32"] * 24 + ["glm5"] * 2
    found = json.loads(run("bench", "--from", os.fspath(JSON), "--only", "decode", "--json").stdout)
    assert {row["shape"]["family"] for row in found} == {"decode"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "takes SPEC, to measure it, or --from JSON"),
        (("specs/small.yaml", "--from", "x.json"), "takes SPEC, to measure it, or --from JSON"),
        (("--from", "x.json", "--no-peers"), "--from measures nothing"),
        (("--from", "x.json"), "x.json: cannot be read"),
        (("--from", os.fspath(JSON), "--only", "indices"), "no shapes of indices"),
        (("--from", os.fspath(JSON), "--against", "x.json"), "x.json: cannot be read"),
    ],
)
def test_wrong_usage_of_bench_gives_one_line(run: Run, arguments: tuple[str, ...], why: str) -> None:
    done = run("bench", *arguments)
    assert done.exit_code == 2
    assert why in done.stderr
    assert done.stdout == ""


def test_a_measurement_needs_a_gpu(run: Run) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert "benchmarks run on a GPU" in run("bench", "specs/small.yaml", "--no-peers").stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels run")
@pytest.mark.parametrize("command", ["verify", "build"])
def test_kernels_run_on_a_gpu_only_where_there_is_one(run: Run, command: str) -> None:
    done = run(command, "specs/small.yaml", "--device", "cuda")
    assert done.exit_code == 2
    assert done.stderr == "--device cuda: no CUDA or ROCm device; takes auto or cpu on this machine\n"
