"""The index kernels' numbers: a tile for every call, and shared memory as the compiler takes it."""

from plan_specs import make_spec

from mlagen.backends import compile_jobs
from mlagen.compile import check_limits
from mlagen.compile import compile_jobs as run_jobs
from mlagen.emit import apply, compare, render
from mlagen.plan import make_plan
from mlagen.plan.index import make_index_plan

WRAPPERS = (
    "compute_global_topk_indices_and_lens",
    "combine_topk_swa_indices",
    "triton_convert_req_index_to_global_index",
)


def holds(row, tokens, indices):
    return all(most is None or size <= most for most, size in ((row.max_tokens, tokens), (row.max_indices, indices)))


def test_every_call_has_a_tile_and_every_row_a_call():
    rows = make_index_plan().tiles
    sizes = [0, 1, 128, 512, 513, 1024, 1025, 2048, 2176, 4096, 32768, 2**31 - 1]
    taken = {next(row for row in rows if holds(row, tokens, indices)) for tokens in sizes for indices in sizes}
    assert taken == set(rows)


def test_tiles_are_whole_vectors_of_every_thread():
    index = make_index_plan()
    for tile in (*index.every_tile, index.unaligned, index.split):
        assert tile.block_n % (4 * 32 * tile.num_warps) == 0
    assert len(set(index.every_tile)) == len(index.every_tile)


def test_few_tokens_take_one_step_up_to_the_widest_tile():
    for row in make_index_plan().tiles:
        if row.max_tokens is not None:
            assert row.max_indices is None or row.tile.block_n >= row.max_indices


def test_jobs_name_each_tile_and_both_alignments():
    for target in ("sm90", "gfx942"):
        jobs = [job for job in compile_jobs(make_plan(make_spec(wrappers=WRAPPERS))) if job.target == target]
        assert {job.module for job in jobs} == {"index"}
        assert len({(job.kernel, job.constexprs, job.num_warps) for job in jobs}) == len(jobs)
        assert {dict(job.constexprs)["DEPENDENT"] for job in jobs} == {target == "sm90", False}  # few and many programs
        for kernel in ("_map_indices_kernel", "_combine_indices_kernel"):
            assert {dict(job.constexprs)["ALIGNMENT"] for job in jobs if job.kernel == kernel} == {16, 1}
        every_tile = (*make_index_plan().every_tile, make_index_plan().split)
        tiles = {
            (dict(job.constexprs)["BLOCK_N"], job.num_warps) for job in jobs if job.kernel == "_map_indices_kernel"
        }
        assert tiles == {(tile.block_n, tile.num_warps) for tile in every_tile}


def test_a_kernel_that_no_wrapper_launches_is_not_there():
    for wrapper, kernel in ((WRAPPERS[0], "_map_"), (WRAPPERS[1], "_combine_"), (WRAPPERS[2], "_map_")):
        plan = make_plan(make_spec(wrappers=(wrapper,), targets=("sm90",)))
        assert {job.kernel for job in compile_jobs(plan)} == {f"{kernel}indices_kernel"}
        (text,) = [file.text for file in render(plan).files if file.name == "index.py"]
        assert text.count("def _map_indices_kernel") == (kernel == "_map_")
        assert ("is_valid_token" in text) == (wrapper == WRAPPERS[0])


def test_shared_memory_is_what_the_plan_expects(tmp_path):
    plan = make_plan(make_spec(wrappers=WRAPPERS, targets=("sm90",)))
    apply(compare(render(plan), tmp_path / "dsv32"))
    taken = run_jobs(tmp_path / "dsv32", compile_jobs(plan), workers=1, cache_dir=tmp_path / "cache")
    assert [one.shared for one in taken] == [one.expected_shared for one in taken]
    assert check_limits(taken) == []
