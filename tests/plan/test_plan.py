"""The plan as a value, its package's list of compilations, and the work of a call."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from checked_in import SPECS
from enumerated import ROWS_KERNELS, check_every_list, check_tiles, enumerate_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_specs import DENSE, dims, make_spec

from mlagen import backends
from mlagen.plan import FAMILIES, SparseFwdPlan, load_plan, make_plan
from mlagen.plan.splits import PartialRow
from mlagen.spec import NEEDS, load

WRAPPERS = ("triton_mla_sparse_attention", "flash_mla_sparse_fwd", "concat_and_cache_mla")
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


def test_a_plan_has_only_the_families_of_its_spec():
    rows = {"kv_lora_rank": 0, "qk_rope_head_dim": 0, "v_head_dim": 0}
    plan = make_plan(make_spec(attention=None, cache=None, wrappers=("combine_topk_swa_indices",), **rows))
    assert (plan.layout, plan.caches) == (None, None)
    assert [family.NAME for family in plan.families] == ["indices"]
    for absent in (lambda: plan.splits, lambda: plan.attention, lambda: plan.of(SparseFwdPlan)):
        with pytest.raises(LookupError):
            absent()
    assert (plan.d_qk, plan.d_v, plan.rows_block_size) == (0, 0, None)
    plan = make_plan(make_spec(attention=None, wrappers=("concat_and_cache_mla",)))
    assert [family.NAME for family in plan.families] == ["cache"]


def test_a_plan_has_the_layouts_of_both_caches():
    caches = {"cache": {"layout": "mxfp8_v41"}, "extra_cache": {"layout": "nvfp4_v41", "scale_rule": {"divisor": 3.0}}}
    plan = make_plan(make_spec(kv_lora_rank=448, window=128, **caches))
    assert plan.extra_layout is not None
    assert (plan.layout.name, plan.extra_layout.name) == ("mxfp8_v41", "nvfp4_v41")
    assert plan.extra_layout.fields[1].rule.divisor == 3.0
    assert make_plan(make_spec()).extra_layout is None


def test_every_wrapper_is_of_a_family_that_is_rendered():
    assert {name for kind in FAMILIES for name in kind.WRAPPERS} == set(NEEDS)
    folders = {path.parent.name for path in Path(backends.__file__).parent.glob("*/portable.py")}
    assert {kind.NAME for kind in FAMILIES} == folders


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_package_has_the_families_of_its_wrappers(path):
    plan = load_plan(path)
    assert {name for family in plan.families for name in family.WRAPPERS} >= set(plan.spec.wrappers)
    assert plan.fits == {family.NAME: family.fits for family in plan.tiled}
    for family in plan.families:
        assert plan.of(type(family)) is family


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_plan_from_a_file_holds_its_spec(path):
    assert load_plan(path).spec == load(path)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_package_of_any_choices_lists_every_variant_of_its_tiles(changes, tmp_path):
    plan = make_plan(make_spec(targets=("sm90", "gfx942"), **changes))
    found = enumerate_plan(plan, tmp_path)
    check_every_list(found)
    check_tiles(found)
    for family in plan.latent:
        for target, rows in family.tiles:
            listed = {
                tile[:5] for _, _, tile in getattr(found.module("_tiles"), f"{family.NAME.upper()}_TILES")[target]
            }
            assert listed <= {dataclasses.astuple(row.tile) for row in rows}


@pytest.mark.parametrize("sink", ["none", "optional", "required"])
@pytest.mark.parametrize("length", ["none", "optional", "required"])
def test_variants_have_the_optional_tensors_that_calls_can_give(sink, length, tmp_path):
    spec = make_spec(targets=("sm90",), attn_sink=sink, topk_length=length)
    jobs = enumerate_plan(make_plan(spec), tmp_path).of("sm90", "_sparse_fwd_kernel")
    names = ("attn_sink_ptr", "topk_length_ptr")
    given = {tuple(name in dict(job.signature) for name in names) for job in jobs}
    may = {"none": (False,), "optional": (True, False), "required": (True,)}
    assert given == set(itertools.product(may[sink], may[length]))


def test_one_wrapper_that_takes_no_optional_tensor_has_no_variant_with_one(tmp_path):
    found = enumerate_plan(make_plan(make_spec(targets=("sm90",), wrappers=WRAPPERS[:1])), tmp_path)
    for job in found.of("sm90", *ROWS_KERNELS):
        assert not {"attn_sink_ptr", "topk_length_ptr"} & {name for name, _ in job.signature}


@pytest.mark.parametrize(
    ("wrappers", "modules"),
    [
        (WRAPPERS[:1], {"_sparse_fwd_sm90", "_sparse_fwd_sm90_swap_ab", "_splits", "_sparse_fwd_kernels"}),
        (WRAPPERS[2:], {"_cache_kernels"}),
        (
            WRAPPERS,
            {"_sparse_fwd_sm90", "_sparse_fwd_sm90_swap_ab", "_splits", "_cache_kernels", "_sparse_fwd_kernels"},
        ),
    ],
)
def test_kernels_that_no_wrapper_launches_are_not_listed(wrappers, modules, tmp_path):
    found = enumerate_plan(make_plan(make_spec(targets=("sm80", "sm90"), wrappers=wrappers)), tmp_path)
    assert {module for module, _ in found.kernels} == modules


def test_work_of_a_call_by_hand():
    plan = make_plan(make_spec()).of(SparseFwdPlan)
    # 3 tokens x 16 heads x 2,048 keys x (576 + 512) multiply-adds, two FLOPs each.
    assert plan.flops(3, 16) == 213_909_504
    # q and out 3 x 16 x (576 + 512) x 2 = 104,448; indices 3 x 2,048 x 4 = 24,576; 1,000 rows x 1,152 = 1,152,000.
    assert plan.bytes(3, 16, 1000) == 104_448 + 24_576 + 1_152_000
    # No more rows than 3 x 2,048 can be named.
    assert plan.bytes(3, 16, 100_000) == 104_448 + 24_576 + 6144 * 1152


def test_fp32_partials_are_aligned_as_far_as_their_rows_are():
    rows = {d_v: make_plan(make_spec(kv_lora_rank=d_v, v_head_dim=d_v)).splits.partials for d_v in (510, 511, 512)}
    assert {d_v: row.alignment for d_v, row in rows.items()} == {510: 4, 511: 4, 512: 16}
    assert [row.floats for row in rows.values()] == [row.columns for row in rows.values()] == [510, 511, 512]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rounded_partials_are_padded_so_that_all_rows_begin_at_16_bytes(dtype):
    spec = make_spec().model_copy(update={"partials": dtype})
    for d_v, columns in {505: 512, 511: 512, 512: 512, 513: 520, 1: 8}.items():
        row = make_plan(spec.model_copy(update={"model": spec.model.model_copy(update={"v_head_dim": d_v})}))
        assert (row.splits.partials.columns, row.splits.partials.floats) == (columns, columns // 2)
        assert row.splits.partials.alignment == 16


def test_the_cost_of_a_row_of_partials_is_its_traffic():
    plain, rounded = PartialRow("fp32", 512), PartialRow("bf16", 512)
    assert [plain.weighs(cost) for cost in (1024, 2560, 40)] == [1024, 2560, 40]
    # 2,056 bytes with a row's maximum and sum, and 1,032: a cost of 1,024 rows is one of 2,040.
    assert rounded.weighs(1024) == 2040
    assert PartialRow("fp16", 512).weighs(1024) == 2032  # with a power of two a row
    plan = make_plan(make_spec().model_copy(update={"partials": "bf16"}))
    assert (plan.splits.sm90_combine, plan.of(SparseFwdPlan).sm90.cost) == (2040, (5100, 79))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(dims=dims(), partials=st.sampled_from(["fp32", "bf16", "fp16"]))
def test_every_tile_of_the_merge_covers_v(dims, partials):
    splits = make_plan(make_spec(**dims).model_copy(update={"partials": partials})).splits
    d_v = dims["v_head_dim"]
    for tile in splits.combine:
        assert tile.block_d & (tile.block_d - 1) == 0
        assert (tile.d_blocks - 1) * tile.block_d < d_v <= tile.d_blocks * tile.block_d
        assert splits.combine_masked or tile.d_blocks * tile.block_d == d_v
    assert splits.combine_masked == any(tile.d_blocks * tile.block_d != d_v for tile in splits.combine)
    assert [tile.block_s for tile in splits.combine] == sorted(tile.block_s for tile in splits.combine)
