"""Records of sm90 kernels: valid reports, the records they leave, and the commands that ask for them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlagen.cli import main
from mlagen.cli.record import require_recorded
from mlagen.emit import apply, compare, render
from mlagen.errors import UnprovedError, UsageError
from mlagen.plan import load_plan
from mlagen.verify.gpu_records import FILE, add_report, names_of, read_records, sm90_kernels, unrecorded
from mlagen.verify.random.report import file_hashes

SPEC = Path(__file__).resolve().parents[2] / "specs" / "dsv32.yaml"
ABOUT = {
    "card": "NVIDIA H100",
    "driver": "570",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "date": "2026-11-26",
    "commit": "c",
}


@pytest.fixture
def folder(tmp_path):
    """A folder of one package, and a report of its top-k."""
    apply(compare(render(load_plan(SPEC)), tmp_path / "generated" / "dsv32"))
    return tmp_path / "generated"


def _report(folder: Path, **changes: object) -> Path:
    kernels = {f"_topk_sm90:{name}": {"calls": 70, "wrong": 0, "seconds": 1.5} for name in _NAMES}
    packages = {"dsv32": {"files": file_hashes(folder / "dsv32"), "kernels": kernels}}
    cases = {"dsv32": {"passed": 9, "failed": 0, "skipped": 1}}
    report = {**ABOUT, "wrong": 0, "delays": False, "cases": cases, "packages": packages, **changes}
    path = folder.parent / "report.json"
    path.write_text(json.dumps(report))
    return path


_NAMES = ("_topk_sm90_kernel", "_topk_collect_sm90_kernel")


def test_a_report_is_recorded_under_the_content_of_its_kernels(folder):
    assert len(add_report(_report(folder), folder)) == 2
    records = read_records(folder / FILE)
    lines = (folder / FILE).read_text(encoding="utf-8").splitlines()[1:-1]
    assert [json.loads(f"{{{line.rstrip(',')}}}").popitem()[0] for line in lines] == sorted(records)
    kernels = {kernel.name: kernel for kernel in sm90_kernels(folder / "dsv32")}
    found = records[kernels["_topk_sm90_kernel"].key]
    assert (found.card, found.date, found.cases, found.calls, found.delayed_calls) == (
        "NVIDIA H100",
        "2026-11-26",
        9,
        70,
        0,
    )
    assert {one.module for one in unrecorded([folder / "dsv32"], records)} == {
        kernel.module for kernel in kernels.values() if kernel.name not in _NAMES
    }
    add_report(_report(folder, delays=True), folder)
    again = read_records(folder / FILE)[kernels["_topk_sm90_kernel"].key]
    assert (again.calls, again.delayed_calls, len(again.reports)) == (70, 70, 2)


def test_a_changed_kernel_loses_its_record_and_a_comment_does_not(folder):
    add_report(_report(folder), folder)
    path = folder / "dsv32" / "_topk_sm90.py"
    text = path.read_text()
    path.write_text(f"# A comment.\n{text}")
    assert "_topk_sm90" not in names_of(unrecorded([folder / "dsv32"], read_records(folder / FILE)))
    path.write_text(text.replace("_barrier(left)", "_barrier(left + 0)", 1))
    assert "_topk_sm90 (dsv32)" in names_of(unrecorded([folder / "dsv32"], read_records(folder / FILE)))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"wrong": 3}, UnprovedError, "3 calls or cases are wrong"),
        ({"cases": {"dsv32": {"passed": 1, "failed": 2}}}, UnprovedError, "2 calls or cases are wrong"),
        ({"card": "cpu"}, UsageError, "takes those of a GPU"),
        ({"packages": 3}, UsageError, "no report of random calls"),
    ],
)
def test_a_report_that_proves_nothing_is_refused(folder, changes, error, said):
    with pytest.raises(error, match=said):
        add_report(_report(folder, **changes), folder)
    assert not (folder / FILE).exists()


def test_a_report_of_another_text_or_counted_twice_is_refused(folder):
    report = _report(folder)
    add_report(report, folder)
    with pytest.raises(UsageError, match="is counted already"):
        add_report(report, folder)
    path = folder / "dsv32" / "topk.py"
    path.write_text(path.read_text() + "\n# More.\n")
    with pytest.raises(UnprovedError, match=r"another text of .*dsv32: topk\.py"):
        add_report(report, folder)


def test_the_commands_name_kernels_without_a_record(folder, monkeypatch):
    run = CliRunner().invoke
    report = _report(folder)
    done = run(main, ["record", str(report), "--out", str(folder)])
    assert done.exit_code == 0, done.output
    assert "2 sm90 kernels recorded" in done.output.replace("\n", " ")
    with pytest.raises(UnprovedError, match="without a GPU record for the present text") as missing:
        require_recorded([folder / "dsv32"])
    assert "_topk_sm90" not in str(missing.value)
    assert run(main, ["build", str(SPEC), "--release"]).exit_code == 2
    doctor = run(main, ["doctor", "--out", str(folder)])
    assert "gpu records" in doctor.output
