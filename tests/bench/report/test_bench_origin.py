"""The origin of a run: found where it can be, shown in every report, never blank."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from mlagen.bench.report import origin as origins
from mlagen.bench.report.origin import Origin, checked_out, driver_version, origin
from mlagen.bench.report.page import page
from mlagen.bench.report.rows import Row
from mlagen.bench.report.saved import read_rows
from mlagen.bench.report.tables import conditions, markdown, to_json
from mlagen.errors import UsageError

Git = Callable[..., str]
KNOWN = {
    "driver": "580.95.05",
    "date": "2026-11-25",
    "commit": "0123456789ab",
    "peers": ("vllm 0.24.0", "flashinfer 0.7.1"),
}


@pytest.fixture
def dated(row: Row) -> Row:
    """A row that says all of its origin."""
    return replace(row, **KNOWN)


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Runs git in a folder, away from the settings of whoever runs the tests."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in ("AUTHOR_NAME", "AUTHOR_EMAIL", "COMMITTER_NAME", "COMMITTER_EMAIL"):
        monkeypatch.setenv(f"GIT_{name}", "a@example.org")

    def call(folder: Path, *words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return call


def test_reports_show_the_origin(dated: Row) -> None:
    first, _, _ = markdown([dated]).partition("\n")
    assert first == (
        "NVIDIA H200, torch 2.11.0, triton 3.6.0, driver 580.95.05. Measured on 2026-11-25 at commit 0123456789ab. "
        "Peers: vllm 0.24.0; flashinfer 0.7.1."
    )
    shown = page([dated], "x")
    for name, text in (("Driver", "580.95.05"), ("Date", "2026-11-25"), ("Commit", "0123456789ab")):
        assert f"<dt>{name}</dt>\n<dd>{text}</dd>" in shown
    assert "<dt>Peers</dt>\n<dd>vllm 0.24.0; flashinfer 0.7.1</dd>" in shown


def test_what_is_not_known_is_left_out_or_said_so_and_never_blank(row: Row) -> None:
    assert markdown([row]).startswith("NVIDIA H200, torch 2.11.0, triton 3.6.0.\n")
    shown = page([row], "x")
    for name in ("Driver", "Peers", "Date", "Commit"):
        assert f"<dt>{name}</dt>\n<dd>not recorded</dd>" in shown
    assert not re.search(r"<dd>\s*</dd>", shown)
    partly = replace(row, date="2026-11-25", peers=())
    assert markdown([partly]).partition("\n")[0].endswith("triton 3.6.0. Measured on 2026-11-25. Peers: none.")


def test_rows_of_several_runs_name_each_origin_once(dated: Row) -> None:
    other = replace(dated, date="2026-11-26", peers=("vllm 0.24.0",))
    said = conditions([dated, other, dated, replace(dated, peers=())])
    assert said["Date"] == "2026-11-25; 2026-11-26"
    assert said["Peers"] == "vllm 0.24.0; flashinfer 0.7.1"


def test_the_origin_is_written_and_read_again(dated: Row, tmp_path: Path) -> None:
    rows = [replace(dated, contenders=dated.contenders[:2]), replace(dated, contenders=dated.contenders[:2], peers=())]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([to_json(each) for each in rows]))
    assert read_rows(path) == rows


def test_the_driver_is_what_linux_says_of_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "SYSTEM", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version() is None
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia" / "version").write_text("580.95.05\n")
    assert driver_version() == "580.95.05"


def test_or_what_the_drivers_own_tool_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "SYSTEM", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = tmp_path / "nvidia-smi"
    for body, found in (("print('570.1\\n570.1')", "570.1"), ("raise SystemExit(9)", None), ("", None)):
        tool.write_text(f"#!{sys.executable}\n{body}\n")
        tool.chmod(0o755)
        assert driver_version() == found


def test_the_commit_is_that_of_the_checkout_and_says_if_files_differ(tmp_path: Path, git: Git) -> None:
    (tmp_path / "file").write_text("x")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "x")
    git(tmp_path, "tag", "v1")
    assert checked_out(tmp_path) == git(tmp_path, "rev-parse", "--short=12", "HEAD")
    (tmp_path / "file").write_text("y")
    assert checked_out(tmp_path) == f"{git(tmp_path, 'rev-parse', '--short=12', 'HEAD')}-dirty"


def test_an_installed_mlagen_takes_no_commit_from_the_checkout_around_it(tmp_path: Path, git: Git) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "x")
    inside = tmp_path / "venv" / "lib"
    inside.mkdir(parents=True)
    assert checked_out(inside) is None


def test_without_git_no_commit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checked_out() is None


def test_peers_are_shown_with_the_versions_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in origins.PEER_PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    assert origin().peer_versions() == ()
    flashinfer = ModuleType("flashinfer")
    flashinfer.__version__ = "0.7.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "seed_sparse", ModuleType("seed_sparse"))
    assert origin().peer_versions() == ("flashinfer 0.7.1", "seed_sparse of unknown version")
    assert origin(peers=["seed_sparse=0.24.0"]).peer_versions() == ("flashinfer 0.7.1", "seed_sparse 0.24.0")


def test_a_run_dates_itself() -> None:
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", origin().date)


def test_a_report_is_saved_with_its_whole_origin_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in origins.PEER_PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    whole = Origin("580.95.05", "2026-11-26", "0123456789ab")
    assert whole.complete(peers=True) is whole
    with pytest.raises(UsageError, match="driver"):
        replace(whole, driver=None).complete(peers=True)
    with pytest.raises(UsageError, match="--commit COMMIT"):
        replace(whole, commit=None).complete(peers=True)
    monkeypatch.setitem(sys.modules, "seed_sparse", ModuleType("seed_sparse"))
    assert whole.complete(peers=False) is whole
    with pytest.raises(UsageError, match="--peer seed_sparse=VERSION"):
        whole.complete(peers=True)
    known = replace(whole, peers={"seed_sparse": "0.24.0"})
    assert known.complete(peers=True) is known


@pytest.mark.parametrize("given", ["vllm", "vllm=", "pytorch=2.11"])
def test_a_peers_version_has_a_form(given: str) -> None:
    with pytest.raises(UsageError, match="takes NAME=VERSION, NAME one of vllm"):
        origin(peers=[given])


def test_a_commit_is_given_where_no_checkout_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "checked_out", lambda: None)
    assert origin("0123456789ab").commit == "0123456789ab"
    assert origin().commit is None
