from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.bench.shapes import MOST_SETS, default_heads, make_indices, sets_needed


@pytest.mark.parametrize(("model", "heads"), [(128, [128, 64, 16]), (64, [64, 16]), (32, [32, 16]), (12, [12])])
def test_head_counts_do_not_exceed_the_models(model: int, heads: list[int]) -> None:
    assert default_heads(model) == heads


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 20), topk=st.integers(1, 70), s_kv=st.integers(1, 90))
def test_indices_are_distinct_rows_of_kv(tokens: int, topk: int, s_kv: int) -> None:
    indices = make_indices(tokens, topk, s_kv, "cpu")
    assert indices.dtype == torch.int32
    assert indices.shape == (tokens, topk)
    rows = min(topk, s_kv)
    for row in indices[:, :rows].tolist():
        assert len(set(row)) == rows
        assert all(0 <= index < s_kv for index in row)
    assert (indices[:, rows:] == -1).all()


def test_indices_are_spread_evenly_and_differ_between_tokens() -> None:
    indices = make_indices(64, 256, 8192, "cpu", torch.Generator().manual_seed(0))
    counts = torch.bincount(indices.flatten() // 1024, minlength=8)
    assert (counts - counts.float().mean()).abs().max() < 0.1 * counts.float().mean()
    assert len(set(map(tuple, indices.tolist()))) == 64
    assert (indices[:, 1:] > indices[:, :-1]).float().mean() == pytest.approx(0.5, abs=0.05)  # in no order


def test_indices_are_drawn_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlagen.bench.shapes.INDEX_CHUNK", 3 * 100)
    indices = make_indices(8, 10, 100, "cpu")
    assert all(len(set(row)) == 10 for row in indices.tolist())


def test_rotation_exceeds_l2_but_stays_finite() -> None:
    assert sets_needed(2 << 20, 50 << 20) == 50
    assert sets_needed(1, 50 << 20) == MOST_SETS
    assert sets_needed(1 << 40, 50 << 20) == 2
