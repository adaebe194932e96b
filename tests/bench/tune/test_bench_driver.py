from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_packages import spec_in
from checked_in import spec_of

from mlagen.bench.package import BenchPackage, kernels_hash, load_package
from mlagen.bench.tune.candidates import BLOCK_H, candidate_tiles, read_tiles, unfit_tiles
from mlagen.bench.tune.choose import Regime, runs_sm90
from mlagen.bench.tune.driver import CROWDED, DenseDecodeDriver, Driver, split_counts
from mlagen.bench.tune.tunable import DENSE_DECODE, SPARSE_DECODE, SPARSE_FWD, Tunable, tunables_of
from mlagen.emit import apply, compare, render
from mlagen.errors import UsageError
from mlagen.plan import (
    TARGETS,
    DenseDecodePlan,
    Plan,
    Sm90Row,
    SparseFwdPlan,
    Target,
    Tile,
    load_plan,
    make_plan,
)
from mlagen.plan.tiles.tuned import tuned_path
from mlagen.spec import Spec, load

SPECS = Path(__file__).parents[3] / "specs"


@pytest.fixture
def driver(dsv32: BenchPackage) -> Driver:
    return Driver(dsv32, "sparse_fwd", dsv32.module("_launch").DeviceFacts("sm90", 132))


@pytest.fixture
def sm90_driver(dsv32: BenchPackage) -> Driver:
    return Driver(dsv32, "sparse_fwd", dsv32.module("_launch").DeviceFacts("sm90", 132, sm90=True))


@pytest.mark.parametrize("tokens", [1, 7, 128, 4096])
@pytest.mark.parametrize("heads", [1, 16, 33, 128])
def test_the_rule_says_of_the_current_tile_what_the_package_does(driver: Driver, heads: int, tokens: int) -> None:
    module = driver.package.module("sparse_fwd")
    tile, resident = driver.current(heads, tokens)
    own = module.schedule(driver.facts, module.ALIGNED, tokens, heads, 2048)
    assert driver.schedule(tile, resident, tokens, heads, [2048]) == own


@pytest.mark.parametrize("name", ["sparse_fwd", "sparse_decode"])
def test_the_sm90_kernel_runs_where_the_package_runs_it(dsv32_fp8: BenchPackage, name: str) -> None:
    module = dsv32_fp8.module(name)
    driver = Driver(dsv32_fp8, name, dsv32_fp8.module("_launch").DeviceFacts("sm90", 132, sm90=True))
    assert driver.sm90 is not None
    seen = set()
    for heads, tokens in itertools.product((1, 16, 17, 32, 33, 64, 65, 128), (1, 2, 3, 4, 15, 16, 4096)):
        own = module.schedule(driver.facts, module.ALIGNED, tokens, heads, 2048, can_sm90=True)
        portable = own.kernel == "portable"
        assert runs_sm90(driver.sm90_rows, Regime(0, heads, tokens)) != portable
        schedule = driver.schedule(driver.sm90, 7, tokens, heads, [2048])
        swap_ab = name == "sparse_fwd" and heads <= 32
        assert schedule.kernel == ("sm90_swap_ab" if swap_ab else "sm90")
        assert schedule == own or portable
        seen.add(own.kernel)
    assert seen == {"portable", "sm90", *(["sm90_swap_ab"] if name == "sparse_fwd" else [])}


def test_the_sm90_kernels_tile_is_the_plans(sm90_driver: Driver) -> None:
    plan = make_plan(load(SPECS / "dsv32.yaml"))
    assert plan.of(SparseFwdPlan).sm90 is not None
    assert sm90_driver.sm90 == plan.of(SparseFwdPlan).sm90.tile
    assert sm90_driver.sm90 not in candidate_tiles(SPARSE_FWD, plan, 128, TARGETS["sm90"])
    assert sm90_driver.schedule(plan.of(SparseFwdPlan).sm90.tile, 1, 1, 128, [2048], 4).num_splits == 4


def test_other_devices_know_no_sm90_kernel(driver: Driver, dsv32: BenchPackage) -> None:
    assert driver.sm90 is None
    assert driver.sm90_rows  # a Triton without Gluon: the table stays
    other = Driver(dsv32, "sparse_fwd", dsv32.module("_launch").DeviceFacts("sm80", 108))
    assert (other.sm90, other.sm90_rows) == (None, ())


def test_a_wished_split_count_is_kept_as_far_as_blocks_allow(driver: Driver) -> None:
    tile, _ = driver.current(16, 1)
    for wished in (1, 2, 4, 8):
        assert driver.schedule(tile, 1, 1, 16, [2048], wished).num_splits == wished
    assert driver.schedule(tile, 1, 1, 16, [tile.block_n], 8).num_splits == 1


def test_lists_of_indices_are_each_filled_up_to_whole_steps() -> None:
    package = load_package(SPECS.parent / "generated" / "dsv4_flash")
    driver = Driver(package, "sparse_decode", package.module("_launch").DeviceFacts("sm90", 132))
    tile, _ = driver.current(16, 1)
    assert driver.schedule(tile, 1, 1, 16, [1, tile.block_n + 1], 8).num_splits == 3


@pytest.mark.parametrize("splits", [1, 4, 6])
def test_a_call_runs_by_the_schedule_it_is_given(sm90_driver: Driver, splits: int) -> None:
    module, launch = (sm90_driver.package.module(name) for name in ("sparse_fwd", "_launch"))

    def made() -> object:
        facts = launch.device_facts(torch.device("cpu"))
        return module.schedule(facts, module.ALIGNED, 3, 40, 2048, can_sm90=True)

    with launch.planned_for(sm90_driver.facts):
        own = made()
        for tile in (Tile(16, 32, 8, 3, True), sm90_driver.sm90):
            assert tile is not None
            schedule = sm90_driver.schedule(tile, 1, 3, 40, [2048], splits)
            assert sm90_driver.scheduled(schedule, made)() == schedule != own
            assert made() == own
        with pytest.raises(ZeroDivisionError):
            sm90_driver.scheduled(schedule, lambda: 1 // 0)()
        assert made() == own


@pytest.fixture(params=["dsv3", "dots3_sliding"])
def dense_decode_driver(request: pytest.FixtureRequest) -> DenseDecodeDriver:
    package: BenchPackage = request.getfixturevalue(request.param)
    return DenseDecodeDriver(package, "dense_decode", package.module("_launch").DeviceFacts("sm90", 132))


DENSE_DECODE_SIZES = list(itertools.product((5, 16, 32, 128), (1, 16, 128)))


@pytest.mark.parametrize(("rows", "requests"), DENSE_DECODE_SIZES)
def test_the_schedule_of_the_current_tile_is_the_packages_own(
    dense_decode_driver: DenseDecodeDriver, rows: int, requests: int
) -> None:
    """Whether rows are heads of one query token or of two."""
    module = dense_decode_driver.package.module("dense_decode")
    window = () if dense_decode_driver.package.name.startswith("dsv3") else (module.WINDOW,)
    tile, resident = dense_decode_driver.current(rows, requests)
    schedule = dense_decode_driver.schedule(tile, resident, requests, rows, [4000])
    assert dense_decode_driver.splits_of(schedule) == schedule.programs > 1
    for s_q in (1, 2) if rows % 2 == 0 else (1,):
        sizes = (requests, s_q, rows // s_q, 1, 64, 4032)
        assert schedule == module.schedule(dense_decode_driver.facts, module.ALIGNED, *sizes, *window, False)


@pytest.mark.parametrize(("rows", "requests"), DENSE_DECODE_SIZES)
def test_programs_that_may_be_best_are_found_again(
    dense_decode_driver: DenseDecodeDriver, rows: int, requests: int
) -> None:
    for tile in (Tile(16, 32, 8, 3, True), Tile(64, 32, 8, 2, False)):
        wishes = dense_decode_driver.wishes(tile, 1, requests, rows, [32768])
        assert wishes == sorted(set(wishes), reverse=True)
        for programs in wishes:
            schedule = dense_decode_driver.schedule(tile, 1, requests, rows, [32768], programs)
            assert schedule.programs == programs
            assert schedule.tile[:5] == (
                tile.block_h,
                tile.block_n,
                tile.num_warps,
                tile.num_stages,
                tile.indices_ahead,
            )
        ruled = {dense_decode_driver.schedule(tile, each, requests, rows, [32768]).programs for each in (1, 2, 3, 4)}
        assert ruled == set(wishes)


def test_a_tile_that_does_not_divide_a_page_makes_way_for_the_small_one(dsv3: BenchPackage) -> None:
    driver = DenseDecodeDriver(dsv3, "dense_decode", dsv3.module("_launch").DeviceFacts("sm90", 132))
    small = dsv3.module("_tiles").DENSE_DECODE_UNALIGNED_TILES["sm90"]
    assert driver.schedule(Tile(16, 128, 8, 2, True), 1, 16, 16, [4096]).tile == small
    plan = make_plan(load(SPECS / "dsv3.yaml"))
    assert {tile.block_n for tile in candidate_tiles(DENSE_DECODE, plan, 128, TARGETS["sm90"])} == {16, 32, 64}


def test_every_kernel_of_dense_attention_is_launched_by_its_smallest_call(
    dense_decode_driver: DenseDecodeDriver,
) -> None:
    (schedule,) = dense_decode_driver.smallest(Tile(64, 64, 8, 2, False), [4096])
    assert schedule.programs > 1  # the merge too


@pytest.fixture(scope="module")
def dsv3_given(tmp_path_factory: pytest.TempPathFactory) -> BenchPackage:
    """DeepSeek V3's dense attention. A tuned file gives the sm90 kernel some of its calls."""
    folder = tmp_path_factory.mktemp("specs")
    (folder / "dsv3.yaml").write_text((SPECS / "dsv3.yaml").read_text())
    tuned = tuned_path("dsv3", "sm90", folder)
    tuned.parent.mkdir(parents=True)
    fits = load_plan(folder / "dsv3.yaml").fits["dense_decode"]
    calls = "[{max_rows: 32}, {max_rows: 64, min_requests: 16}, {min_requests: 2}]"
    tuned.write_text(f"dense_decode_sm90: {calls}\nfits: {{dense_decode: {fits}}}\n")
    apply(compare(render(load_plan(folder / "dsv3.yaml")), folder / "dsv3_given_now"))
    return load_package(folder / "dsv3_given_now")


def dense_decode_sm90_driver(package: BenchPackage) -> DenseDecodeDriver:
    return DenseDecodeDriver(package, "dense_decode", package.module("_launch").DeviceFacts("sm90", 132, sm90=True))


def test_the_sm90_kernel_of_dense_attention_runs_where_the_package_runs_it(dsv3_given: BenchPackage) -> None:
    driver, module = dense_decode_sm90_driver(dsv3_given), dsv3_given.module("dense_decode")
    assert driver.sm90 is not None
    seen = set()
    for rows, requests in itertools.product((16, 32, 33, 64, 65, 128), (1, 2, 15, 16, 128)):
        own = module.schedule(driver.facts, module.ALIGNED, requests, 1, rows, 1, 64, 4032, False, True)
        assert runs_sm90(driver.sm90_rows, Regime(0, rows, requests)) == (own.kernel != "portable")
        schedule = driver.schedule(driver.sm90, 7, requests, rows, [4000])
        assert schedule.kernel == ("sm90_swap_ab" if rows <= 32 else "sm90")
        assert schedule == own or own.kernel == "portable"
        assert driver.wishes(driver.sm90, 1, requests, rows, [4000]) == [schedule.programs]
        assert driver.schedule(driver.sm90, 1, requests, rows, [4000], 5) == schedule
        assert driver.current(rows, requests)[0] != driver.sm90
        seen.add(own.kernel)
    assert seen == {"portable", "sm90"}  # which its table gives no call of up to 32 rows
    (schedule,) = driver.smallest(driver.sm90, [4096])
    assert schedule.kernel == "sm90_swap_ab"
    assert schedule.programs > 1  # the merge too


def test_the_sm90_kernel_of_dense_attention_takes_pages_whose_elements_it_can_count(dsv3: BenchPackage) -> None:
    module, facts = dsv3.module("dense_decode"), dense_decode_sm90_driver(dsv3).facts
    most = (1 << 31) // 576 // 64 * 64
    taken = [module._can_sm90(facts, module.ALIGNED, size) for size in (64, 480, 53, most, most + 64)]
    assert taken == [True, False, False, True, False]


def test_the_sm90_kernel_of_dense_attention_is_judged_where_the_plan_gives_it_no_call(dsv3: BenchPackage) -> None:
    sm90 = load_plan(SPECS / "dsv3.yaml").of(DenseDecodePlan).sm90
    assert sm90 is not None
    driver = dense_decode_sm90_driver(dsv3)
    assert driver.sm90 == sm90.tile
    assert driver.sm90_rows == sm90.rows == (Sm90Row(16, 1), Sm90Row(32, 2), Sm90Row(None, 1))
    assert driver.schedule(driver.sm90, 1, 1, 16, [4096]).kernel == "sm90_swap_ab"


def test_pages_that_the_sm90_kernel_does_not_take_are_tuned_without_it(dsv3: BenchPackage) -> None:
    cache = {**dsv3.spec["cache"], "block_size": 32}
    driver = dense_decode_sm90_driver(replace(dsv3, spec={**dsv3.spec, "cache": cache}))
    assert driver.sm90 is None
    assert driver.sm90_rows  # which stay


def test_a_window_knows_no_sm90_kernel(dots3_sliding: BenchPackage) -> None:
    driver = DenseDecodeDriver(dots3_sliding, "dense_decode", dots3_sliding.module("_launch").DeviceFacts("sm90", 132))
    assert (driver.sm90, driver.sm90_rows) == (None, ())


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_programs_may_hold_fewer_rows_than_a_call_has(rows: int) -> None:
    plan = make_plan(load(SPECS / "dsv3.yaml"))
    tiles = candidate_tiles(DENSE_DECODE, plan, rows, TARGETS["sm90"])
    assert {tile.block_h for tile in tiles} == {size for size in BLOCK_H if size <= rows}


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
def test_tiles_that_spill_beside_the_bounds_of_a_window_are_no_candidates(target: str) -> None:
    spec = load(spec_of("dsv3"))
    windowed = Spec.model_validate(spec.model_dump() | {"attention": {"kind": "dense", "window": 512}})
    without, beside = (
        candidate_tiles(DENSE_DECODE, make_plan(each), 128, TARGETS[target]) for each in (spec, windowed)
    )
    missing = set(without) - set(beside)
    assert set(beside) <= set(without)
    assert {(tile.block_h, tile.block_n) for tile in missing} == ({(64, 64)} if target == "sm90" else set())


def test_the_kernel_of_dense_attention_is_compiled_for_a_candidate(tmp_path: Path) -> None:
    plan = make_plan(load(SPECS / "dsv3.yaml"))
    tile = Tile(16, 64, 8, 3, False)
    # And not the small tile, which would spoil every candidate.
    (job,) = DENSE_DECODE.jobs(plan, [tile], TARGETS["sm90"], tmp_path / "dsv3")[tile]
    assert (job.kernel, job.target, job.num_warps, job.num_stages) == ("_dense_decode_kernel", "sm90", 8, 3)
    blocks = dict(job.constexprs)
    assert (blocks["BLOCK_H"], blocks["BLOCK_N"], blocks["WHOLE_PAGES"]) == (16, 64, True)


def test_split_counts_stop_where_the_device_is_crowded() -> None:
    assert list(split_counts(blocks=32, programs=1, slots=132)) == [1, 2, 4, 8, 16, 32]
    assert list(split_counts(blocks=64, programs=132, slots=132)) == [1, 2, CROWDED]
    assert list(split_counts(blocks=64, programs=4096, slots=132)) == [1]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("heads", [5, 32, 128])
def test_candidates_fit_the_target(heads: int, target: Target) -> None:
    plan = make_plan(load(SPECS / "dsv32.yaml"))
    tiles = candidate_tiles(SPARSE_FWD, plan, heads, target)
    assert tiles
    assert len(set(tiles)) == len(tiles)
    assert max(tile.block_h for tile in tiles) <= max(min(BLOCK_H), 2 * heads - 1)
    assert all(SPARSE_FWD.row(plan, tile, target).expected_shared <= target.shared_limit for tile in tiles)


def test_both_attention_kernels_are_compiled_for_each_candidate(tmp_path: Path) -> None:
    plan = make_plan(load(spec_of("odd")))
    tiles = candidate_tiles(SPARSE_FWD, plan, 12, TARGETS["sm80"])[:3]
    found = SPARSE_FWD.jobs(plan, [*tiles, tiles[0]], TARGETS["sm80"], tmp_path / "odd")
    assert list(found) == tiles
    for tile, jobs in found.items():
        assert {job.kernel for job in jobs} == {"_sparse_fwd_kernel", "_sparse_fwd_split_kernel"}
        assert {job.target for job in jobs} == {"sm80"}
        for job in jobs:
            given = dict(job.constexprs)
            assert (given["ALIGNMENT"], given["INDEX_GROUP"]) == (16, 16)
            assert (given["BLOCK_H"], given["BLOCK_N"], given["INDICES_AHEAD"]) == (
                tile.block_h,
                tile.block_n,
                tile.indices_ahead,
            )
            assert (job.num_warps, job.num_stages) == (tile.num_warps, tile.num_stages)


@pytest.mark.compilation
def test_a_candidate_that_breaks_no_limit_is_fit_and_one_that_spills_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plan = make_plan(spec_in(tmp_path, ["triton_mla_sparse_attention"], dims=(64, 16, 64)))
    fits, spills = Tile(16, 16, 4, 2, True), Tile(64, 64, 1, 2, False)
    done: list[object] = []
    unfit = unfit_tiles(SPARSE_FWD, plan, (fits, spills), TARGETS["sm90"], done.append)
    assert sorted(map(str, done)) == sorted(map(str, (fits, spills)))
    assert list(unfit) == [spills]
    assert "spills inside loops" in unfit[spills]


@pytest.fixture
def v4(tmp_path: Path) -> Plan:
    """The plan of a spec of DeepSeek V4's kind."""
    wrappers = ["flash_mla_with_kvcache"]
    return make_plan(spec_in(tmp_path, wrappers, "ue8m0_v4", "ue8m0_v4", dims=(448, 64, 512), topk=512, window=128))


@pytest.mark.parametrize("target", ["sm90", "sm80", "gfx942"])
def test_candidates_of_attention_over_a_cache_fit_the_target(v4: Plan, target: str) -> None:
    tiles = candidate_tiles(SPARSE_DECODE, v4, 64, TARGETS[target])
    assert tiles
    for tile in tiles:
        assert SPARSE_DECODE.row(v4, tile, TARGETS[target]).expected_shared <= TARGETS[target].shared_limit


@pytest.mark.parametrize(("kernels", "wrapper"), [(SPARSE_FWD, "flash_mla_sparse_fwd"), (SPARSE_DECODE, None)])
def test_a_rows_figures_are_those_of_the_plan(v4: Plan, kernels: Tunable, wrapper: str | None) -> None:
    plan = make_plan(v4.spec.model_copy(update={"wrappers": (wrapper,)})) if wrapper else v4
    for name, rows in plan.of(kernels.family).tiles:
        for row in rows:
            assert kernels.row(plan, row.tile, TARGETS[name], row.reason, row.max_heads) == replace(row, tritons=None)


def test_both_kernels_over_a_cache_are_compiled_for_a_candidate(v4: Plan, tmp_path: Path) -> None:
    tile = candidate_tiles(SPARSE_DECODE, v4, 64, TARGETS["sm90"])[0]
    jobs = SPARSE_DECODE.jobs(v4, [tile], TARGETS["sm90"], tmp_path / "package")[tile]
    assert {job.kernel for job in jobs} == {"_sparse_decode_kernel", "_sparse_decode_split_kernel"}
    assert {job.target for job in jobs} == {"sm90"}
    assert {dict(job.constexprs)["BLOCK_N"] for job in jobs} == {tile.block_n}


def test_what_is_tuned_follows_from_the_wrappers() -> None:
    assert tunables_of(["flash_mla_sparse_fwd", "concat_and_cache_mla"], "sparse") == [SPARSE_FWD]
    assert tunables_of(["flash_mla_with_kvcache", "triton_mla_sparse_attention"], "sparse") == [
        SPARSE_FWD,
        SPARSE_DECODE,
    ]
    assert tunables_of(["concat_and_cache_mla"], "sparse") == []
    assert tunables_of(["flash_mla_with_kvcache", "decode_attention_fwd"], "dense") == [DENSE_DECODE]
    assert tunables_of(["concat_and_cache_mla"], "dense") == []
    assert tunables_of(["flash_attn_varlen_func"], None) == []


def test_a_file_that_lists_no_tiles_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    for text in ("", "{}x", '[{"block_h": 16}]', "[3]"):
        path.write_text(text)
        with pytest.raises(UsageError, match="takes a JSON list of tiles"):
            read_tiles(path)


def test_measurements_outlive_a_new_table_but_not_a_new_kernel(tmp_path: Path, dsv32: BenchPackage) -> None:
    for path in dsv32.folder.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    before = kernels_hash(tmp_path)
    for name, changed in (("_tiles", False), ("sparse_fwd", False), ("_sparse_fwd_kernels", True)):
        path = tmp_path / f"{name}.py"
        path.write_text("# another header\n" + path.read_text())
        assert kernels_hash(tmp_path) == before
        path.write_text(path.read_text() + "ANY = 7\n")
        assert (kernels_hash(tmp_path) != before) is changed


@pytest.mark.parametrize("name", ["_sparse_fwd_sm90", "_sparse_fwd_sm90_swap_ab", "_splits", "_launch"])
def test_measurements_do_not_outlive_a_new_module_of_device_code(
    tmp_path: Path, dsv32: BenchPackage, name: str
) -> None:
    for path in dsv32.folder.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    before = kernels_hash(tmp_path)
    with (tmp_path / f"{name}.py").open("a") as file:
        file.write("ANY = 7\n")
    assert kernels_hash(tmp_path) != before


def test_a_folder_without_a_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no generated package"):
        load_package(tmp_path)
    with pytest.raises(UsageError, match="hyv4: the package is kept as a diff"):
        load_package(SPECS.parent / "generated" / "hyv4")
