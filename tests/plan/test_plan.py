"""The plan as a value, its compile jobs, and the work of a call."""

from __future__ import annotations

import ast
import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_specs import DENSE, ROOT, dims, make_spec

from mlagen.backends import compile_jobs
from mlagen.emit import render
from mlagen.plan import TARGETS, load_plan, make_plan
from mlagen.plan.splits import PartialRow
from mlagen.spec import load

SPECS = sorted((ROOT / "specs").glob("*.yaml"))
WRAPPERS = ("triton_mla_sparse_attention", "flash_mla_sparse_fwd", "concat_and_cache_mla")
SPARSE = set(WRAPPERS[:2])
WRITERS = {"concat_and_cache_mla", "quantize_and_insert_k_cache"}
VARIANTS = [
    {"attention": {"kind": "dense"}, **DENSE},
    {"attention": {"kind": "dense", "window": 512}, "layout": "fp8_per_tensor", **DENSE},
    *({"attn_sink": sink, "topk_length": length} for sink, length in itertools.product(("none", "required"), repeat=2)),
    {"block_size": 53},
    {"qk_rope_head_dim": 0},
    {"kv_lora_rank": 448, "v_head_dim": 512},
    {"wrappers": ("flash_mla_sparse_fwd",)},
    {"wrappers": ("concat_and_cache_mla",)},
    {"dtype": "fp16", "layout": "fp16", "lse_base": "2"},
]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(dims=dims())
def test_equal_specs_give_equal_plans(dims):
    plan, again = make_plan(make_spec(**dims)), make_plan(make_spec(**dims))
    assert plan == again
    assert hash(plan) == hash(again)


def frozen_parts(value: object) -> list[object]:
    """A plan's values that have fields, at any depth."""
    if isinstance(value, tuple):
        return [part for item in value for part in frozen_parts(item)]
    if dataclasses.is_dataclass(value):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return [value, *(part for field in fields for part in frozen_parts(field))]
    return []


def test_no_part_of_a_plan_can_be_changed():
    parts = frozen_parts(make_plan(make_spec(cache={"layout": "ue8m0_v4"}, kv_lora_rank=448)))
    names = {"Plan", "CacheLayout", "DataField", "ScalesField", "ScaleRule", "PadField", "Chunk", "TileRow", "Tile"}
    assert {type(part).__name__ for part in parts} >= names
    for part in parts:
        name = dataclasses.fields(part)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, None)


def test_a_plan_has_what_the_spec_asks_for_alone():
    rows = {"kv_lora_rank": 0, "qk_rope_head_dim": 0, "v_head_dim": 0}
    plan = make_plan(make_spec(attention=None, cache=None, wrappers=("combine_topk_swa_indices",), **rows))
    assert (plan.layout, plan.sparse, plan.kvcache, plan.splits, plan.cache) == (None,) * 5
    assert (plan.d_qk, plan.d_v, plan.rows_block_size) == (0, 0, None)
    plan = make_plan(make_spec(attention=None, wrappers=("concat_and_cache_mla",)))
    assert plan.cache is not None
    assert plan.splits is None


def test_a_plan_has_the_layouts_of_both_caches():
    caches = {"cache": {"layout": "mxfp8_v41"}, "extra_cache": {"layout": "nvfp4_v41", "scale_rule": {"divisor": 3.0}}}
    plan = make_plan(make_spec(kv_lora_rank=448, window=128, **caches))
    assert plan.extra_layout is not None
    assert (plan.layout.name, plan.extra_layout.name) == ("mxfp8_v41", "nvfp4_v41")
    assert plan.extra_layout.fields[1].rule.divisor == 3.0
    assert make_plan(make_spec()).extra_layout is None


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_plan_from_a_file_holds_its_spec(path):
    assert load_plan(path).spec == load(path)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_jobs_name_every_target_tile_and_kernel_once(path):
    plan = load_plan(path)
    jobs = compile_jobs(plan)
    assert len(set(jobs)) == len(jobs)
    tables = plan.dense or plan.sparse
    unaligned = dict(tables.unaligned) if tables else {}
    asked = set(plan.spec.wrappers)
    for target, rows in tables.tiles if tables else ():
        every = [*rows, *unaligned[target]]
        there = [job for job in jobs if job.target == target]
        for kernel in ("_sparse_fwd_kernel", "_sparse_split_kernel") if asked & SPARSE else ():
            mine = [job for job in there if job.kernel == kernel]
            constants = [dict(job.constexprs) for job in mine]
            assert {
                (one["BLOCK_H"], one["BLOCK_N"], job.num_warps, job.num_stages, one["INDICES_AHEAD"])
                for job, one in zip(mine, constants, strict=True)
            } == {dataclasses.astuple(row.tile) for row in every}
            alignments = {(one["ALIGNMENT"], one["INDEX_GROUP"]) for one in constants}
            assert alignments == {(16, 16), (16, 1), (1, 16), (1, 1)}
            assert all(one["NUM_STAGES"] == job.num_stages for job, one in zip(mine, constants, strict=True))
            assert {job.expected_shared for job in mine} == {row.expected_shared for row in every}
        mine = [job for job in there if job.kernel == "_dense_kernel"]
        if plan.dense:
            constants = [dict(job.constexprs) for job in mine]
            assert {
                (one["BLOCK_H"], one["BLOCK_N"], job.num_warps) for job, one in zip(mine, constants, strict=True)
            } == {(row.tile.block_h, row.tile.block_n, row.tile.num_warps) for row in every}
            # Rows that are not aligned take a page for each key.
            assert {(one["ALIGNMENT"], one["WHOLE_PAGES"]) for one in constants} == {
                (16, True),
                (16, False),
                (1, False),
            }
        for kernel, wrappers in (
            ("_merge_splits_kernel", {*SPARSE, "flash_mla_with_kvcache", "decode_attention_fwd"}),
            ("_write_kernel", WRITERS),
        ):
            alignments = [dict(job.constexprs)["ALIGNMENT"] for job in there if job.kernel == kernel]
            assert set(alignments) == ({16, 1} if asked & wrappers else set())
        kernels = [dict(job.constexprs) for job in there if job.module in ("cache", "extra_cache", "index", "_splits")]
        # Many programs do not wait for those before them; gathers' and merges' are never so many.
        assert {one["DEPENDENT"] for one in kernels} <= {TARGETS[target].dependent_launch, False}
    assert {job.target for job in jobs} == set(plan.spec.targets) <= set(TARGETS)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_job_gives_each_argument_of_its_kernel(changes):
    plan = make_plan(make_spec(targets=("sm90", "gfx942"), **changes))
    trees = {file.name: ast.parse(file.text) for file in render(plan).files}
    jobs = compile_jobs(plan)
    assert jobs
    for job in jobs:
        (kernel,) = [
            node
            for node in trees[f"{job.module}.py"].body
            if isinstance(node, ast.FunctionDef) and node.name == job.kernel
        ]
        names = [argument.arg for argument in kernel.args.args]
        if job.module.endswith(("_hopper", "_swapped")):  # whose constexprs are absent tensors, and a number of heads
            assert sorted(names) == sorted(name for name, _ in (*job.signature, *job.constexprs))
            assert [name for name in names if name in dict(job.signature)] == [name for name, _ in job.signature]
            assert f"do_not_specialize=range({len(names) - names.count('BLOCK_H')})" in ast.unparse(
                kernel.decorator_list[0]
            )
            wide = [arg.arg for arg in kernel.args.args if arg.annotation and ast.unparse(arg.annotation) == "gl.int64"]
            assert wide == [name for name, kind in job.signature if kind == "i64"]
            continue
        assert names == [name for name, _ in (*job.signature, *job.constexprs)]
        constexprs = [arg.arg for arg in kernel.args.args if arg.annotation and "constexpr" in ast.unparse(arg)]
        assert constexprs == [name for name, _ in job.constexprs]
        assert f"do_not_specialize=range({len(job.signature)})" in ast.unparse(kernel.decorator_list[0])
        wide = [arg.arg for arg in kernel.args.args if arg.annotation and ast.unparse(arg.annotation) == "tl.int64"]
        assert wide == [name for name, kind in job.signature if kind == "i64"]


@pytest.mark.parametrize(
    ("wrappers", "modules"),
    [
        (WRAPPERS[:1], {"_sparse_hopper", "_sparse_swapped", "_splits", "sparse_attention"}),
        (WRAPPERS[2:], {"cache"}),
        (WRAPPERS, {"_sparse_hopper", "_sparse_swapped", "_splits", "cache", "sparse_attention"}),
    ],
)
def test_kernels_that_no_wrapper_launches_are_not_compiled(wrappers, modules):
    assert {job.module for job in compile_jobs(make_plan(make_spec(wrappers=wrappers)))} == modules


def test_work_of_a_call_by_hand():
    plan = make_plan(make_spec())
    # 3 tokens x 16 heads x 2,048 keys x (576 + 512) multiply-adds, two FLOPs each.
    assert plan.flops(3, 16) == 213_909_504
    # q and out 3 x 16 x (576 + 512) x 2 = 104,448; indices 3 x 2,048 x 4 = 24,576; 1,000 rows x 1,152 = 1,152,000.
    assert plan.bytes_moved(3, 16, 1000) == 104_448 + 24_576 + 1_152_000
    # No more rows than 3 x 2,048 can be named.
    assert plan.bytes_moved(3, 16, 100_000) == 104_448 + 24_576 + 6144 * 1152


def test_fp32_partials_are_aligned_as_far_as_their_rows_are():
    rows = {d_v: make_plan(make_spec(kv_lora_rank=d_v, v_head_dim=d_v)).splits.partials for d_v in (510, 511, 512)}
    assert {d_v: row.alignment for d_v, row in rows.items()} == {510: 4, 511: 4, 512: 16}
    assert [row.floats for row in rows.values()] == [row.lanes for row in rows.values()] == [510, 511, 512]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rounded_partials_are_padded_so_that_all_rows_begin_at_16_bytes(dtype):
    spec = make_spec().model_copy(update={"partials": dtype})
    for d_v, lanes in {505: 512, 511: 512, 512: 512, 513: 520, 1: 8}.items():
        row = make_plan(spec.model_copy(update={"model": spec.model.model_copy(update={"v_head_dim": d_v})}))
        assert (row.splits.partials.lanes, row.splits.partials.floats) == (lanes, lanes // 2)
        assert row.splits.partials.alignment == 16


def test_a_row_of_partials_costs_what_it_moves():
    plain, rounded = PartialRow("fp32", 512), PartialRow("bf16", 512)
    assert [plain.weighs(cost) for cost in (1024, 2560, 40)] == [1024, 2560, 40]
    # 2,056 bytes with a row's maximum and sum, and 1,032: what took 1,024 rows takes 2,040.
    assert rounded.weighs(1024) == 2040
    assert PartialRow("fp16", 512).weighs(1024) == 2032  # a power of two beside them
    plan = make_plan(make_spec().model_copy(update={"partials": "bf16"}))
    assert (plan.splits.hopper_merge, plan.sparse.hopper.cost) == (2040, (5100, 79))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(dims=dims(), partials=st.sampled_from(["fp32", "bf16", "fp16"]))
def test_every_tile_of_the_merge_covers_v(dims, partials):
    splits = make_plan(make_spec(**dims).model_copy(update={"partials": partials})).splits
    d_v = dims["v_head_dim"]
    for tile in splits.merge:
        assert tile.block_d & (tile.block_d - 1) == 0
        assert (tile.d_blocks - 1) * tile.block_d < d_v <= tile.d_blocks * tile.block_d
        assert splits.merge_masked or tile.d_blocks * tile.block_d == d_v
        assert tile.expected_shared(32) == 0  # no sum crosses warps
    assert splits.merge_masked == any(tile.d_blocks * tile.block_d != d_v for tile in splits.merge)
    assert [tile.block_s for tile in splits.merge] == sorted(tile.block_s for tile in splits.merge)
