from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from mlagen.bench.families import shapes_of
from mlagen.bench.families.sparse_fwd import SparseFwdShape
from mlagen.bench.package import BenchPackage, load_package
from mlagen.bench.run import bench_package
from mlagen.bench.trial import BATCH_INVARIANT, OURS
from mlagen.bench.tune.driver import DenseDecodeDriver, Driver
from mlagen.bench.tune.tuned import tune
from mlagen.emit import apply, compare, render
from mlagen.plan import DenseDecodePlan, SparseFwdPlan, Tile, load_plan, make_plan
from mlagen.plan.tiles.tuned import TunedFiles
from mlagen.spec import load

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_shape_is_measured_and_right(dsv32: BenchPackage) -> None:
    shapes = [SparseFwdShape("decode", 1, 16, 8192, 2048), SparseFwdShape("prefill", 256, 16, 8192, 2048)]
    rows = bench_package(dsv32.folder, shapes=shapes, peers=False, rounds=3)
    assert [row.shape for row in rows] == shapes
    for row in rows:
        assert [each.name for each in row.contenders] == [OURS, BATCH_INVARIANT]
        assert [each.absent for each in row.contenders] == [None, None]
        assert row.ours.seconds
        assert row.ours.spread is not None
        assert (bool(row.driver), bool(row.date), row.peers) == (True, True, ())
    assert rows[0].ours.eager_seconds is not None
    assert [row.ours.cool_seconds is not None for row in rows] == [False, True]  # bytes bound one, FLOPs the other


@pytest.mark.parametrize("path", sorted((ROOT / "specs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_family_of_a_package_is_right(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / f"{path.stem}_families"
    apply(compare(render(load_plan(path)), folder))
    shapes = shapes_of(load_package(folder), ["cache", "gather", "indices", "sparse_decode"])
    shapes = [shape for shape in shapes if shape.tokens in (1, 16, 128)]
    shapes += [shape for shape in shapes_of(load_package(folder), ["dense_decode"]) if shape.tokens <= 16]
    for row in bench_package(folder, shapes=shapes, peers=False, rounds=1):
        assert [each.absent for each in row.contenders] == [None] * len(row.contenders), str(row.shape)


def test_a_sweep_tunes_both_kinds_of_attention(tmp_path: Path) -> None:
    folder = tmp_path / "dsv4_flash_swept"
    apply(compare(render(load_plan(ROOT / "specs" / "dsv4_flash.yaml")), folder))
    package = load_package(folder)
    facts = package.device_facts(torch.device("cuda", 0))
    modules = ("sparse_fwd", "sparse_decode")
    tiles = [Driver(package, module, facts).current(64, 16)[0] for module in modules]
    tuned = tune(load(ROOT / "specs" / "dsv4_flash.yaml"), folder, heads=[64], tokens=[16], tiles=tiles)
    for module, rows in zip(modules, (tuned.sparse_fwd_sm90, tuned.sparse_decode_sm90), strict=True):
        assert bool(rows) == bool(Driver(package, module, facts).sm90_rows)
    assert {figure.kernels for figure in tuned.figures} == {"sparse_fwd", "sparse_decode"}
    assert tuned.sparse_fwd
    assert tuned.sparse_decode


@pytest.mark.parametrize("name", ["dsv3", "dots3_sliding", "dsv3_fp8", "dsv2_lite"])
def test_a_sweep_tunes_dense_attention(tmp_path: Path, name: str) -> None:
    """At 32 rows: of one query token, or of two of 16 heads; by tiles of as many rows and of fewer."""
    folder = tmp_path / f"{name}_swept"
    path = ROOT / "specs" / f"{name}.yaml"
    apply(compare(render(load_plan(path)), folder))
    package = load_package(folder)
    driver = DenseDecodeDriver(package, "dense_decode", package.device_facts(torch.device("cuda", 0)))
    tiles = [driver.current(rows, 16)[0] for rows in (16, 32)]
    tried = {*tiles, *([driver.sm90] if driver.sm90 is not None else [])}
    log = tmp_path / "log.jsonl"
    tuned = tune(load(path), folder, log=log, heads=[32], tokens=[16], tiles=tiles)
    (figure,) = tuned.figures
    assert figure.kernels == "dense_decode"
    assert figure.tile in tried
    assert figure.sm90 == (figure.tile == driver.sm90)
    assert figure.seconds
    assert not tuned.complete
    cells = [json.loads(line) for line in log.read_text().splitlines()]
    assert {Tile(*cell["tile"]) for cell in cells if cell["seconds"]} == tried
    assert len({cell["splits"] for cell in cells}) > 1
    tuned.write(tmp_path)
    files, fits = TunedFiles(name, tmp_path, tuned.heads), tuned.fits["dense_decode"]
    read = files.rows(fits, [tuned.target], make_plan(load(path)).of(DenseDecodePlan).cached.row)[tuned.target]
    assert [(row.tile, row.programs_per_sm) for row in read] == [
        (row.tile, row.programs_per_sm) for row in tuned.dense_decode
    ]
    assert bool(tuned.dense_decode_sm90) == bool(driver.sm90_rows)
    assert files.sm90_rows(fits, tuned.target) == (tuned.dense_decode_sm90 or None)
    again = tune(load(path), folder, log=log, heads=[32], tokens=[16], tiles=tiles, budget=0)
    assert (again.dense_decode, again.dense_decode_sm90) == (tuned.dense_decode, tuned.dense_decode_sm90)
    assert len(log.read_text().splitlines()) == len(cells)


def test_a_sweep_of_one_size_writes_a_table_and_goes_on_from_its_log(tmp_path: Path, dsv32: BenchPackage) -> None:
    spec = load(ROOT / "specs" / "dsv32.yaml")
    driver = Driver(dsv32, "sparse_fwd", dsv32.device_facts(torch.device("cuda", 0)))
    current, _ = driver.current(16, 4)
    log = tmp_path / "log.jsonl"
    tuned = tune(spec, dsv32.folder, log=log, heads=[16], tokens=[4], tiles=[current])
    assert not tuned.complete
    assert [figure.tile for figure in tuned.figures] in ([current], [driver.sm90])
    tuned.write(tmp_path)
    files, fits = TunedFiles("dsv32", tmp_path, tuned.heads), tuned.fits["sparse_fwd"]
    if driver.sm90 is not None:
        cells = [json.loads(line) for line in log.read_text().splitlines()]
        assert any(cell["tile"] == list(astuple(driver.sm90)) and cell["seconds"] for cell in cells)
        assert files.sm90_rows(fits, tuned.target) == tuned.sparse_fwd_sm90
    assert files.rows(fits, [tuned.target], make_plan(spec).of(SparseFwdPlan).kv_row.row)[tuned.target]
    lines = log.read_text().count("\n")
    again = tune(spec, dsv32.folder, log=log, heads=[16], tokens=[4], tiles=[current], budget=0)
    assert (again.sparse_fwd, again.sparse_fwd_sm90) == (tuned.sparse_fwd, tuned.sparse_fwd_sm90)
    assert log.read_text().count("\n") == lines
