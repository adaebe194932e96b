"""Commands that look: show, schema, explain, doctor."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import Run


def test_the_plan_is_shown_to_people_and_as_json(run: Run) -> None:
    assert "A small model" in run("show", "plan", "specs/small.yaml").stdout
    plan = json.loads(run("show", "plan", "specs/small.yaml", "--json").stdout)
    assert plan["d_qk"] == 48
    assert [target for target, _ in plan["sparse"]["tiles"]] == ["sm80", "gfx942"]


def test_the_layout_names_every_byte(run: Run) -> None:
    shown = run("show", "layout", "specs/small.yaml").stdout
    assert "96 bytes a token" in shown
    assert "[64, 96)" in shown


def test_the_schema_is_json(run: Run) -> None:
    assert json.loads(run("schema").stdout)["additionalProperties"] is False


def test_a_generated_line_is_traced_to_its_template(run: Run, workspace: Path) -> None:
    run("build", "--no-compile", "--no-verify")
    lines = (workspace / "generated" / "small" / "sparse_attention.py").read_text().split("\n")
    number = next(number for number, line in enumerate(lines, 1) if "_online_softmax(scores, m, l)" in line)
    explained = run("explain", f"generated/small/sparse_attention.py:{number}")
    assert explained.exit_code == 0
    assert "sparse_attention.py.jinja:" in explained.stdout
    assert "_online_softmax(scores, m, l)" in explained.stdout


def test_a_line_that_cannot_be_traced_says_why(run: Run, workspace: Path) -> None:
    run("build", "--no-compile", "--no-verify")
    path = "generated/small/sparse_attention.py"
    for place, why in ((f"{path}:1", "header"), (f"{path}:99999", "has lines 1 to"), (path, "takes FILE:LINE")):
        result = run("explain", place)
        assert result.exit_code == 2
        assert why in result.stderr
    edited = workspace / path
    edited.write_text(edited.read_text() + "# mine\n")
    assert "differs from what" in run("explain", f"{path}:10").stderr


def test_the_doctor_finds_this_machine_fit(run: Run) -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0
    assert {"python", "torch", "triton", "templates"} <= {check["what"] for check in json.loads(result.stdout)}


def test_tuning_without_a_gpu_says_so(run: Run) -> None:
    import torch

    if not torch.cuda.is_available():
        result = run("tune", "specs/small.yaml")
        assert result.exit_code == 2
        assert "GPU" in result.stderr
