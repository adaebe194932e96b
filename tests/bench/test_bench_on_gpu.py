from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mlagen.bench.driver import Driver
from mlagen.bench.package import BenchPackage
from mlagen.bench.run import BATCH_INVARIANT, OURS, bench_package
from mlagen.bench.shapes import Shape
from mlagen.bench.tune import regimes_of, tune
from mlagen.plan import make_plan
from mlagen.plan.tuned import load_tuned
from mlagen.spec import load

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_shape_is_measured_and_right() -> None:
    shapes = [Shape("decode", 1, 16, 8192, 2048), Shape("prefill", 256, 16, 8192, 2048)]
    rows = bench_package(ROOT / "generated" / "dsv32", shapes=shapes, peers=False, rounds=3)
    assert [row.shape for row in rows] == shapes
    for row in rows:
        assert [each.name for each in row.contenders] == [OURS, BATCH_INVARIANT]
        assert [each.absent for each in row.contenders] == [None, None]
        assert row.ours.seconds
    assert rows[0].ours.eager_seconds is not None


def test_a_sweep_of_one_size_writes_a_table_and_goes_on_from_its_log(tmp_path: Path, dsv32: BenchPackage) -> None:
    spec = load(ROOT / "specs" / "dsv32.yaml")
    regimes = [regime for regime in regimes_of(128) if regime.num_heads == 16 and regime.tokens == 4]
    current, _ = Driver(dsv32, dsv32.device_facts(torch.device("cuda", 0))).current(16, 4)
    log = tmp_path / "log.jsonl"
    tuned = tune(spec, ROOT / "generated" / "dsv32", log=log, regimes=regimes, tiles=[current])
    assert not tuned.complete
    assert [figure.tile for figure in tuned.figures] == [current]
    tuned.write(tmp_path)
    assert load_tuned("dsv32", tmp_path, make_plan(spec).sparse.chunks)[tuned.target]
    lines = log.read_text().count("\n")
    again = tune(spec, ROOT / "generated" / "dsv32", log=log, regimes=regimes, tiles=[current], budget=0)
    assert again.rows == tuned.rows
    assert log.read_text().count("\n") == lines
