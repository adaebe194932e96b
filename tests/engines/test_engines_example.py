"""What `examples/vllm` says of two runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vllm"


@pytest.fixture(scope="module")
def comparison() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_compare", EXAMPLE / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(tokens: list[int], *, shift: float = 0.0, lead: float = 1.0, plugin: bool = False) -> dict[str, Any]:
    sequence = {"tokens": tokens, "logprobs": [-1.0 + shift] * len(tokens), "leads": [lead] * len(tokens)}
    backend = "mlagen_vllm_dsv32.backend.Backend" if plugin else "vllm.Own"
    versions = {"vllm": "0", "torch": "0", "triton": "0"}
    found = {"device": "a GPU", "heads": 4, "ready": 1.0, "versions": versions, "backends": [backend]}
    return found | {"sequences": [sequence], "decides": "1 of 1", "rates": {"decode": 1.0, "prefill": 2.0}}


@pytest.mark.parametrize(
    ("ours", "holds"),
    [
        (run([1, 2, 3], plugin=True), True),
        (run([1, 2, 3], plugin=False), False),  # vLLM's own twice
        (run([1, 2, 3], shift=0.01, plugin=True), True),
        (run([1, 2, 3], shift=0.5, plugin=True), False),
        (run([1, 9, 9], plugin=True), False),  # where vLLM's token led by far
    ],
)
def test_runs_hold_if_they_part_by_no_more_than_bf16_does(
    comparison: ModuleType, ours: dict[str, Any], holds: bool
) -> None:
    assert comparison.compare(ours, run([1, 2, 3]), "dsv32")["holds"] is holds


def test_tokens_may_part_at_a_tie(comparison: ModuleType) -> None:
    found = comparison.compare(run([1, 9, 9], plugin=True), run([1, 2, 3], lead=0.001), "dsv32")
    assert found["holds"]
    assert found["equal"] == "0 of 1"


@pytest.mark.parametrize("failed", [False, True])
def test_report_tells_a_run_that_failed(tmp_path: Path, failed: bool) -> None:
    for who, plugin in (("vllm", False), ("mlagen", True)):
        (tmp_path / f"sparse-eager-{who}.log").touch()
        if not (failed and plugin):
            (tmp_path / f"sparse-eager-{who}.json").write_text(json.dumps(run([1, 2], plugin=plugin)))
    command = [sys.executable, str(EXAMPLE / "compare.py"), str(tmp_path), "sparse"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == int(failed), done.stderr
    assert done.stdout.rstrip("\n") == (tmp_path / "report.md").read_text().rstrip("\n")
    assert ("Failed: sparse, eager" in done.stdout) is failed


def test_scripts_are_well_formed() -> None:
    subprocess.run(["bash", "-n", str(EXAMPLE / "run")], check=True)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "engine.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert "sparse_fp8" in done.stdout
