"""flashinfer-bench takes the data sets that mlagen writes, and its references agree with the solutions on a CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from call_forms import ROOT
from rotation import some

from mlagen.backends.engines.flashinfer_bench import DEFINITIONS
from mlagen.emit.flashinfer_bench import trace_set, write_trace_set
from mlagen.plan import load_plan

SPECS = ("dsv3", "dsv3_prefill", "dsv32", "ckv_kpe", "base2")  # together they serve every definition
TOLERANCES = {"output": 0.02, "lse": 1e-4, "topk_indices": 0}  # of bf16 outputs up to 4
PROBE = Path(__file__).with_name("flashinfer_bench_calls.py")
NAMES = [one.name for one in DEFINITIONS]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer_bench") is None, reason="no flashinfer-bench: ./dev installs it"
)


def data_set(name: str, folder: Path) -> Path:
    """The data set of one of SPECS; `base2` is dsv32 with LSE in base 2 and -inf for an empty row."""
    path = ROOT / "specs" / f"{name}.yaml"
    if name == "base2":
        text = (ROOT / "specs" / "dsv32.yaml").read_text().replace("name: dsv32 ", "name: base2 ")
        text = text.replace("lse_base: e", "lse_base: '2'").replace("empty_row_lse: +inf", "empty_row_lse: -inf")
        path = folder / "base2.yaml"
        path.write_text(text)
    write_trace_set(trace_set(load_plan(path)), folder / name)
    return folder / name


def calls_of(data_set: Path, cache: Path) -> list[dict]:
    command = [sys.executable, PROBE, cache, data_set]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_its_schema_takes_every_file(tmp_path: Path) -> None:
    from flashinfer_bench.data import TraceSet

    found = [TraceSet.from_path(str(data_set(name, tmp_path))) for name in SPECS]
    assert {name for data in found for name in data.definitions} == {*NAMES}
    for data in found:
        assert {*data.definitions} == {*data.solutions} == {*data.workloads}
        for name, traces in data.workloads.items():
            variables = data.definitions[name].var_axes
            assert len(traces) == 3
            assert all([*trace.workload.axes] == variables for trace in traces)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", some(SPECS, 2))
def test_the_solutions_give_the_results_of_the_references(name: str, tmp_path: Path) -> None:
    root = data_set(name, tmp_path)
    calls = calls_of(root, tmp_path / "cache")
    served = {path.stem for path in (root / "definitions").rglob("*.json")}
    assert served
    wanted = {(each, case) for each in served for case in ("workload", "edges", *["few rows"] * ("_sparse_" in each))}
    assert {(call["definition"], call["case"]) for call in calls} == wanted
    for call in calls:
        assert all(error <= TOLERANCES[output] for output, error in call["errors"].items()), call
