"""Packages that are kept as diffs: no byte is lost, and a build writes the form that it finds."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from emit_specs import make_spec
from hypothesis import given
from hypothesis import strategies as st

from mlagen import diffs
from mlagen.emit import Package, apply, check_edits, compare, orphans, removable, render
from mlagen.errors import DriftError, ToolError, UsageError
from mlagen.plan import make_plan

LINE = st.sampled_from(["a\n", "b\n", "\n", "-- a\n", "++ b\n", "@@ -1 +1 @@\n", "    c = 1\n"])
TEXTS = st.dictionaries(st.sampled_from(["one.py", "two.py", "_three.py"]), st.lists(LINE, min_size=1).map("".join))


def package(name: str, **changes: object) -> Package:
    return render(make_plan(make_spec(name=name, targets=("sm90",), **changes)))


FIRST, SECOND = package("first"), package("second", lse_base="2")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder with a package, and another that is kept as a diff from it."""
    for one in (FIRST, SECOND):
        apply(compare(one, tmp_path / one.name))
    assert diffs.main(["first", str(tmp_path / "second")]) == 0
    return tmp_path


def texts_of(one: Package) -> dict[str, str]:
    return {file.name: file.text for file in one.files}


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@given(TEXTS, TEXTS)
def test_a_diff_gives_back_every_byte(tmp_path_factory: pytest.TempPathFactory, old: dict, new: dict) -> None:
    folder = tmp_path_factory.mktemp("out") / "first"
    folder.mkdir()
    for name, text in old.items():
        (folder / name).write_text(text)
    path = diffs.diff_of(folder.with_name("second"))
    path.write_text(diffs.diff_text("first", old, "second", new))
    assert diffs.base_of(path) == "first"
    assert diffs.unpack(path) == new


def test_the_folder_is_gone_and_the_diff_is_short(out: Path) -> None:
    assert sorted(path.name for path in out.iterdir()) == ["first", "second.diff"]
    assert len((out / "second.diff").read_text().splitlines()) < 200


def test_a_file_that_the_package_lacks_is_only_named(tmp_path: Path) -> None:
    for name, texts in (("first", {"a.py": "1\n2\n", "b.py": "3\n"}), ("second", {"b.py": "3\n", "c.py": "4\n"})):
        (tmp_path / name).mkdir()
        for file, text in texts.items():
            (tmp_path / name / file).write_text(text)
    assert diffs.main(["first", str(tmp_path / "second")]) == 0
    path = tmp_path / "second.diff"
    assert path.read_text().splitlines()[4:] == [
        "Only in first: a.py",
        "--- /dev/null",
        "+++ second/c.py",
        "@@ -0,0 +1 @@",
        "+4",
    ]
    assert diffs.unpack(path) == {"b.py": "3\n", "c.py": "4\n"}
    (tmp_path / "first" / "a.py").unlink()
    with pytest.raises(ToolError, match=r"second\.diff: does not fit .*first/a\.py"):
        diffs.unpack(path)


@pytest.mark.skipif(shutil.which("patch") is None, reason="no patch")
def test_patch_applies_a_diff(out: Path) -> None:
    command = ["patch", "-s", "-p1", "-i", str(out / "second.diff")]
    subprocess.run(command, cwd=out / "first", check=True)
    assert diffs.read_package(out / "first") == texts_of(SECOND)


def test_a_diff_is_written_as_a_package_and_read_as_one(out: Path, tmp_path: Path) -> None:
    assert diffs.main([str(out / "second.diff"), str(tmp_path / "elsewhere")]) == 0
    assert diffs.read_package(tmp_path / "elsewhere" / "second") == texts_of(SECOND)
    for name, one in (("first", FIRST), ("second", SECOND)):
        with diffs.whole(out / name) as folder:
            assert folder.name == name
            assert diffs.read_package(folder) == texts_of(one)


def test_a_diff_may_start_from_a_package_of_another_folder(out: Path) -> None:
    other = out / "other"
    apply(compare(SECOND, other / "second"))
    assert diffs.main(["../first", str(other / "second")]) == 0
    assert diffs.base_of(other / "second.diff") == "../first"
    assert (other / "second.diff").read_text().splitlines()[4].startswith("--- first/")
    assert compare(SECOND, other / "second") == []
    assert diffs.main(["nowhere/first", str(other / "second")]) == 2


def test_an_equal_package_is_no_drift_in_either_form(out: Path) -> None:
    assert [*compare(FIRST, out / "first"), *compare(SECOND, out / "second")] == []
    assert orphans(out, ["first", "second"]) == []


def test_a_changed_package_is_written_as_a_diff(out: Path) -> None:
    newer = package("second", lse_base="2", attn_sink="none")
    (drift,) = compare(newer, out / "second")
    assert (drift.path, drift.kind) == (out / "second.diff", "changed")
    assert apply([drift]) == [out / "second.diff"]
    assert compare(newer, out / "second") == []
    assert not (out / "second").exists()


def test_a_diff_is_stale_until_it_is_built_again_where_its_base_changed(out: Path) -> None:
    apply(compare(package("first", lse_base="2"), out / "first"))
    with pytest.raises(ToolError, match=r"second\.diff: does not fit .*first/"):
        diffs.unpack(out / "second.diff")
    drifts = compare(SECOND, out / "second")
    assert [drift.kind for drift in drifts] == ["changed"]
    apply(drifts)
    assert diffs.unpack(out / "second.diff") == texts_of(SECOND)


def test_a_diff_edited_by_hand_is_found_and_not_overwritten(out: Path) -> None:
    change(out / "second.diff", '"lse_base": "2"', '"lse_base": "3"')
    drifts = compare(SECOND, out / "second")
    assert [drift.kind for drift in drifts] == ["edited"]
    with pytest.raises(DriftError, match="edited by hand"):
        check_edits(drifts)
    apply(drifts, force=True)
    assert compare(SECOND, out / "second") == []


def test_a_command_that_needs_the_folder_names_the_one_that_writes_it(out: Path) -> None:
    kept = out / "second.diff"
    said = (
        f"{out / 'second'}: the package is kept as a diff; `python -m mlagen.diffs {kept} FOLDER` writes FOLDER/second"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        diffs.check_whole(out / "second")
    for there in ("first", "neither"):
        diffs.check_whole(out / there)
    diffs.write_whole(kept, out)
    diffs.check_whole(out / "second")


def test_a_diff_without_its_base_is_one_line(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(out / "first")
    with pytest.raises(UsageError, match="first: no such package, and a diff starts from it; build it first"):
        compare(SECOND, out / "second")
    assert diffs.main([str(out / "second.diff"), str(out)]) == 2
    assert diffs.main(["first"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == "takes BASE FOLDER, or FILE.diff DIR"


def test_a_diff_without_a_spec_and_a_folder_beside_its_diff_are_orphans(out: Path) -> None:
    (gone,) = orphans(out, ["first"])
    assert (gone.path, gone.note) == (out / "second.diff", "its spec is gone")
    assert removable(gone.path) == [gone.path]
    diffs.write_whole(out / "second.diff", out)
    (twice,) = orphans(out, ["first", "second"])
    assert (twice.path, twice.note) == (out / "second", "the package is kept as second.diff")
    assert removable(twice.path) == [twice.path]


def test_other_diffs_in_the_folder_are_the_users(out: Path) -> None:
    (out / "mine.diff").write_text("--- a\n+++ b\n")
    assert orphans(out, ["first", "second"]) == []
    third = dataclasses.replace(SECOND, name="mine")
    assert {drift.path.parent for drift in compare(third, out / "mine")} == {out / "mine"}
