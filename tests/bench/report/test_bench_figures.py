"""Figures in documents are those of the reports, and reports say all that a figure needs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from checked_in import package_of

from mlagen.bench import load_package, shapes_of
from mlagen.bench.package import kernels_digest
from mlagen.bench.report.figures import BEGIN, END, NO_ROWS, Documents, main
from mlagen.bench.report.rows import Contender, Row
from mlagen.bench.report.tables import to_json
from mlagen.errors import UsageError

ROOT = Path(__file__).parents[3]
WHOLE = {"driver": "580.95.05", "date": "2026-11-26", "commit": "0123456789ab", "peers": ("vllm 0.24.0",)}
CHOSEN = """
- kernel: "[sparse_fwd](sparse_fwd.md), decode"
  package: dsv32
  shapes: ["decode 1 x h16, kv 128K, topk 2048", "decode 128 x h16, kv 128K, topk 2048"]
  readme: {"decode 1 x h16, kv 128K, topk 2048": sparse decode}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with documents that have a block of each kind, and a package's kernels."""
    for folder in ("docs/performance", "docs/benchmarks", "generated/dsv32"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs/benchmarks/chosen.yaml").write_text(CHOSEN)
    for path, names in (
        ("README.md", ["picture speed"]),
        ("docs/performance/README.md", ["summary", "slower"]),
        ("docs/performance/sparse_fwd.md", ["rows dsv32 decode", "picture roofline sparse_fwd dsv32/decode"]),
        ("docs/benchmarks/README.md", ["reports"]),
    ):
        blocks = "\n\n".join(f"<!-- figures: {name} -->\nold\n{END}" for name in names)
        (tmp_path / path).write_text(f"# Title\n\n{blocks}\n\nThe end.\n")
    (tmp_path / "generated/dsv32/sparse_fwd.py").write_text("from . import _kernels\n")
    (tmp_path / "generated/dsv32/_kernels.py").write_text("@triton.jit\ndef kernel():\n    pass\n")
    return tmp_path


@pytest.fixture
def rows(row: Row, checkout: Path) -> list[Row]:
    """A decode that is also timed behind another kernel, and a long one that is slower than a peer."""
    kernels = kernels_digest(checkout / "generated/dsv32", ["sparse_fwd"])
    ours = replace(row.ours, behind_seconds=9e-6, behind_ratio=1.0, behind_spread=0.0)
    peer = replace(row.contenders[1], behind_seconds=18e-6, behind_ratio=2.0, behind_spread=0.02)
    short = replace(row, device="NVIDIA H100 80GB HBM3", contenders=(ours, peer), kernels=kernels, **WHOLE)
    slower = (Contender("ours", 300e-6, 1.0, "graph", error=1e-3), Contender("FlashMLA", 270e-6, 0.9, "graph"))
    return [short, replace(short, shape=replace(row.shape, tokens=128), contenders=slower)]  # type: ignore[type-var]


def save(checkout: Path, name: str, rows: Sequence[Row]) -> None:
    (checkout / "docs/benchmarks" / name).write_text(json.dumps([to_json(row) for row in rows]))


def text(checkout: Path, path: str) -> str:
    return (checkout / path).read_text(encoding="utf-8")


def test_blocks_are_written_once_and_nothing_else_is(checkout: Path, rows: list[Row]) -> None:
    save(checkout, "h100-dsv32.json", rows)
    assert main(["--root", str(checkout), "--check"]) == 1
    assert "old" in text(checkout, "README.md")
    assert main(["--root", str(checkout)]) == 0
    assert main(["--root", str(checkout), "--check"]) == 0
    said = text(checkout, "README.md")
    assert said.startswith("# Title\n\n<!-- figures: picture speed -->\n\n![Speed against the best peer on H100, ")
    assert said.endswith(f"\n\n{END}\n\nThe end.\n")
    assert "old" not in said


def test_the_time_behind_another_kernel_is_quoted_and_the_other_shown(checkout: Path, rows: list[Row]) -> None:
    save(checkout, "h100-dsv32.json", rows)
    main(["--root", str(checkout)])
    assert "sparse decode 2.00](docs/pictures/speed.svg)" in text(checkout, "README.md")
    shown = text(checkout, "docs/performance/sparse_fwd.md")
    assert "| 1 x h16, kv 128K, topk 2048 | 9.0 | vLLM Triton 18.0 | 2.00 | 8.0, 2.41 |" in shown
    assert "| 128 x h16, kv 128K, topk 2048 | 300 | FlashMLA 270 | **0.90** | – |" in shown
    summary = text(checkout, "docs/performance/README.md")
    assert "On an H100, 1 of 2 rows with a peer are slower" in summary
    assert "| `dsv32`, decode | 1 of 2 | 0.90 | 128 x h16, kv 128K, topk 2048 |" in summary


def test_cards_stand_side_by_side(checkout: Path, rows: list[Row]) -> None:
    save(checkout, "h100-dsv32.json", rows)
    save(checkout, "h200-dsv32.json", [replace(rows[0], device="NVIDIA H200")])
    main(["--root", str(checkout)])
    assert "Speed against the best peer: H100, H200<" in text(checkout, "docs/pictures/speed.svg")
    shown = text(checkout, "docs/performance/sparse_fwd.md")
    assert "| `dsv32`, decode | H100 us | best peer | ratio | repeated: us, ratio |" in shown
    assert "| H200 us |" in shown
    (long,) = [line for line in shown.splitlines() if line.startswith("| 128 x h16")]
    assert long.endswith("| – | – | – | – | – | – | – |")


def test_packages_share_a_table_of_the_rows_that_match(checkout: Path, rows: list[Row]) -> None:
    save(checkout, "h100-dsv32.json", rows)
    save(checkout, "h100-dsv3.json", [replace(row, package="dsv3") for row in rows])
    (checkout / "generated/dsv3").symlink_to(checkout / "generated/dsv32")
    page = checkout / "docs/performance/sparse_fwd.md"
    page.write_text(f"<!-- figures: rows dsv32,dsv3,dsv41 decode *?128?x* -->\n{END}\n")
    main(["--root", str(checkout)])
    table = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert table[0].startswith("| package: decode | H100 us | best peer | ratio |")
    assert [line.split(" | ")[0] for line in table[2:]] == [
        "| `dsv32`: 128 x h16, kv 128K, topk 2048",
        "| `dsv3`: 128 x h16, kv 128K, topk 2048",
    ]


def test_a_picture_shows_what_is_slower_and_is_drawn_from_its_rows(checkout: Path, rows: list[Row]) -> None:
    save(checkout, "h100-dsv32.json", rows)
    main(["--root", str(checkout)])
    speed = text(checkout, "docs/pictures/speed.svg")
    assert 'font-weight="bold">2.00</text>' in speed
    assert 'class="orange"' not in speed
    chosen = checkout / "docs/benchmarks/chosen.yaml"
    chosen.write_text(CHOSEN.replace('readme: {"decode 1 x', 'readme: {"decode 128 x'))
    assert main(["--root", str(checkout), "--check"]) == 1
    main(["--root", str(checkout)])
    slower = text(checkout, "docs/pictures/speed.svg")
    assert re.search(r'class="orange"[^>]*>0\.90</text>', slower)
    assert ">128 x h16, kv 128K, topk 2048</text>" in slower
    roofline = ElementTree.fromstring(text(checkout, "docs/pictures/roofline-sparse_fwd.svg"))
    assert len(roofline.findall(".//{*}circle[@cx]")) == 2 * len(rows) + 2  # both kernels at each shape, and a legend
    assert "](../pictures/roofline-sparse_fwd.svg)" in text(checkout, "docs/performance/sparse_fwd.md")


def test_an_unknown_picture_is_refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "README.md").write_text(f"<!-- figures: picture cat -->\n{END}\n")
    assert main(["--root", str(checkout)]) == 2
    assert "picture cat: takes speed, roofline, layouts, pipeline, seesaw" in capsys.readouterr().err


def test_every_picture_is_drawn_by_a_block() -> None:
    documents = Documents(ROOT)
    documents.files()
    assert sorted((ROOT / "docs/pictures").iterdir()) == sorted(documents.drawn)


def test_rows_of_kernels_that_changed_are_listed(checkout: Path, rows: list[Row]) -> None:
    save(checkout, "h100-dsv32.json", rows)
    main(["--root", str(checkout)])
    assert "| 2026-11-26 | 01234567 | – |" in text(checkout, "docs/benchmarks/README.md")
    kernels = checkout / "generated/dsv32/_kernels.py"
    kernels.write_text("# A comment.\n\n" + kernels.read_text())
    (checkout / "generated/dsv32/sparse_fwd.py").write_text("from . import _kernels, _launch\n")
    assert main(["--root", str(checkout), "--check"]) == 0  # the kernels are the same
    kernels.write_text(kernels.read_text().replace("pass", "return"))
    assert main(["--root", str(checkout), "--check"]) == 1
    main(["--root", str(checkout)])
    assert "| 2026-11-26 | 01234567 | 2 decode |" in text(checkout, "docs/benchmarks/README.md")


@pytest.mark.parametrize("missing", ["driver", "date", "commit", "peers", "kernels", "torch"])
def test_a_report_without_its_whole_origin_is_refused(checkout: Path, rows: list[Row], missing: str) -> None:
    save(checkout, "h100-dsv32.json", [replace(rows[0], **{missing: None})])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has no whole origin"):
        Documents(checkout).files()


def test_a_report_of_files_that_no_commit_holds_is_refused(checkout: Path, rows: list[Row]) -> None:
    save(checkout, "h100-dsv32.json", [replace(rows[0], commit="0123456789ab-dirty")])
    with pytest.raises(UsageError, match="on files that no commit holds"):
        Documents(checkout).files()


def test_a_report_has_the_name_of_its_card_and_package(checkout: Path, rows: list[Row]) -> None:
    save(checkout, "h200-dsv32.json", rows)
    with pytest.raises(UsageError, match=r"h200-dsv32\.json: holds a row of dsv32 on NVIDIA H100"):
        Documents(checkout).files()
    (checkout / "docs/benchmarks/h200-dsv32.json").rename(checkout / "docs/benchmarks/h100-dsv32-decode.json")
    assert [report.card for report in Documents(checkout).reports] == ["H100"]


@pytest.mark.parametrize("block", ["<!-- figures: all -->\n<!-- end -->", "<!-- figures: summary -->"])
def test_a_block_is_known_and_has_an_end(checkout: Path, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "README.md").write_text(f"{block}\n")
    assert main(["--root", str(checkout)]) == 2
    assert (
        "README.md:1: takes a block picture, rows, summary, slower, reports, and <!-- end -->"
        in capsys.readouterr().err
    )


def test_without_a_report_there_is_no_figure(checkout: Path) -> None:
    main(["--root", str(checkout)])
    for path in ("README.md", "docs/performance/README.md", "docs/performance/sparse_fwd.md"):
        assert NO_ROWS in text(checkout, path)


def test_the_documents_have_the_figures_of_the_reports(capsys: pytest.CaptureFixture[str]) -> None:
    differs = main(["--root", str(ROOT), "--check"])
    assert not differs, f"{capsys.readouterr().out}fix with: ./dev python -m mlagen.bench.report.figures"


def test_every_chosen_row_is_one_that_bench_measures() -> None:
    chosen = Documents(ROOT).chosen
    known = {each.package: set(map(str, shapes_of(load_package(package_of(each.package))))) for each in chosen}
    for each in chosen:
        assert set(each.shapes) <= known[each.package], each.package
        assert set(each.readme) <= set(each.shapes)


def unmarked(path: Path) -> str:
    """A document without its blocks."""
    kept, inside = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        inside = (inside or bool(BEGIN.match(line))) and line != END
        kept += [] if inside else [line]
    return "\n".join(kept)


def test_readme_has_no_figure_of_speed_outside_its_block() -> None:
    assert not re.findall(r".*\b\d+(?:\.\d+)?(?: ?x\b| times as fast| us\b| TFLOP/s).*", unmarked(ROOT / "README.md"))


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "performance").glob("*.md")), ids=lambda page: page.stem)
def test_where_kernels_stand_is_told_by_blocks(page: Path) -> None:
    """Tables of speed stand in blocks; others are under headings of experiments."""
    for section in re.split(r"^#{2,3} ", unmarked(page), flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        if heading in ("Where it stands", "Today", "Where it is slower"):
            assert "\n|" not in body, heading
            assert "<!-- figures: " in page.read_text(encoding="utf-8")
