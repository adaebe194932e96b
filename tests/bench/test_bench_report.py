from __future__ import annotations

import json
import math

import pytest

from mlagen.bench.__main__ import main
from mlagen.bench.choose import Regime
from mlagen.bench.package import BenchPackage
from mlagen.bench.report import line, markdown, to_json
from mlagen.bench.run import Contender, Row
from mlagen.bench.shapes import Shape
from mlagen.bench.sweep import Figure
from mlagen.bench.tune import Tuned, summary
from mlagen.plan.tiles import Tile


@pytest.fixture
def row() -> Row:
    return Row(
        package="dsv32",
        device="NVIDIA H200",
        shape=Shape("decode", 1, 16, 131072, 2048),
        flops=71_303_168,
        bytes_moved=2_402_304,
        roof_seconds=0.54e-6,
        roof_origin="measured",
        contenders=(
            Contender("ours", 8e-6, 1.0, "graph", 21.04e-6, 1.7e-3),
            Contender("vLLM Triton", 19.3e-6, 2.41, "graph", 37e-6, 1.9e-3),
            Contender("FlashMLA", error=math.nan, absent="wrong result: relative error nan"),
            Contender("FA3 p1", absent="not installed (ModuleNotFoundError: No module named 'vllm')"),
        ),
    )


def test_markdown_shows_rates_ratios_and_reasons(row: Row) -> None:
    text = markdown([row])
    assert "| decode | ours us | TFLOP/s | GB/s | of the roof | vLLM Triton us (×) | error | from Python us |" in text
    assert "| 1 x h16, kv 128K, topk 2048 | 8.0 | 9 | 300 | 0.07 | 19.3 (2.41) | 1.7e-03 |" in text
    assert "ours 21.0, vLLM Triton 37.0" in text
    assert "- FA3 p1: not installed (ModuleNotFoundError: No module named 'vllm')" in text
    assert "NVIDIA H200." in text
    assert "\nRoof: measured.\n" in text


def test_each_kind_has_a_table_and_every_line_of_it_as_many_cells(row: Row) -> None:
    prefill = Row(**{**vars(row), "shape": Shape("prefill", 4096, 16, 8192, 2048), "contenders": row.contenders[:1]})
    tables = [part.splitlines() for part in markdown([prefill, row]).split("\n\n") if part.startswith("|")]
    assert [table[0].split(" | ")[0] for table in tables] == ["| prefill", "| decode"]
    for table in tables:
        assert len({text.count("|") for text in table}) == 1


def test_a_reason_names_its_shapes_where_others_ran(row: Row) -> None:
    fine = Row(**{**vars(row), "shape": Shape("decode", 4, 16, 131072, 2048), "contenders": row.contenders[:2]})
    assert "- FlashMLA: wrong result: relative error nan (decode 1 x h16, kv 128K, topk 2048)" in markdown([row, fine])


def test_a_row_without_our_time_still_renders(row: Row) -> None:
    broken = Row(**{**vars(row), "contenders": (Contender("ours", absent="RuntimeError: x"), row.contenders[1])})
    assert "- ours: RuntimeError: x" in markdown([broken])
    assert markdown([]) == ""


def test_json_is_strict_and_whole(row: Row) -> None:
    data = json.loads(json.dumps(to_json(row), allow_nan=False))
    assert data["shape"] == {"kind": "decode", "tokens": 1, "num_heads": 16, "s_kv": 131072, "topk": 2048}
    assert data["contenders"][0]["seconds"] == 8e-6
    assert data["contenders"][2]["error"] is None
    assert data["contenders"][3]["absent"].startswith("not installed")


def test_a_row_in_one_line(row: Row) -> None:
    assert line(row).startswith("decode 1 x h16, kv 128K, topk 2048: ours 8.0 us; vLLM Triton 19.3 us; FlashMLA: wrong")


def test_the_summary_of_tuning() -> None:
    tile = Tile(16, 32, 4, 2, True)
    figures = (Figure("kvcache", Regime(16, 16, 4), tile, 32, 10.1e-6, 10.0e-6, None),)
    text = summary(Tuned("dsv32", "sm90", "NVIDIA H200", "3.6.0", (), (), figures, True))
    assert "| kvcache 4 x h16 | 16x32 w4 s2 ahead | 32 | 10.1 | 10.0 | – |" in text


def test_without_a_gpu_the_bench_says_so(dsv32: BenchPackage, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert main(["--package", str(dsv32.folder)]) == 2
    assert "benchmarks run on a GPU" in capsys.readouterr().err
