"""The index kernels' numbers: a tile for every call, and shared memory as the compiler takes it."""

import re

import pytest
from enumerated import Enumerated, check_every_list, enumerate_plan, kernels_in
from plan_specs import make_spec

from mlagen.compile import check_limits, compile_jobs
from mlagen.plan import make_plan
from mlagen.plan.families.indices import make_index_plan

WRAPPERS = (
    "compute_global_topk_indices_and_lens",
    "combine_topk_swa_indices",
    "triton_convert_req_index_to_global_index",
)

OPTIONS = "_map_with_options_kernel"


def every_tile(index):
    return {*(row.tile for row in index.tiles), index.split, index.unaligned, index.options}


def holds(row, tokens, indices):
    return all(most is None or size <= most for most, size in ((row.max_tokens, tokens), (row.max_indices, indices)))


def test_every_call_has_a_tile_and_every_row_a_call():
    rows = make_index_plan().tiles
    sizes = [0, 1, 128, 512, 513, 1024, 1025, 2048, 2176, 4096, 32768, 2**31 - 1]
    taken = {next(row for row in rows if holds(row, tokens, indices)) for tokens in sizes for indices in sizes}
    assert taken == set(rows)


def test_tiles_are_whole_vectors_of_every_thread():
    index = make_index_plan()
    for tile in every_tile(index):
        assert tile.block_n % (4 * 32 * tile.num_warps) == 0


def test_few_tokens_take_one_step_up_to_the_widest_tile():
    for row in make_index_plan().tiles:
        if row.max_tokens is not None:
            assert row.max_indices is None or row.tile.block_n >= row.max_indices


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Enumerated:
    plan = make_plan(make_spec(wrappers=WRAPPERS, targets=("sm90", "gfx942")))
    return enumerate_plan(plan, tmp_path_factory.mktemp("index"))


def test_variants_are_of_each_tile_and_both_alignments(mapped):
    check_every_list(mapped)
    assert {module for module, _ in mapped.kernels} == {"_indices_kernels"}
    for target, jobs in mapped.jobs.items():
        assert {dict(job.constexprs)["PDL"] for job in jobs} == {target == "sm90", False}  # few and many programs
        for kernel in ("_map_indices_kernel", "_combine_indices_kernel"):
            assert {dict(job.constexprs)["ALIGNMENT"] for job in mapped.of(target, kernel)} == {16, 1}
        assert {dict(job.constexprs)["COMPACT"] for job in mapped.of(target, OPTIONS)} == {True, False}
        assert {dict(job.constexprs)["BLOCK_N"] for job in mapped.of(target, OPTIONS)} == {
            make_index_plan().options.block_n
        }
        assert len(mapped.of(target, OPTIONS)) == 3 * (2 if target == "sm90" else 1)
        tiles = {(dict(job.constexprs)["BLOCK_N"], job.num_warps) for job in mapped.of(target, "_map_indices_kernel")}
        index = make_index_plan()
        assert tiles == {(tile.block_n, tile.num_warps) for tile in every_tile(index)}


@pytest.mark.parametrize(
    ("wrapper", "kernels"),
    [
        (WRAPPERS[0], {"_map_indices_kernel", OPTIONS}),
        (WRAPPERS[1], {"_combine_indices_kernel", "_combine_compact_kernel"}),
        (WRAPPERS[2], {"_map_indices_kernel", OPTIONS}),
    ],
)
def test_a_kernel_that_no_wrapper_launches_is_not_there(wrapper, kernels, tmp_path):
    found = enumerate_plan(make_plan(make_spec(wrappers=(wrapper,), targets=("sm90",))), tmp_path)
    assert found.kernels == kernels_in(found) == {("_indices_kernels", kernel) for kernel in kernels}
    text = (found.folder / "indices.py").read_text()
    assert ("is_valid_token" in text) == (wrapper == WRAPPERS[0])


@pytest.mark.compilation
def test_shared_memory_equals_the_plans(mapped, tmp_path):
    index = make_index_plan()
    expected = {(tile.block_n, tile.num_warps): tile.expected_shared for tile in every_tile(index)}
    # Of each tile the variant that waits, or begins by itself: a program holds the same.
    jobs = {
        (job.kernel, dict(job.constexprs).get("BLOCK_N"), job.num_warps): job for job in reversed(mapped.jobs["sm90"])
    }
    for taken in compile_jobs(mapped.folder, [*jobs.values()], workers=1, cache_dir=tmp_path):
        assert check_limits([taken]) == []
        if taken.kernel == "_combine_indices_kernel":
            assert taken.shared == index.combine_expected_shared
        elif taken.kernel in (OPTIONS, "_combine_compact_kernel"):
            assert 0 < taken.shared <= 4 * 32  # values that the warps of a scan, or of a maximum, hand each other
        else:
            assert taken.shared == expected[_block_n(taken), taken.num_warps]


def _block_n(taken):
    return int(re.search(r"BLOCK_N=(\d+)", taken.variant)[1])
