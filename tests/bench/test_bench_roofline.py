from __future__ import annotations

import pytest

from mlagen.bench.families.sparse_fwd import SparseFwdShape
from mlagen.bench.package import BenchPackage
from mlagen.bench.roofline import ROOFS, Roof
from mlagen.work import attention_bytes, distinct_rows, flops


def test_flops_count_both_products() -> None:
    assert flops(tokens=3, num_heads=5, keys=7, d_qk=11, d_v=13) == 2 * 3 * 5 * 7 * (11 + 13)


def test_bytes_count_everything_once() -> None:
    moved = attention_bytes(2, 3, keys=5, d_qk=7, d_v=11, kv_bytes=10 * 14)
    assert moved == 2 * 3 * 7 * 2 + 2 * 3 * 11 * 2 + 2 * 5 * 4 + 10 * 14


def test_no_call_names_more_rows_than_there_are() -> None:
    assert distinct_rows(4, 10, 1000) == 40
    assert distinct_rows(400, 10, 1000) == 1000


def test_prefill_shares_its_context_and_decode_does_not(dsv32: BenchPackage) -> None:
    row = dsv32.row_bytes
    tokens, heads, topk, s_kv = 256, 16, 2048, 4096
    rest = tokens * heads * (576 + 512) * 2 + tokens * topk * 4
    assert SparseFwdShape("prefill", tokens, heads, s_kv, topk).bytes_moved(dsv32.facts, row) == rest + s_kv * row
    assert (
        SparseFwdShape("decode", tokens, heads, s_kv, topk).bytes_moved(dsv32.facts, row) == rest + tokens * topk * row
    )


def test_a_context_shorter_than_topk_is_less_work(dsv32: BenchPackage) -> None:
    whole, half = SparseFwdShape("decode", 1, 16, 4096, 2048), SparseFwdShape("decode", 1, 16, 1024, 2048)
    assert half.flops(dsv32.facts) == whole.flops(dsv32.facts) // 2


def test_the_roof_is_the_slower_of_the_two() -> None:
    roof = Roof(100.0, 10.0, "")
    assert roof.seconds(1000, 10) == 10
    assert roof.seconds(10, 1000) == 100


def test_h200_at_known_shapes(dsv32: BenchPackage) -> None:
    """560 TFLOP/s of prefill are 0.81 of the roof; 75.2 us of a 128-token decode with 16 heads are 0.92."""
    roof = ROOFS["NVIDIA H200"]
    prefill = SparseFwdShape("prefill", 4096, 128, 8192, 2048)
    seconds = prefill.flops(dsv32.facts) / 560e12
    share = roof.seconds(prefill.flops(dsv32.facts), prefill.bytes_moved(dsv32.facts, dsv32.row_bytes)) / seconds
    assert share == pytest.approx(0.81, abs=0.005)
    decode = SparseFwdShape("decode", 128, 16, 131072, 2048)
    share = roof.seconds(decode.flops(dsv32.facts), decode.bytes_moved(dsv32.facts, dsv32.row_bytes)) / 75.2e-6
    assert share == pytest.approx(0.92, abs=0.01)
