"""Schedules of top-k, and the calls that list its variants."""

from __future__ import annotations

import pytest
import torch

from mlagen.runtime import _facts, _launch, _tiles, _topk

SM80, SM90 = _launch.DeviceFacts("sm80", 108), _launch.DeviceFacts("sm90", 132, pdl=True, sm90=True)
CPU = torch.device("cpu")


@pytest.mark.parametrize("columns", [1, 4096, 4097, 16384, 16385, 1 << 30])
def test_a_tile_holds_its_row_or_takes_long_ones(columns: int) -> None:
    kernel, tile = _topk.schedule(SM80, 1, columns, 64, plain=True)
    assert kernel == "portable"
    assert tile.is_long or columns <= tile.reps * tile.spans * 128
    assert _topk.schedule(SM80, 1, columns, 64).tile.is_long


def test_only_devices_with_the_sm90_kernels_run_them() -> None:
    assert _topk.schedule(SM80, 1, 4096, 64).kernel == "portable"
    assert _topk.schedule(SM90, 1, 4096, 64) == ("sm90", _tiles.TOPK_SM90_TILES[0][3])


@pytest.mark.parametrize(
    ("columns", "forced", "kernel"),
    [
        (8192, None, "sm90"),
        (8193, None, "sm90_collect"),
        (8193, "sm90", "sm90"),
        (8193, "sm90_collect", "sm90_collect"),
        (8192, "sm90_collect", "portable"),
        (8193, "portable", "portable"),
        (8193, "sm90_swap_ab", "portable"),
    ],
)
def test_a_kernel_forced_by_name_runs_the_calls_that_it_can_run(columns: int, forced: str | None, kernel: str) -> None:
    found = _topk.schedule(SM90._replace(forced=_launch.Forced(kernel=forced)), 1, columns, 64)
    assert (found.kernel, type(found.tile)) == (
        kernel,
        _tiles.TopkTile if kernel == "portable" else _tiles.TopkSm90Tile,
    )


PORTABLE_TILE, SM90_TILE = _tiles.TopkTile(2, 2, True, 2), _tiles.TopkSm90Tile(4, 1, 1024, None, 1)


@pytest.mark.parametrize(("kernel", "tile"), [("portable", PORTABLE_TILE), ("sm90", SM90_TILE)])
def test_a_forced_tile_is_of_the_forced_kernel(kernel: str, tile: object) -> None:
    facts = SM90._replace(forced=_launch.Forced(kernel=kernel, tile=tile))
    assert _topk.schedule(facts, 1, 70000, 64) == (kernel, tile)


def test_a_package_without_the_sm90_table_runs_the_portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tiles, "TOPK_SM90_TILES", [])
    assert _topk.schedule.__wrapped__(SM90, 1, 4096, 64).kernel == "portable"


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
        _launch.integer("k", value, 1, 4)
    assert _launch.integer("k", 4, 1, 4) == 4


def test_rows_are_read_in_groups_where_memory_allows() -> None:
    memory = torch.zeros(2 * 64)
    assert _topk.in_groups(memory.view(2, 64)) is not None
    short = memory.as_strided((2, 61), (64, 1))
    grouped = _topk.in_groups(short)
    assert grouped is not None
    assert grouped.shape == (2, 64)
    assert _topk.in_groups(memory[:125].clone().as_strided((2, 61), (64, 1))) is None
    assert _topk.in_groups(memory[1:].as_strided((1, 64), (64, 1))) is None
