"""How `examples/vllm` runs an engine, and how it compares two runs."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vllm"
MODULES = ("plan", "loads", "engine", "compare")
PACKAGES = {"sparse": "dsv32", "dense": "dsv3", "v4": "dsv4_flash"}


@pytest.fixture(scope="module")
def example() -> Any:
    """The example's modules by name, as its own folder on the path gives them."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            del sys.modules[name]


@pytest.fixture(scope="module")
def comparison(example: dict[str, ModuleType]) -> ModuleType:
    return example["compare"]


def sequence(tokens: list[int], *, shift: float = 0.0, lead: float = 1.0) -> dict[str, Any]:
    return {"tokens": tokens, "logprobs": [-1.0 + shift] * len(tokens), "leads": [lead] * len(tokens)}


def run(
    tokens: list[int], *, shift: float = 0.0, lead: float = 1.0, plugin: bool = False, mode: str = "eager", **more: Any
) -> dict[str, Any]:
    backend = "mlagen_vllm_dsv32.backend.Backend" if plugin else "vllm.Own"
    versions = {"vllm": "0", "torch": "0", "triton": "0"}
    found = {"device": "a GPU", "heads": 4, "tp": 1, "dcp": 1, "ready": 1.0, "versions": versions, "kind": "sparse"}
    about = {"decides": "1 of 1", "rates": {"decode": 1.0, "prefill": 2.0}} if mode == "eager" else {}
    kept = {"sequences": [sequence(tokens, shift=shift, lead=lead)]} | about | more
    found |= {"who": "mlagen" if plugin else "vllm", "calls": {"pair": [7, 2]} if plugin else {}}
    return found | {"backends": [backend], "modes": {mode: kept}}


@pytest.mark.parametrize(
    ("ours", "holds"),
    [
        (run([1, 2, 3], plugin=True), True),
        (run([1, 2, 3], plugin=False), False),  # vLLM's own twice
        (run([1, 2, 3], shift=0.0029, plugin=True), True),
        (run([1, 2, 3], shift=0.0049, plugin=True), False),
        (run([1, 9, 9], plugin=True), False),  # where vLLM's token led by far
    ],
)
def test_runs_hold_if_they_part_by_no_more_than_bf16_does(
    comparison: ModuleType, ours: dict[str, Any], holds: bool
) -> None:
    assert comparison.compare("eager", ours, run([1, 2, 3]), "sparse")["holds"] is holds


def test_tokens_may_part_at_a_tie(comparison: ModuleType) -> None:
    found = comparison.compare("eager", run([1, 9, 9], plugin=True), run([1, 2, 3], lead=0.001), "sparse")
    assert found["holds"]
    assert found["equal"] == "0 of 1"


ALONE = {"requests": 2, "aborted": 1, "rate": 10.0}


@pytest.mark.parametrize(
    ("mode", "more", "holds"),
    [
        ("eager", {"decides": "1 of 1", "apart": {"C4A decode": [0.004, 1, 4], "window prefill": [0.01, 1, 4]}}, True),
        ("eager", {"decides": "1 of 1", "apart": {"C4A decode": [0.03, 1, 4], "window prefill": [0.01, 1, 4]}}, False),
        ("graphs", {"decides": "1 of 1", "steps": {"FULL": 5, "NONE": 2}}, True),
        ("graphs", {"decides": "1 of 1", "steps": {"NONE": 7}}, False),
        ("graphs", {"decides": "1 of 1", "steps": None}, True),
        ("mixed", {"steps": 9, "shared": 3}, True),
        ("mixed", {"steps": 9, "shared": 0}, False),
        ("prefix", {"cached": [[64, 64], [0, 0]]}, True),
        ("prefix", {"cached": [[64, 64], [0, 128]]}, False),
        ("speculative", {"steps": 9, "accepted": 4}, True),
        ("speculative", {"steps": 9, "accepted": 0}, False),
        ("load", ALONE | {"alone": [sequence([1, 2])]}, True),
        ("load", ALONE | {"alone": [sequence([1, 9])]}, False),
        ("load", ALONE | {"alone": [sequence([1, 2])], "aborted": 0}, False),
        ("invariant", {"alone": [sequence([1, 2])]}, True),
        ("invariant", {"alone": [sequence([1, 2], shift=1e-7)]}, False),
    ],
)
def test_a_load_passes_if_it_reached_its_states(
    comparison: ModuleType, mode: str, more: dict[str, Any], holds: bool
) -> None:
    ours, theirs = (run([1, 2], mode=mode, plugin=plugin, **more) for plugin in (True, False))
    assert comparison.compare(mode, ours, theirs, "sparse")["holds"] is holds


def test_report_tells_how_far_attention_itself_is_apart(comparison: ModuleType) -> None:
    one = {
        "decides": "1 of 1",
        "steps": {"NONE": 7},
        "apart": {"C4A decode": [0.0041, 1, 8], "window prefill": [0.003, 1, 24]},
    }
    words, holds = comparison.seen("eager", one)
    assert holds
    assert words.startswith("context decides 1 of 1; attention on the same inputs apart by 0.0041 at most (C4A decode)")
    assert words.endswith(", 0.2500 on average")
    assert comparison.seen("graphs", one | {"steps": {"FULL": 5, "NONE": 2}})[0].startswith(
        "context decides 1 of 1; 5 of 7 steps by a graph"
    )


@pytest.mark.parametrize(
    ("kind", "calls", "dcp", "said", "holds"),
    [
        ("sparse", {"pair": [2000, 21]}, 1, "q in two parts in 2,000 of 2,000 calls, 21 into graphs", True),
        ("sparse", {"pair": [7, 0], "whole": [1, 0]}, 1, "q in two parts in 7 of 8 calls, 0 into graphs", False),
        ("sparse", {}, 1, "q in two parts in 0 of 0 calls, 0 into graphs", False),
        ("dense", {"whole": [7, 0]}, 2, "q in two parts in 0 of 7 calls, 0 into graphs", True),
        ("sparse", {"whole": [7, 0], "merged": [1200, 8]}, 2, "merged by the package 1,200 times, 8 into graphs", True),
        ("v4", {"whole": [7, 0], "projected": [9, 3]}, 1, "output projected in float32 9 times, 3 into graphs", True),
        ("v4", {"whole": [7, 0]}, 1, "output projected in float32 0 times, 0 into graphs", False),
    ],
)
def test_calls_of_layers_match_their_model(
    comparison: ModuleType, kind: str, calls: dict[str, Any], dcp: int, said: str, holds: bool
) -> None:
    ours = run([1, 2], plugin=True) | {"calls": calls, "dcp": dcp}
    words, right = comparison.called(ours, kind)
    assert (words[-1].endswith(said), right) == (True, holds)
    theirs = run([1, 2]) | {"calls": {"projected": [9, 3]}}
    found = comparison.compare("eager", ours | {"backends": [f"mlagen_vllm_{PACKAGES[kind]}.b.C"]}, theirs, kind)
    assert said in found["seen"]
    assert found["holds"] is holds


def test_vllms_v4_projects_as_the_packages_does(comparison: ModuleType) -> None:
    calls = {"projected": [9, 3]}
    ours = run([1, 2], plugin=True) | {"calls": calls, "backends": ["mlagen_vllm_dsv4_flash.b.C"]}
    assert not comparison.compare("eager", ours, run([1, 2]), "v4")["holds"]
    assert comparison.compare("eager", ours, run([1, 2]) | {"calls": calls}, "v4")["holds"]


@pytest.mark.parametrize("failed", [False, True])
def test_report_tells_a_run_that_failed(tmp_path: Path, failed: bool) -> None:
    for who, plugin in (("vllm", False), ("mlagen", True)):
        if not (failed and plugin):
            (tmp_path / f"sparse-eager-{who}.json").write_text(json.dumps(run([1, 2], plugin=plugin)))
    done = report(tmp_path, "eager")
    assert done.returncode == int(failed), done.stderr
    assert done.stdout.rstrip("\n") == (tmp_path / "report.md").read_text().rstrip("\n")
    assert ("Failed: sparse, eager: mlagen: no result" in done.stdout) is failed


@pytest.mark.parametrize(
    ("theirs", "said"),
    [(2, "2 ranks that share 2 parts of a context; ready"), (1, "of a context, but not in sparse by vllm; ready")],
)
def test_report_tells_which_ranks_share_a_context(tmp_path: Path, theirs: int, said: str) -> None:
    for who, plugin, dcp in (("vllm", False, theirs), ("mlagen", True, 2)):
        found = run([1, 2], plugin=plugin) | {"tp": 2, "dcp": dcp, "calls": {"whole": [7, 0]}}
        (tmp_path / f"sparse-eager-{who}.json").write_text(json.dumps(found))
    done = report(tmp_path, "eager")
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout


def test_report_names_the_part_that_failed_and_keeps_the_others(tmp_path: Path) -> None:
    for who, plugin in (("vllm", False), ("mlagen", True)):
        found = run([1, 2], plugin=plugin, mode="mixed", steps=9, shared=3)
        found["modes"]["prefix"] = {"failed": "shared prefixes: ValueError: odd"} if plugin else {"sequences": []}
        (tmp_path / f"sparse-mixed-{who}.json").write_text(json.dumps(found))
    done = report(tmp_path, "mixed", "prefix")
    assert done.returncode == 1
    assert "| sparse, mixed | yes | 1 of 1 |" in done.stdout
    assert "Failed: sparse, prefix: mlagen: shared prefixes: ValueError: odd" in done.stdout


def report(folder: Path, *modes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "compare.py"), str(folder), "sparse", "--modes", *modes]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_failed_part_keeps_earlier_results(example: dict[str, ModuleType], tmp_path: Path) -> None:
    report = example["engine"].Report(tmp_path / "found.json", {"who": "mlagen"})
    report.part("graphs", "sequences", lambda: {"sequences": [1]})
    report.part("load", "alone", lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    report.part("load", "more", dict)
    kept = json.loads((tmp_path / "found.json").read_text())["modes"]
    assert kept["graphs"] == {"sequences": [1]}
    assert kept["load"]["failed"].startswith("alone: ZeroDivisionError")
    assert report.failed()


def test_every_mode_has_an_engine_and_those_that_measure_come_first(example: dict[str, ModuleType]) -> None:
    plan = example["plan"]
    assert set(plan.MODES.values()) == set(plan.ENGINES)
    assert tuple(plan.ENGINES)[: len(plan.MEASURED)] == plan.MEASURED


def place(folder: Path, fault: str = "") -> None:
    """A wheel of a package without kernels, and of a stand-in for vLLM with a fault before its next token."""
    vllm = Path(__file__).with_name("small_vllm.py").read_text()
    assert "# a fault stands here" in vllm
    files = {
        "mlagen_vllm_dsv3/__init__.py": "",
        "mlagen_vllm_dsv3/backend.py": "def flash_mla_with_kvcache(q): pass\n",
        "mlagen_vllm_dsv3/dsv3/__init__.py": "def warmup(device): pass\n",
        "vllm/__init__.py": vllm.replace("# a fault stands here", fault),
        "mlagen_vllm_dsv3-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: mlagen_vllm_dsv3\nVersion: 0\n",
        "mlagen_vllm_dsv3-0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "mlagen_vllm_dsv3-0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(folder / "mlagen_vllm_dsv3-0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


def start(folder: Path, *kinds: str, **chosen: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    places = {"PATH": path, "WHEELS": str(folder), "ENGINE": str(folder / "none"), "REPORT": str(folder / "report")}
    environment = os.environ | places | chosen
    command = [str(EXAMPLE / "run"), *kinds]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("modes", ["prefix invariant", pytest.param("", marks=pytest.mark.slow)])
def test_one_command_runs_every_mode_and_reports_refusals_of_vllm(tmp_path: Path, modes: str) -> None:
    place(tmp_path)
    done = start(tmp_path, "dense", MODES=modes)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    assert len(found["compared"]) == (len(modes.split()) or 8)
    assert found["failed"] == {}
    assert "16 of 16 bit-equal" in found["compared"]["dense, invariant"]["seen"]
    assert "ValueError: batch invariance not supported" in found["compared"]["dense, invariant"]["seen"]
    for one in found["compared"].values():
        pairs, calls = re.search(r"q in two parts in ([\d,]+) of ([\d,]+) calls", one["seen"]).groups()
        assert pairs == calls != "0"
    assert modes or found["compared"]["dense, load"]["equal"] == "180 of 180"


def test_differing_tokens_set_the_exit_code(tmp_path: Path) -> None:
    place(tmp_path, "tokens[0] += os.environ['VLLM_PLUGINS'] != 'none'")
    done = start(tmp_path, "dense", MODES="mixed")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "| dense, mixed | yes | 0 of 24 |" in done.stdout
    assert "| no |" in done.stdout


def test_wrong_options_of_a_run_give_one_line(tmp_path: Path) -> None:
    for kinds, chosen, said in (
        (["dense"], {"MODES": "fast"}, "MODES: got fast; takes eager graphs load"),
        (["v4", "dense"], {"DCP": "2"}, "DCP: got v4 dense; takes sparse, sparse_fp8 and dense: V4's"),
    ):
        done = start(tmp_path, *kinds, **chosen)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(said)


def test_scripts_are_well_formed() -> None:
    subprocess.run(["bash", "-n", str(EXAMPLE / "run")], check=True)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "engine.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert "sparse_fp8" in done.stdout
