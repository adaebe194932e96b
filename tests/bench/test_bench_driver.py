from __future__ import annotations

from pathlib import Path

import pytest

from mlagen.bench.candidates import BLOCK_H, attention_jobs, candidate_tiles, read_tiles
from mlagen.bench.driver import CANDIDATE, Driver
from mlagen.bench.package import BenchPackage, kernels_hash, load_package
from mlagen.bench.tune import CROWDED, split_counts
from mlagen.errors import UsageError
from mlagen.plan import TARGETS, make_plan
from mlagen.plan.tiles import expected_shared
from mlagen.spec import load

SPECS = Path(__file__).parents[2] / "specs"


@pytest.fixture
def driver(dsv32: BenchPackage) -> Driver:
    return Driver(dsv32, dsv32.module._launch.DeviceFacts("sm90", 132))


@pytest.mark.parametrize("tokens", [1, 7, 128, 4096])
@pytest.mark.parametrize("heads", [1, 16, 33, 128])
def test_the_rule_says_of_the_current_tile_what_the_package_does(driver: Driver, heads: int, tokens: int) -> None:
    module = driver.package.module
    tile, resident = driver.current(heads, tokens)
    assert driver.schedule(tile, resident, tokens, heads, 2048) == module._schedule(
        driver.facts, module.ALIGNED, tokens, heads, 2048, 0, False
    )
    assert CANDIDATE not in module.TILES


def test_a_wished_split_count_is_kept_as_far_as_blocks_allow(driver: Driver) -> None:
    tile, _ = driver.current(16, 1)
    for wished in (1, 2, 4, 8):
        assert driver.schedule(tile, 1, 1, 16, 2048, wished).num_splits == wished
    assert driver.schedule(tile, 1, 1, 16, tile.block_n, 8).num_splits == 1


def test_split_counts_stop_where_the_device_is_crowded() -> None:
    assert list(split_counts(blocks=32, programs=1, slots=132)) == [1, 2, 4, 8, 16, 32]
    assert list(split_counts(blocks=64, programs=132, slots=132)) == [1, 2, CROWDED]
    assert list(split_counts(blocks=64, programs=4096, slots=132)) == [1]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("heads", [5, 32, 128])
def test_candidates_fit_the_target(heads: int, target: object) -> None:
    chunks = make_plan(load(SPECS / "dsv32.yaml")).sparse.chunks
    assert hasattr(target, "shared_limit")
    tiles = candidate_tiles(heads, chunks, target)  # type: ignore[arg-type]
    assert tiles
    assert len(set(tiles)) == len(tiles)
    assert max(tile.block_h for tile in tiles) <= max(min(BLOCK_H), 2 * heads - 1)
    assert all(expected_shared(tile, chunks, target) <= target.shared_limit for tile in tiles)  # type: ignore[arg-type]


def test_both_attention_kernels_are_compiled_for_a_candidate() -> None:
    plan = make_plan(load(SPECS / "odd.yaml"))
    tile = candidate_tiles(12, plan.sparse.chunks, TARGETS["sm80"])[0]
    jobs = attention_jobs(plan, tile, TARGETS["sm80"])
    assert {job.kernel for job in jobs} == {"_sparse_fwd_kernel", "_sparse_split_kernel"}
    assert {job.target for job in jobs} == {"sm80"}


def test_a_file_that_lists_no_tiles_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    for text in ("", "{}x", '[{"block_h": 16}]', "[3]"):
        path.write_text(text)
        with pytest.raises(UsageError, match="takes a JSON list of tiles"):
            read_tiles(path)


def test_measurements_outlive_a_new_tile_table_but_not_a_new_kernel(tmp_path: Path) -> None:
    for name in ("_launch.py", "sparse_attention.py"):
        (tmp_path / name).write_text((SPECS.parent / "generated" / "dsv32" / name).read_text())
    before = kernels_hash(tmp_path)
    path = tmp_path / "sparse_attention.py"
    text = path.read_text()
    assert text.count(", 8, 2, ") > 1
    path.write_text("# another header\n" + text.replace(", 8, 2, ", ", 4, 3, "))
    assert kernels_hash(tmp_path) == before
    path.write_text(text.replace("tl.exp2", "tl.exp"))
    assert kernels_hash(tmp_path) != before


def test_a_folder_without_a_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no generated sparse attention"):
        load_package(tmp_path)
