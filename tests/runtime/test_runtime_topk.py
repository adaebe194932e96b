"""Schedules of top-k, and the calls that list its variants."""

from __future__ import annotations

import pytest
import torch

from mlagen.runtime import _facts, _launch, _tiles, _topk

SM80, SM90 = _launch.DeviceFacts("sm80", 108), _launch.DeviceFacts("sm90", 132, pdl=True, sm90=True)
CPU = torch.device("cpu")


@pytest.mark.parametrize("columns", [1, 4096, 4097, 16384, 16385, 1 << 30])
def test_a_tile_holds_its_row_or_takes_long_ones(columns: int) -> None:
    tile = _topk.schedule(SM80, True, columns, 64)
    assert tile.is_long or columns <= tile.reps * tile.spans * 128
    assert _topk.schedule(SM80, False, columns, 64).is_long


def test_only_devices_with_the_sm90_kernels_run_them() -> None:
    assert _topk.sm90_tile(SM80, 1, 4096, 64) is None
    assert _topk.sm90_tile(SM90, 1, 4096, 64) == _tiles.TOPK_SM90_TILES[0][3]
    portable = SM90._replace(forced=_launch.Forced(kernel="portable"))
    assert _topk.sm90_tile(portable, 1, 4096, 64) is None


def test_a_package_without_the_sm90_table_runs_the_portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tiles, "TOPK_SM90_TILES", [])
    assert _topk.sm90_tile.__wrapped__(SM90, 1, 4096, 64) is None


@pytest.mark.parametrize(
    ("wrappers", "count"),
    [([], 0), (["persistent_topk"], 7), (["topk_merge"], 3), (["topk_merge", "persistent_topk"], 10)],
)
def test_variants_are_those_of_the_packages_wrappers(
    wrappers: list[str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_facts, "WRAPPERS", wrappers)
    with _launch.planned_for(SM80):
        assert len(_topk.variants(CPU)) == count


@pytest.mark.parametrize(
    ("value", "error"), [(True, TypeError), (1.0, TypeError), ("1", TypeError), (0, ValueError), (5, ValueError)]
)
def test_an_integer_out_of_range_is_refused(value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="k: got"):
        _topk.integer("k", value, 1, 4)
    assert _topk.integer("k", 4, 1, 4) == 4


def test_rows_are_read_in_groups_where_memory_allows() -> None:
    memory = torch.zeros(2 * 64)
    assert _topk.in_groups(memory.view(2, 64)) is not None
    short = memory.as_strided((2, 61), (64, 1))
    grouped = _topk.in_groups(short)
    assert grouped is not None
    assert grouped.shape == (2, 64)
    assert _topk.in_groups(memory[:125].clone().as_strided((2, 61), (64, 1))) is None
    assert _topk.in_groups(memory[1:].as_strided((1, 64), (64, 1))) is None
