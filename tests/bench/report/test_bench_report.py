from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mlagen.bench.__main__ import main
from mlagen.bench.families.sparse_fwd import SparseFwdShape
from mlagen.bench.package import BenchPackage
from mlagen.bench.report.rows import Contender, Row
from mlagen.bench.report.tables import line, markdown, to_json
from mlagen.bench.tune.choose import Regime
from mlagen.bench.tune.sweep import Figure
from mlagen.bench.tune.tuned import Tuned, summary
from mlagen.plan.tiles.tile import Tile


def test_markdown_shows_rates_ratios_and_reasons(row: Row) -> None:
    text = markdown([row])
    columns = "ours us | by | TFLOP/s | GB/s | of the roof | best peer | ×best | vLLM Triton us (×) | error"
    assert f"| decode | {columns} |" in text
    cells = "8.0 | graph | 9 | 300 | 0.07 | vLLM Triton | 2.41 | 19.3 (2.41) | 1.7e-03"
    assert f"| 1 x h16, kv 128K, topk 2048 | {cells} |" in text
    assert "- FA3 p1: not installed (ModuleNotFoundError: No module named 'vllm')" in text
    assert text.startswith("NVIDIA H200, torch 2.11.0, triton 3.6.0.\n")
    assert "\nRoof: 690 TFLOP/s, 4,445 GB/s: measured.\n" in text


def test_host_times_and_times_after_a_pause_have_tables_of_their_own(row: Row) -> None:
    text = markdown([row])
    assert "| decode, from Python | ours us | vLLM Triton us |" in text
    assert "| 1 x h16, kv 128K, topk 2048 | 21.0 | 37.0 |" in text
    assert "| decode, after a pause | ours us |" in text
    assert "| 1 x h16, kv 128K, topk 2048 | 7.5 |" in text
    assert "after a pause |" not in markdown([replace(row, contenders=row.contenders[1:])])


def test_the_best_peer_is_the_fastest_that_ran(row: Row) -> None:
    slow, fast = Contender("slow", 9e-6, 1.2), Contender("fast", 7e-6, 0.9)
    variant = Contender("ours, batch-invariant", 1e-6, 0.1)
    raced = replace(row, contenders=(row.ours, variant, slow, fast, row.contenders[3]))
    assert raced.best_peer == fast
    data = to_json(raced)
    assert (data["best_peer"], data["ratio_to_best_peer"]) == ("fast", 0.9)
    assert "| fast | 0.90 |" in markdown([raced])
    alone = replace(row, contenders=(row.ours, variant))
    assert alone.best_peer is None
    assert to_json(alone)["best_peer"] is None
    assert "best peer |" not in markdown([alone])
    bare = [replace(each, ratio=None) for each in (slow, fast)]
    assert replace(row, contenders=(Contender("ours", absent="no"), *bare)).best_peer == bare[1]


def test_packages_have_a_heading_each_where_there_are_several(row: Row) -> None:
    other = replace(row, package="glm5")
    assert "\n## dsv32\n" in markdown([row, other])
    assert "\n## glm5\n" in markdown([row, other])
    assert "\n## " not in markdown([row])


def test_names_end_no_cell_and_open_no_tag(row: Row) -> None:
    text = markdown([replace(row, contenders=(row.ours, Contender("a|<b>", 1e-6, 0.5)))])
    assert "a\\|&lt;b>" in text
    assert "<b>" not in text


def test_each_kind_has_a_table_and_every_line_of_it_as_many_cells(row: Row) -> None:
    prefill = Row(
        **{**vars(row), "shape": SparseFwdShape("prefill", 4096, 16, 8192, 2048), "contenders": row.contenders[:1]}
    )
    tables = [part.splitlines() for part in markdown([prefill, row]).split("\n\n") if part.startswith("|")]
    kinds = [table[0].split(" | ")[0].removeprefix("| ") for table in tables]
    assert [kind for kind in kinds if "," not in kind] == ["prefill", "decode"]
    for table in tables:
        assert len({text.count("|") for text in table}) == 1


def test_a_reason_names_its_shapes_where_others_ran(row: Row) -> None:
    fine = Row(
        **{**vars(row), "shape": SparseFwdShape("decode", 4, 16, 131072, 2048), "contenders": row.contenders[:2]}
    )
    assert "- FlashMLA: wrong result: relative error nan (decode 1 x h16, kv 128K, topk 2048)" in markdown([row, fine])


def test_a_row_without_our_time_still_renders(row: Row) -> None:
    broken = Row(**{**vars(row), "contenders": (Contender("ours", absent="RuntimeError: x"), row.contenders[1])})
    assert "- ours: RuntimeError: x" in markdown([broken])
    assert markdown([]) == ""


def test_json_is_strict_and_whole(row: Row) -> None:
    data = json.loads(json.dumps(to_json(row), allow_nan=False))
    shape = {"family": "decode", "kind": "decode", "tokens": 1, "num_heads": 16, "s_kv": 131072, "topk": 2048}
    assert data["shape"] == shape
    assert data["contenders"][0]["seconds"] == 8e-6
    assert data["contenders"][2]["error"] is None
    assert data["contenders"][3]["absent"].startswith("not installed")


def test_a_row_in_one_line(row: Row) -> None:
    assert line(row).startswith("decode 1 x h16, kv 128K, topk 2048: ours 8.0 us; vLLM Triton 19.3 us; FlashMLA: wrong")


def test_the_summary_of_tuning() -> None:
    figures = (
        Figure("sparse_decode", Regime(16, 16, 4), False, Tile(16, 32, 4, 2, True), 32, 10.1e-6, 10.0e-6, None),
        Figure("sparse", Regime(64, 64, 64), True, Tile(64, 128, 4, 1, True), 2, 40e-6, 40e-6, 44e-6),
    )
    text = summary(Tuned("dsv32", "sm90", "NVIDIA H200", "3.6.0", *[()] * 6, figures, True, {}, 128))
    assert "| sparse_decode 4 x h16 | triton | 16x32 w4 s2 ahead | 32 | 10.1 | 10.0 | – |" in text
    assert "| sparse 64 x h64 | gluon | 64x128 w4 s1 ahead | 2 | 40.0 | 40.0 | 44.0 |" in text


def test_without_a_gpu_the_bench_says_so(dsv32: BenchPackage, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert main(["--package", str(dsv32.folder)]) == 2
    assert "benchmarks run on a GPU" in capsys.readouterr().err


def test_short_calls_have_both_times_and_the_one_behind_another_kernel_ranks(row: Row) -> None:
    ours = replace(row.ours, behind_seconds=9e-6, behind_ratio=1.0)
    first = replace(row.contenders[1], behind_seconds=18e-6, behind_ratio=2.0)
    second = Contender("FA3 p1", 16e-6, 2.0, "graph", behind_seconds=19.8e-6, behind_ratio=2.2)
    both = replace(row, contenders=(ours, first, second))
    assert both.best_peer == first  # by repeated calls it would be the second
    text = markdown([both])
    assert "| decode | ours us | behind another kernel | by |" in text
    assert "| 1 x h16, kv 128K, topk 2048 | 8.0 | 9.0 | graph |" in text
    assert "| vLLM Triton | 2.00 | 19.3 (2.41) | 16.0 (2.00) |" in text
    assert "| decode, behind another kernel | ours us (×) | vLLM Triton us (×) | FA3 p1 us (×) |" in text
    assert "| 1 x h16, kv 128K, topk 2048 | 9.0 (1.00) | 18.0 (2.00) | 19.8 (2.20) |" in text
    assert to_json(both)["ratio_to_best_peer"] == 2.0
