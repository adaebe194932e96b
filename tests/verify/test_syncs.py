"""Synchronisation of the generated sm90 kernels: found, dropped and delayed, as text."""

import ast
import json
import shutil
from pathlib import Path

import pytest
from checked_in import package_of
from rotation import some

from mlagen.digest import kernels_of
from mlagen.verify.random.delays import HELPER, delayed, delayed_copies
from mlagen.verify.random.module import main as make_calls
from mlagen.verify.random.mutants import Outcome, main, table
from mlagen.verify.random.reached import REACHED, modules_of
from mlagen.verify.random.syncs import SYNCS, syncs_of, without

GENERATED = Path(__file__).resolve().parents[2] / "generated"
FILES = sorted({path.name: path for path in GENERATED.glob("*/_*_sm90*.py")}.values())


def _kernels(text: str) -> str:
    return "".join(ast.dump(function) for function in kernels_of(ast.parse(text)))


def test_every_module_of_sm90_kernels_is_reached():
    assert {path.stem for path in FILES} == REACHED.keys()


@pytest.mark.parametrize("path", some(FILES, 5), ids=lambda path: path.stem)
def test_each_sync_is_dropped_alone_and_delays_stand_before_all(path):
    text, syncs = path.read_text(), syncs_of(path)
    assert len({sync.name for sync in syncs}) == len(syncs)
    lines = text.splitlines()
    for sync in syncs:
        assert sync.call in lines[sync.line - 1]
        dropped = without(text, sync)
        changed = [number for number, line in enumerate(dropped.splitlines()) if line != lines[number]]
        assert changed
        assert set(changed) <= set(range(sync.line - 1, sync.end))
        assert _kernels(dropped) != _kernels(text)
        assert len(syncs_of(_written(path, dropped))) == len(syncs) - (sync.columns is None)
    late = delayed(text).removesuffix(HELPER).splitlines()
    assert [line for line in late if "_delay(" not in line] == lines
    for number, line in enumerate(late):
        if any(line.strip().startswith(f"{call}(") for call in SYNCS):
            assert late[number - 1].strip().startswith("_delay(")


def _written(path: Path, text: str) -> Path:
    copy = Path(_written.folder) / path.name  # type: ignore[attr-defined]
    copy.write_text(text)
    return copy


@pytest.fixture(autouse=True)
def _folder(tmp_path):
    _written.folder = tmp_path  # type: ignore[attr-defined]


def test_most_of_what_hopper_synchronises_by_is_found():
    names = {sync.call for path in FILES for sync in syncs_of(path)}
    assert {"mbarrier.wait", "mbarrier.expect", "_bar_sync", "_bar_arrive", "_barrier", "fence_async_shared"} <= names
    assert "warpgroup_mma_wait" in names


def test_a_package_without_sm90_kernels_stays_as_it_is(tmp_path):
    (copy,) = delayed_copies([package_of("own_layout")], tmp_path)
    for path in copy.glob("*.py"):
        assert path.read_text() == (package_of("own_layout") / path.name).read_text()


def test_a_table_names_survivors_and_leaves_redundant_ones_out():
    outcomes = {
        "_m:f:_barrier:1": Outcome("wrong"),
        "_m:f:_barrier:2": Outcome("hang"),
        "_m:f:_barrier:3": Outcome("survived"),
        "_m:f:fence_async_shared:1": Outcome("survived"),
        "_m: shapes": Outcome("shapes", shapes=[3]),
    }
    lines = list(table(outcomes, ["_m:f:fence_async_shared:1"]))
    assert lines[0] == "_m: 4 mutants, 1 redundant, 2 noticed (1 hang, 1 wrong)"
    assert lines[1] == "    survived: _m:f:_barrier:3"
    assert lines[-1] == "2 of 3 noticed: 66.7 %"


def test_names_of_mutants_are_listed_with_their_packages(capsys):
    assert main([str(package_of("dsv32")), "--list", "--modules", "_topk_sm90"]) == 0
    names = [line.partition("  #")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [f"dsv32/{sync.name}" for sync in syncs_of(package_of("dsv32") / "_topk_sm90.py")]


def test_the_first_package_that_holds_a_module_is_taken(tmp_path):
    for name in ("one", "two"):
        shutil.copytree(package_of("dsv32"), tmp_path / name)
    found = modules_of([tmp_path / "one", tmp_path / "two"], "_topk*")
    assert found == {"_topk_sm90": tmp_path / "one"}


def test_a_resumed_report_runs_only_what_it_lacks(tmp_path, capsys):
    report, redundant = tmp_path / "mutants.json", tmp_path / "redundant.yaml"
    names = [sync.name for sync in syncs_of(package_of("dsv32") / "_topk_sm90.py")]
    done = {f"dsv32/{name}": {"how": "wrong"} for name in names[1:]}
    report.write_text(json.dumps({"_topk_sm90: shapes": {"how": "shapes", "shapes": [0]}} | done))
    redundant.write_text(f"dsv32/{names[0]}: it orders nothing\n")
    options = ["--modules", "_topk_sm90", "--resume", "--report", str(report), "--redundant", str(redundant)]
    assert main([str(package_of("dsv32")), *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{len(done)} of {len(done)} noticed: 100.0 %"


def test_calls_of_a_module_that_a_package_lacks_are_refused(capsys):
    assert make_calls([str(package_of("dsv3")), "--module", "_topk_sm90"]) == 2
    assert capsys.readouterr().err.endswith("dsv3: no module _topk_sm90\n")
