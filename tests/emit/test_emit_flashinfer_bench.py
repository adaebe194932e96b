"""Which definitions of FlashInfer-Bench the specs serve, and that their data sets never change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlagen.backends.engines.flashinfer_bench import definitions_of
from mlagen.emit.flashinfer_bench import trace_set
from mlagen.errors import UsageError
from mlagen.plan import load_plan

ROOT = Path(__file__).resolve().parents[2]
PAGED, RAGGED, SPARSE, INDEXER = "mla_paged", "mla_ragged", "dsa_sparse", "dsa_topk"
SERVED = {
    "ckv_kpe": {PAGED: 8},
    "dots3": {SPARSE: 2, INDEXER: 1},
    "dsv2_lite": {PAGED: 8},
    "dsv3": {PAGED: 8},
    "dsv3_prefill": {RAGGED: 2},
    "dsv3_prefill_tma": {RAGGED: 2},
    "dsv32": {SPARSE: 2, INDEXER: 1},
    "dsv32_fp8": {SPARSE: 2, INDEXER: 1},
    "glm5": {SPARSE: 2},  # 32 heads of the indexer, not 64
    "kimi_k2": {PAGED: 8},
    "kimi_k3": {PAGED: 8},
    "kimi_linear": {PAGED: 8},
    "mistral_large3": {PAGED: 8},
    "mistral_large4": {SPARSE: 2},  # 32 heads of the indexer
}


@pytest.mark.parametrize("path", sorted((ROOT / "specs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_spec_serves_these_definitions(path: Path) -> None:
    plan = load_plan(path)
    if path.stem not in SERVED:
        with pytest.raises(UsageError, match="serves no definition of flashinfer-bench; they need"):
            definitions_of(plan)
        return
    names = [one.name for one in definitions_of(plan)]
    counts = {start: sum(name.startswith(start) for name in names) for start in (PAGED, RAGGED, SPARSE, INDEXER)}
    assert {start: count for start, count in counts.items() if count} == SERVED[path.stem]


def test_heads_of_a_rank_divide_those_of_the_model(tmp_path: Path) -> None:
    text = (ROOT / "specs" / "dsv3.yaml").read_text()
    (tmp_path / "dsv3.yaml").write_text(text.replace("num_heads: 128", "num_heads: 120"))
    names = [one.name for one in definitions_of(load_plan(tmp_path / "dsv3.yaml"))]
    assert len(names) == 4
    assert all("_h8_" in name for name in names)


def test_a_window_serves_no_definition(tmp_path: Path) -> None:
    text = (ROOT / "specs" / "dsv3.yaml").read_text()
    (tmp_path / "dsv3.yaml").write_text(text.replace("  kind: dense\n", "  kind: dense\n  window: 128\n"))
    with pytest.raises(UsageError, match=r"^dsv3: serves no definition"):
        definitions_of(load_plan(tmp_path / "dsv3.yaml"))


def test_a_data_set_is_the_same_bytes_each_time() -> None:
    plan = load_plan(ROOT / "specs" / "dsv32.yaml")
    files = trace_set(plan)
    assert files == trace_set(plan)
    (text,) = (data for name, data in files.items() if name.startswith("solutions/") and "dsa_topk" in name)
    solution = json.loads(text)
    assert solution["spec"]["entry_point"] == "main.py::run"
    assert {"NVIDIA_A100", "NVIDIA_H100", "NVIDIA_B200", "AMD_MI300X"} <= {*solution["spec"]["target_hardware"]}
    assert solution["sources"][0]["path"] == "main.py"
    assert {"dsv32/__init__.py", "dsv32/indexer_select.py"} <= {source["path"] for source in solution["sources"]}
