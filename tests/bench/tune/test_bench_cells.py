from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlagen.bench.families.sparse_fwd import SparseFwdShape
from mlagen.bench.tune.cells import Cell, CellLog, Measured
from mlagen.plan.tiles.tile import Tile

KEY = {"kernels": "sparse", "package": "0123", "triton": "3.6.0", "device": "NVIDIA H200"}
TILE = Tile(16, 32, 4, 2, True)


@pytest.fixture
def cell(shape: SparseFwdShape) -> Cell:
    return Cell(shape, TILE, 4)


def test_a_later_log_knows_what_was_measured(tmp_path: Path, cell: Cell) -> None:
    path = tmp_path / "new" / "log.jsonl"
    log = CellLog(path, KEY, SparseFwdShape)
    log.put(cell, Measured(2e-6))
    log.put(cell, Measured(1e-6))
    log.put(replace(cell, splits=8), Measured(None, "RuntimeError: out of resources"))
    again = CellLog(path, KEY, SparseFwdShape)
    assert len(again) == 2
    assert again.get(cell) == Measured(1e-6)
    assert again.get(replace(cell, splits=8)) == Measured(None, "RuntimeError: out of resources")
    assert again.get(replace(cell, splits=16)) is None


@pytest.mark.parametrize("name", KEY)
def test_measurements_hold_for_one_package_triton_and_device(tmp_path: Path, cell: Cell, name: str) -> None:
    path = tmp_path / "log.jsonl"
    CellLog(path, KEY, SparseFwdShape).put(cell, Measured(1e-6))
    assert len(CellLog(path, {**KEY, name: "another"}, SparseFwdShape)) == 0


def test_a_line_cut_short_is_passed_over(tmp_path: Path, cell: Cell) -> None:
    path = tmp_path / "log.jsonl"
    log = CellLog(path, KEY, SparseFwdShape)
    log.put(cell, Measured(1e-6))
    log.put(replace(cell, splits=8), Measured(1e-6))
    text = path.read_text()
    path.write_text(text[: text.rindex("tile")] + "\n[1]\n")
    assert len(CellLog(path, KEY, SparseFwdShape)) == 1


def test_nothing_is_kept_without_a_file(cell: Cell) -> None:
    log = CellLog(None, KEY, SparseFwdShape)
    log.put(cell, Measured(1e-6))
    assert log.get(cell) == Measured(1e-6)


def test_the_best_of_each_tile_at_a_shape(cell: Cell, shape: SparseFwdShape) -> None:
    other = Tile(16, 64, 4, 2, True)
    log = CellLog(None, KEY, SparseFwdShape)
    log.put(cell, Measured(2e-6))
    log.put(replace(cell, splits=8), Measured(1e-6))
    log.put(replace(cell, tile=other), Measured(3e-6))
    log.put(replace(cell, tile=other, splits=2), Measured(None, "wrong result"))
    log.put(replace(cell, shape=replace(shape, tokens=9)), Measured(1e-9))
    assert log.best(shape) == {TILE: (1e-6, 8), other: (3e-6, 4)}
