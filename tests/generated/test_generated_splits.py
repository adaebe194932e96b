"""How calls are cut and merged: which number of splits the rule picks, which merge follows, and who waits for whom."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mlagen.backends import compile_jobs
from mlagen.bench import load_package
from mlagen.bench.package import BenchPackage
from mlagen.plan import TARGETS, load_plan
from mlagen.plan.splits import MAX_SPLITS

ROOT = Path(__file__).parents[2]
SLOWER = 1.03  # of a choice that counts as the best

# us of the Hopper kernel with its merge on an H100, topk 2048, d_qk 576: (tokens, heads): {splits: us}.
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


@pytest.fixture(scope="module")
def dsv32() -> BenchPackage:
    return load_package(ROOT / "generated" / "dsv32")


def hopper_schedule(package: BenchPackage, tokens: int, heads: int, *, batch_invariant: bool = False):
    splits = package.module("_splits")
    facts = package.module("_launch").DeviceFacts("sm90", 132)
    blocks = 2048 // splits.HOPPER_TILE.block_n
    return splits.make_schedule(facts, splits.HOPPER_TILE, splits.ALIGNED, tokens, heads, blocks, 0, batch_invariant)


@pytest.mark.parametrize(("tokens", "heads"), MEASURED)
def test_the_rule_picks_the_fastest_splits_of_the_hopper_kernel(dsv32: BenchPackage, tokens: int, heads: int) -> None:
    times = MEASURED[tokens, heads]
    assert times[hopper_schedule(dsv32, tokens, heads).num_splits] <= SLOWER * min(times.values())


def test_batch_invariant_splits_do_not_depend_on_the_batch(dsv32: BenchPackage) -> None:
    sizes = [(tokens, heads) for tokens in (1, 7, 500) for heads in (1, 128)]
    assert len({hopper_schedule(dsv32, *size, batch_invariant=True).split_size for size in sizes}) == 1


def test_warm_splits_reach_every_merge(dsv32: BenchPackage) -> None:
    splits = dsv32.module("_splits")
    reached = {splits.merge_tile(number) for number in splits.WARM_SPLITS if number > 1}
    assert {splits.merge_tile(number) for number in range(2, MAX_SPLITS + 1)} == reached == set(splits.MERGE_TILES)
    assert all(splits.merge_tile(number).block_s >= number for number in splits.WARM_SPLITS)


def ptx(package: BenchPackage, kernel: str, target: str) -> str:
    job = next(
        job
        for job in compile_jobs(load_plan(ROOT / "specs" / "dsv32.yaml"))
        if (job.kernel, job.target) == (kernel, target)
    )
    fn = getattr(package.module(job.module), kernel)
    source = ASTSource(
        fn=fn,
        signature={name: dict(job.signature).get(name, "constexpr") for name in fn.arg_names},
        constexprs={(fn.arg_names.index(name),): value for name, value in job.constexprs},
    )
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", TARGETS[target].arch, 32), options=options).asm["ptx"]


def test_the_merge_waits_for_the_splits_before_it_reads(dsv32: BenchPackage) -> None:
    merge = ptx(dsv32, "_merge_splits_kernel", "sm90")
    assert 0 < merge.index("griddepcontrol.wait") < merge.index("ld.global")


def test_splits_let_the_merge_begin_when_they_begin_to_store(dsv32: BenchPackage) -> None:
    split = ptx(dsv32, "_sparse_split_kernel", "sm90")
    begin = split.index("griddepcontrol.launch_dependents")
    assert split.rindex("mma") < begin < split.index("st.global")


@pytest.mark.parametrize("kernel", ["_merge_splits_kernel", "_sparse_split_kernel"])
def test_older_targets_launch_one_kernel_after_the_other(dsv32: BenchPackage, kernel: str) -> None:
    assert "griddepcontrol" not in ptx(dsv32, kernel, "sm80")
