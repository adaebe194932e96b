"""How calls are cut and merged: which number of splits the rule picks, and which merge follows."""

from __future__ import annotations

from pathlib import Path

import pytest
from checked_in import package_of

from mlagen.bench import load_package
from mlagen.bench.package import BenchPackage
from mlagen.plan.sm90.seesaw import SPARSE_DECODE, SPARSE_FWD
from mlagen.plan.splits import MAX_SPLITS

ROOT = Path(__file__).parents[2]
SLOWER = 1.03  # of a choice that counts as the best

# us of the sm90 kernel with its merge on an H100, topk 2048, d_qk 576: (tokens, heads): {splits: us}.
MEASURED = {
    (1, 128): {1: 57.4, 2: 32.4, 3: 26.6, 4: 20.2, 6: 18.1, 8: 14.3, 16: 11.6},
    (2, 64): {1: 58.4, 2: 32.9, 3: 26.9, 4: 20.5, 6: 18.2, 8: 14.5, 16: 11.7},
    (2, 128): {1: 58.6, 2: 33.7, 3: 28.3, 4: 21.4, 6: 18.9, 8: 15.3, 16: 13.5},
    (4, 64): {1: 56.8, 2: 32.6, 3: 27.7, 4: 21.1, 6: 18.9, 8: 15.8, 16: 15.0},
    (4, 128): {1: 58.5, 2: 33.6, 3: 28.3, 4: 21.8, 6: 20.1, 8: 17.8, 16: 20.5},
    (8, 64): {1: 59.2, 2: 34.6, 3: 29.6, 4: 23.4, 6: 22.0, 8: 19.8, 16: 23.2},
    (8, 128): {1: 59.6, 2: 35.5, 3: 30.9, 4: 25.3, 6: 24.9, 8: 25.2, 16: 33.8},
    (16, 64): {1: 60.6, 2: 37.7, 3: 33.9, 4: 29.4, 6: 30.5, 8: 31.0, 16: 39.6},
    (16, 128): {1: 61.8, 2: 40.1, 3: 37.8, 4: 36.0, 6: 47.6, 8: 44.5},
    (32, 64): {1: 64.2, 2: 46.3, 3: 45.6, 4: 44.5, 6: 55.8, 8: 54.2},
    (32, 128): {1: 65.6, 2: 55.1, 3: 71.4, 4: 65.4},
    (64, 64): {1: 72.8, 2: 67.5, 3: 85.3, 4: 81.3},
    (64, 128): {1: 78.3, 2: 99.6},
    (128, 64): {1: 104.3, 2: 127.4},
}
# The same of the kernel that dequantises fp8_ds_mla, on an H200, with the kernel that recomputes overflowed rows.
MEASURED_CACHE = {
    (1, 64): {1: 81.6, 2: 46.1, 3: 37.5, 4: 28.2, 5: 28.3, 6: 24.0, 8: 19.3, 16: 15.4},
    (1, 128): {1: 83.5, 2: 46.6, 3: 37.9, 4: 28.5, 5: 28.4, 6: 24.9, 8: 19.9, 16: 16.1},
    (4, 64): {1: 83.8, 2: 47.0, 3: 38.9, 4: 29.3, 5: 29.1, 6: 25.5, 8: 20.5, 16: 17.6},
    (4, 128): {1: 84.1, 2: 48.5, 3: 39.1, 4: 30.0, 5: 29.9, 6: 26.7, 8: 22.3, 16: 22.2},
    (8, 64): {1: 84.7, 2: 49.5, 3: 39.9, 4: 30.8, 5: 30.9, 6: 27.1, 8: 23.1, 16: 22.6},
    (8, 128): {1: 86.7, 2: 50.3, 3: 41.6, 4: 32.5, 5: 32.6, 6: 30.0, 8: 29.1, 16: 38.0},
    (16, 64): {1: 90.1, 2: 52.0, 3: 43.3, 4: 34.2, 5: 34.3, 6: 31.6, 8: 31.2, 16: 39.3},
    (16, 128): {1: 89.2, 2: 54.5, 3: 46.3, 4: 39.9, 5: 40.4, 6: 55.7, 8: 50.2, 16: 76.0},
    (32, 64): {1: 91.8, 2: 57.1, 3: 47.9, 4: 42.0, 5: 42.1, 6: 59.1, 8: 52.9, 16: 77.0},
    (32, 128): {1: 92.6, 2: 64.0, 3: 86.7, 4: 71.5, 5: 71.2, 6: 89.1, 8: 98.6},
    (64, 64): {1: 94.5, 2: 66.1, 3: 90.3, 4: 74.6, 5: 74.8, 6: 91.9, 8: 100.7},
    (64, 128): {1: 96.5, 2: 114.6, 3: 134.2, 4: 138.6},
    (128, 64): {1: 97.9, 2: 117.1, 3: 137.9, 4: 141.9},
    (128, 128): {1: 181.5, 2: 219.6},
}
# The same of the kernel of few heads, on an H200, with the partials of dsv32.
MEASURED_FEW = {
    (8, 16): {1: 42.8, 2: 26.2, 3: 21.8, 4: 17.6, 6: 15.1, 8: 13.0, 16: 12.0},
    (8, 32): {1: 53.6, 2: 31.4, 3: 26.0, 4: 20.7, 6: 18.2, 8: 15.9, 16: 14.7},
    (16, 16): {1: 43.8, 2: 28.0, 3: 23.1, 4: 18.4, 6: 16.7, 8: 15.7, 16: 18.8},
    (16, 32): {1: 54.6, 2: 32.7, 3: 27.5, 4: 22.2, 6: 20.2, 8: 18.9, 16: 25.0},
    (32, 16): {1: 46.9, 2: 29.4, 3: 25.6, 4: 22.9, 6: 29.3, 8: 26.4, 16: 31.8},
    (32, 32): {1: 55.9, 2: 35.3, 3: 30.4, 4: 27.0, 6: 38.7, 8: 34.1, 16: 45.0},
    (64, 16): {1: 47.2, 2: 37.2, 3: 47.4, 4: 40.8, 6: 44.4, 8: 44.7},
    (64, 32): {1: 58.4, 2: 42.5, 3: 59.1, 4: 50.8, 6: 59.5, 8: 62.7},
    (128, 16): {1: 62.5, 2: 69.4, 3: 74.5, 4: 73.1},
    (128, 32): {1: 69.5, 2: 81.5, 3: 92.6, 4: 96.0},
}


@pytest.fixture(scope="module")
def fp32() -> BenchPackage:
    """A package with fp32 partials, like those that were measured."""
    return load_package(package_of("hyv4"))


def sm90_schedule(
    package: BenchPackage,
    tokens: int,
    heads: int,
    *,
    batch_invariant: bool = False,
    cost: tuple[int, int] = SPARSE_FWD.cost,
):
    splits = package.module("_splits")
    facts = package.module("_launch").DeviceFacts("sm90", 132)
    blocks = 2048 // splits.SM90_TILE.block_n
    tiles = package.module("_tiles")
    tile, costs = splits.SM90_TILE, (tiles.Sm90Cost(tiles.ANY, *cost),)
    return splits.make_schedule(facts, "sm90", tile, splits.ALIGNED, tokens, heads, blocks, 0, batch_invariant, costs)


@pytest.mark.parametrize(("tokens", "heads"), MEASURED)
def test_the_rule_picks_the_fastest_splits_of_the_sm90_kernel(fp32: BenchPackage, tokens: int, heads: int) -> None:
    times = MEASURED[tokens, heads]
    assert times[sm90_schedule(fp32, tokens, heads).num_splits] <= SLOWER * min(times.values())


@pytest.mark.parametrize(("tokens", "heads"), MEASURED_CACHE)
def test_the_rule_picks_the_fastest_splits_of_the_dequantising_kernel(fp32: BenchPackage, tokens: int, heads: int):
    times = MEASURED_CACHE[tokens, heads]
    picked = sm90_schedule(fp32, tokens, heads, cost=SPARSE_DECODE.cost).num_splits
    assert times[picked] <= SLOWER * min(times.values())


@pytest.mark.parametrize(("tokens", "heads"), MEASURED_FEW)
def test_the_rule_picks_the_fastest_splits_of_the_kernel_of_few_heads(tokens: int, heads: int) -> None:
    package = load_package(ROOT / "generated" / "dsv32")
    cost = next(cost for cost in package.module("_tiles").SPARSE_FWD_SM90_COSTS if heads <= cost.max_heads)
    times = MEASURED_FEW[tokens, heads]
    picked = sm90_schedule(package, tokens, heads, cost=cost[1:]).num_splits
    assert times[picked] <= SLOWER * min(times.values())


def test_batch_invariant_splits_do_not_depend_on_the_batch(fp32: BenchPackage) -> None:
    sizes = [(tokens, heads) for tokens in (1, 7, 500) for heads in (1, 128)]
    assert len({sm90_schedule(fp32, *size, batch_invariant=True).split_size for size in sizes}) == 1


def test_warm_splits_reach_every_merge(fp32: BenchPackage) -> None:
    splits = fp32.module("_splits")
    reached = {splits.combine_tile(number) for number in splits.WARM_SPLITS if number > 1}
    assert {splits.combine_tile(number) for number in range(2, MAX_SPLITS + 1)} == reached == set(splits.COMBINE_TILES)
    assert all(splits.combine_tile(number).block_s >= number for number in splits.WARM_SPLITS)
