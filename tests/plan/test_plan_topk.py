"""The top-k kernels' numbers: a tile for every call that can hold it, and the variants that there are."""

import itertools

import pytest
from enumerated import Enumerated, check_every_list, enumerate_plan, kernels_in
from plan_specs import make_spec

from mlagen.plan import TARGETS, make_plan
from mlagen.plan.families.topk import COLUMNS, TopkPlan, make_topk_plan
from mlagen.plan.sm90.topk import BINS, SHARED_ROW, make_topk_sm90
from mlagen.plan.targets import WARP_SIZE

SELECT, MERGE = ("_topk_kernels", "_topk_kernel"), ("_topk_kernels", "_merge_kernel")
SM90 = {("_topk_sm90", f"_topk{collect}_sm90_kernel") for collect in ("", "_collect")}


def holds(row, columns, k):
    return all(most is None or size <= most for most, size in ((row.max_columns, columns), (row.max_k, k)))


def test_every_call_has_a_tile_that_holds_it():
    plan = make_topk_plan()
    sizes = [0, 1, 4096, 4097, 8192, 8193, 16384, 16385, 1 << 20, 1 << 30]
    for columns in sizes:
        for k in (1, 512, 2048, plan.most_k):
            tile = next(row.tile for row in plan.tiles if holds(row, columns, k))
            assert tile.is_long or columns <= tile.columns
            assert min(k, columns) <= tile.most_k
            assert any(row.tile.is_long and holds(row, columns, k) for row in plan.tiles)  # of two bytes, or unaligned


def test_counts_of_a_tile_fit_half_of_32_bits():
    plan = make_topk_plan()
    for tile in (*(row.tile for row in plan.tiles), *(tile for _, tile in plan.merge_tiles)):
        assert tile.reps * tile.spans * COLUMNS < 1 << 15
        assert tile.reps & (tile.reps - 1) == tile.spans & (tile.spans - 1) == 0


def test_a_merge_of_parts_that_are_full_has_fewer_candidates():
    plan = make_topk_plan()
    assert [most for most, _ in plan.merge_tiles][-1] == plan.most_k
    for most, tile in plan.merge_tiles:
        assert most <= tile.block_k <= tile.reps * tile.spans * COLUMNS // 2


def sm90_plan():
    plan = make_topk_sm90(make_spec(wrappers=tuple(TopkPlan.SELECTS), targets=("sm90",)), TopkPlan.SELECTS)
    assert plan is not None
    return plan


def test_every_call_has_an_sm90_tile_whose_candidates_fit():
    plan = sm90_plan()
    for rows in (1, 4, 5, 16, 32, 33, 264, 265, 1 << 20):
        for columns in (0, 1, 4096, 4097, 8192, 8193, 1 << 16, 1 << 17, 1 << 19, 1 << 30):
            for k in (1, 512, 2048, 4096):
                tile = next(row.tile for row in plan.tiles if holds(row, columns, k) and rows <= (row.max_rows or rows))
                threads = tile.warps * WARP_SIZE
                assert tile.capacity % (threads * 4 * tile.halves) == 0
                assert columns <= tile.capacity or 2 * k <= tile.capacity
                assert threads % SHARED_ROW == 0
                assert tile.parts == 1 or rows * tile.parts <= plan.pdl_rows


def test_words_of_shared_memory_lie_apart_and_fit():
    plan = sm90_plan()
    assert 2 * WARP_SIZE <= plan.found < plan.bins
    for tile in (row.tile for row in plan.tiles):
        words = plan.bins + BINS * WARP_SIZE * tile.warps + 2 * tile.capacity
        assert 4 * words <= plan.shared_bytes(tile, is_long=True) <= TARGETS["sm90"].shared_limit
        assert plan.bins % 4 == 0  # bins are read by 16 bytes


@pytest.mark.parametrize("changes", [{"backend": "triton"}, {"targets": ("sm80", "sm100")}])
def test_a_spec_may_leave_the_sm90_kernel_out(changes):
    spec = make_spec(wrappers=tuple(TopkPlan.SELECTS), **changes)
    assert make_topk_sm90(spec, TopkPlan.SELECTS) is None
    assert make_plan(spec).find(TopkPlan).sm90_modules == ()


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Enumerated:
    plan = make_plan(make_spec(wrappers=tuple(TopkPlan.WRAPPERS), targets=("sm90", "gfx942")))
    return enumerate_plan(plan, tmp_path_factory.mktemp("topk"))


def test_variants_are_of_each_tile_dtype_and_alignment(listed):
    check_every_list(listed)
    assert listed.kernels == {SELECT, MERGE, *SM90}
    plan = make_topk_plan()
    every = {(row.tile.reps, row.tile.spans) for row in plan.tiles}
    long = {(row.tile.reps, row.tile.spans) for row in plan.tiles if row.tile.is_long}
    for target in set(listed.jobs) - {"sm90"}:  # which has a kernel of its own
        found: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for job in listed.of(target, SELECT[1]):
            given = dict(job.constexprs)
            assert job.num_warps == given["SPANS"]
            found.setdefault((given["ITEMSIZE"], given["ALIGNMENT"]), set()).add((given["REPS"], given["SPANS"]))
        assert found == {(4, 16): every, (4, 1): long, (2, 16): long, (2, 1): long}
    for target in listed.jobs:
        assert {dict(job.constexprs)["BLOCK_K"] for job in listed.of(target, MERGE[1])} == {512, 2048, 4096}


def test_variants_on_sm90_are_what_calls_of_some_size_launch(listed):
    assert listed.of("sm90", SELECT[1]) == []
    topk, tiles = listed.module("_topk"), listed.module("_tiles")
    facts = listed.module("_launch").facts_of("sm90")
    forms = set()
    for rows in (1, 4, 5, 16, 17, 33, 34, 66, 67, 264, 265, 5000):
        for columns in (1, 4096, 4097, 6144, 6145, 8192, 8193, 65536, 65537, 1 << 19, (1 << 19) + 1, 1 << 30):
            for k in (1, 2048, 2049, 4096):
                kernel, tile = topk.schedule(facts, rows, columns, k)
                is_long = columns > tile.capacity
                assert kernel == ("sm90_collect" if is_long and tile.parts > 1 else "sm90")
                forms.add((is_long, rows <= tiles.TOPK_SM90_PDL_ROWS, tile))
    found = set()
    for job in listed.of("sm90", "_topk_sm90_kernel"):
        given = dict(job.constexprs)
        assert given["WARPS"] == job.num_warps
        shape = (given["WARPS"], given["HALVES"], given["CAPACITY"], job.registers, given["PARTS"])
        found.add((given["ITEMSIZE"], given["IS_LONG"], given["PDL"], shape))
    expected = set()
    for size, (is_long, few, tile) in itertools.product((2, 4), forms):
        registers = None if is_long and size == 2 else tile.registers
        expected.add((size, is_long, few, (*tile[:3], registers, tile.parts if is_long else 1)))
    assert found == expected
    assert len(listed.of("sm90", *(name for _, name in SM90))) == 28


@pytest.mark.parametrize("wrapper", TopkPlan.WRAPPERS)
def test_only_kernels_of_the_specs_wrappers_are_variants(wrapper, tmp_path):
    found = enumerate_plan(make_plan(make_spec(wrappers=(wrapper,), targets=("sm80", "sm90"))), tmp_path)
    assert found.kernels == ({MERGE} if wrapper == TopkPlan.MERGE else {SELECT, *SM90})
    assert kernels_in(found) == found.kernels | {SELECT, MERGE}  # in one module, which is the same in every package
