"""The example of a decode step in vLLM: times from a trace, and the documents' figures from the reports."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "docs" / "vllm-step" / "h100"


@pytest.fixture(scope="module")
def step() -> ModuleType:
    """The example's module, which imports vLLM only to measure."""
    spec = importlib.util.spec_from_file_location("step", ROOT / "examples" / "vllm" / "step.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documents_have_the_figures_of_the_reports(step: ModuleType) -> None:
    lines = list(step.table(REPORTS))
    assert "\n".join(lines) in (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in lines[2:]:
        ratio = line.split("|")[-2].strip()
        assert f"{ratio} times" in readme


def test_time_is_of_kernels_of_attention_that_may_overlap_and_not_of_products(step: ModuleType) -> None:
    def kernel(name: str, number: int, at: float, us: float) -> list[dict[str, object]]:
        launch = {"cat": "cuda_driver", "name": "launch", "ts": number, "dur": 1, "args": {"correlation": number}}
        return [launch, {"cat": "kernel", "name": name, "ts": at, "dur": us, "args": {"correlation": number}}]

    operators = [
        {"cat": "cpu_op", "name": "vllm::sparse_attn_indexer", "ts": 0, "dur": 10},
        {"cat": "cpu_op", "name": "vllm::unified_mla_attention_with_output", "ts": 20, "dur": 10},
        {"cat": "cpu_op", "name": "aten::bmm", "ts": 25, "dur": 2},
    ]
    kernels = [
        *kernel("logits", 3, 100, 60),
        *kernel("topk", 4, 130, 60),  # begins under the one before
        *kernel("norm", 15, 300, 50),  # of no operator
        *kernel("attention", 22, 400, 30),
        *kernel("product", 26, 500, 90),
    ]
    found = step.read({"traceEvents": [*operators, *kernels]}, 1)
    assert found["parts"] == {"indexer": 30.0, "cache": 0.0, "attention": 10.0}  # of three layers
    assert found["us"] == 40.0
    assert sorted(found["kernels"]) == ["attention: attention", "indexer: logits", "indexer: topk"]


def test_reports_name_card_versions_and_commit() -> None:
    paths = [*REPORTS.glob("*.json")]
    assert paths
    for path in paths:
        report = json.loads(path.read_text(encoding="utf-8"))
        assert {"device", "vllm", "torch", "triton", "commit", "date", "rounds"} <= report.keys()
