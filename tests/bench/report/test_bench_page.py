from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mlagen.bench.families.sparse_fwd import SparseFwdShape
from mlagen.bench.report.against import compare
from mlagen.bench.report.page import page
from mlagen.bench.report.rows import Contender, Row
from mlagen.bench.report.saved import read_rows
from mlagen.bench.report.tables import us
from mlagen.bench.roofline import Roof
from mlagen.bench.shapes import Batch

ROOT = Path(__file__).parents[3]
JSON = ROOT / "docs" / "benchmarks" / "older" / "h200-dsv32.json"
COMMAND = "mlagen bench --from rows.json --html page.html"
EVIL = "</title><script>alert('$x$ & \\1 id=\"y\" #000001')</script>"


@pytest.fixture
def rows(row: Row) -> list[Row]:
    """Two decodes, a prefill and a cache writer."""
    copy = Roof(float("inf"), 4.2e12, "4,200 GB/s: a large copy")
    return [
        row,
        replace(row, shape=SparseFwdShape("decode", 128, 16, 131072, 2048)),
        replace(row, shape=SparseFwdShape("prefill", 4096, 16, 8192, 2048)),
        replace(row, shape=Batch("cache", "concat_and_cache_mla", 128, 1), flops=0, roof=copy),
    ]


def parsed(text: str) -> ElementTree.Element:
    """The page as XML, which is stricter than HTML."""
    return ElementTree.fromstring(text)


def texts(element: ElementTree.Element) -> Iterator[str]:
    return (text.strip() for text in element.itertext() if text.strip())


def test_a_page_holds_every_row_and_kernel(rows: list[Row]) -> None:
    found = list(texts(parsed(page(rows, COMMAND))))
    for row in rows:
        assert str(row.shape).removeprefix(f"{row.shape.kind} ") in found
        for each in row.contenders:
            assert each.name in found
            if each.seconds:
                assert us(each.seconds) in found
    assert {"Decode", "Prefill", "Cache writers", COMMAND, "2.11.0", "3.6.0", "NVIDIA H200"} <= set(found)
    assert "FlashMLA: wrong result: relative error nan" in found


def test_charts_are_a_roofline_a_kind_with_flops_and_bars_a_shape(rows: list[Row]) -> None:
    labels = [each.get("aria-label", "") for each in parsed(page(rows, COMMAND)).iter() if each.get("role") == "img"]
    assert [label for label in labels if label.startswith("Roofline")] == ["Roofline of decode", "Roofline of prefill"]
    assert len([label for label in labels if label.startswith("Time of")]) == len(rows)


def test_a_roofline_has_a_point_a_kernel_and_shape_and_says_which(rows: list[Row]) -> None:
    titles = [text for text in texts(parsed(page(rows, COMMAND))) if " of the roof" in text and " TFLOP/s, " in text]
    points = [(row, each) for row in rows for each in row.contenders if each.seconds and row.flops]
    assert len(titles) == len(points)
    assert "vLLM Triton, 1 x h16, kv 128K, topk 2048: 19.3 us, 4 TFLOP/s, 0.03 of the roof" in titles


def test_the_best_peer_is_marked_with_its_ratio(rows: list[Row]) -> None:
    assert list(texts(parsed(page(rows, COMMAND)))).count("best ×2.41") == len(rows)


def test_nothing_is_fetched_or_run(rows: list[Row]) -> None:
    text = page(rows, COMMAND)
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)|src=|//[a-z]", text)


def test_ids_are_unique_and_what_is_referred_to_is_there(rows: list[Row]) -> None:
    text = page(rows, COMMAND)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert {*re.findall(r'href="#([^"]*)"', text), *re.findall(r"url\(#([^)]*)\)", text)} <= set(ids)


def test_every_text_is_escaped(row: Row) -> None:
    evil = replace(
        row,
        package=EVIL,
        device=EVIL,
        shape=Batch("cache", EVIL, 1, 1),
        roof=Roof(690e12, 4e12, EVIL),
        contenders=(row.ours, Contender(EVIL, 1e-6, 0.5), Contender("gone", absent=EVIL)),
        torch=EVIL,
        triton=EVIL,
    )
    text = page([evil], EVIL, compare([evil], [evil], EVIL))
    assert "<script" not in text
    found = list(texts(parsed(text)))
    assert EVIL in [each.text for each in parsed(text).iter("text")]  # of a chart
    assert f"{EVIL} on {EVIL}" in found
    assert f"gone: {EVIL}" in found


def test_a_run_without_any_time_still_has_a_page(row: Row) -> None:
    broken = replace(row, contenders=(Contender("ours", absent="RuntimeError: x"),), torch=None)
    found = list(texts(parsed(page([broken], COMMAND))))
    assert "ours: RuntimeError: x" in found
    assert "not recorded" in found


@pytest.mark.parametrize("flops", [1, 10**23])
def test_sizes_beyond_any_roof_are_drawn(row: Row, flops: int) -> None:
    parsed(page([replace(row, flops=flops)], COMMAND))


def test_what_got_slower_is_marked(row: Row) -> None:
    then = replace(row, contenders=(row.ours, replace(row.contenders[1], ratio=3.0)))
    text = page([row], COMMAND, compare([row], [then], "then.json"))
    assert '<tr class="worse">' in text
    assert "1 of 1 shapes slower than in then.json." in text
    assert '<tr class="worse">' not in page([row], COMMAND, compare([row], [row], "then.json"))


def test_packages_share_a_page(rows: list[Row]) -> None:
    found = list(texts(parsed(page([*rows, replace(rows[0], package="glm5")], COMMAND))))
    assert "dsv32, glm5 on NVIDIA H200" in found
    assert {"dsv32: Decode", "glm5: Decode"} <= set(found)


CODE = """
import sys
from pathlib import Path
from mlagen.bench.report.page import page
from mlagen.bench.report.saved import read_rows
sys.stdout.buffer.write(page(read_rows(Path(sys.argv[1]))[-2:], "x").encode())
"""


def test_the_same_rows_give_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", CODE, JSON],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "TZ": zone, "MPLBACKEND": "pdf", "HOME": str(tmp_path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed, zone in (("1", "UTC"), ("2", "Asia/Tokyo"))
    }
    assert len(found) == 1
    assert found == {page(read_rows(JSON)[-2:], "x").encode()}


def test_without_matplotlib_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from mlagen.cli import main; main()"
    command = [sys.executable, "-c", code, "bench", "--from", str(JSON), "--html", "never.html"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "an HTML page needs matplotlib" in done.stderr
    assert "pip install 'mlagen[html]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (ROOT / "never.html").exists()
