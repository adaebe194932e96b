"""Tiles, blocks and variants of multi-head attention and of the merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from enumerated import check_every_list, check_tiles, enumerate_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.bench import load_package
from mlagen.errors import LimitError
from mlagen.plan import TARGETS, DenseFwdPlan, MergeStatesPlan, make_plan
from mlagen.plan.families.dense_fwd import REGISTERS, make_dense_fwd_plan, registers
from mlagen.plan.families.merge_states import make_merge_states_plan
from mlagen.spec import Spec

WRAPPERS = ("flash_attn_varlen_func", "merge_attn_states", "merge_attn_parts")
MODELS = [(192, 128), (256, 256), (128, 128), (96, 64), (48, 48), (40, 72)]
ALL = tuple(TARGETS.values())
TMA = {"sm90", "sm100", "sm120"}


def make_spec(d_qk: int = 192, d_v: int = 128, addressing: str = "pointers", **changes: Any) -> Spec:
    """A spec of multi-head attention for all targets."""
    data = {
        "name": "some",
        "title": "Some",
        "model": {"num_heads": 16, "dtype": "bf16"},
        "multi_head": {"qk_head_dim": d_qk, "v_head_dim": d_v, "addressing": addressing},
        "wrappers": WRAPPERS,
        "targets": tuple(TARGETS),
        **changes,
    }
    return Spec.model_validate(data)


@pytest.mark.parametrize("dims", MODELS, ids=str)
@pytest.mark.parametrize("descriptors", [False, True])
def test_every_target_has_tiles_that_fit(dims, descriptors):
    plan = make_dense_fwd_plan(*dims, "bf16", ALL, descriptors=descriptors)
    unaligned = dict(plan.unaligned)
    for name, rows in plan.tiles:
        target = TARGETS[name]
        assert rows[-1].max_queries is None
        assert [row.max_queries for row in rows[:-1]] == sorted(row.max_queries for row in rows[:-1])
        for row in (*rows, *unaligned[name]):
            assert 0 < row.expected_shared <= target.shared_limit
            needed = registers(
                row.tile, plan.k_chunks, plan.v_chunks, target, descriptors=name in plan.descriptor_targets
            )
            assert needed <= REGISTERS[target.dot]


def test_tiles_of_the_models_are_those_that_were_compiled():
    plan = make_dense_fwd_plan(192, 128, "bf16", ALL, descriptors=False)
    tiles = {name: str(rows[-1].tile) for name, rows in plan.tiles}
    assert tiles["sm90"] == "128x64 w8 s3"
    assert tiles["sm80"] == tiles["sm86"] == "128x32 w8 s2"
    assert tiles["gfx942"] == "128x32 w4 s2"
    described = make_dense_fwd_plan(192, 128, "bf16", ALL, descriptors=True)
    assert str(dict(described.tiles)["sm90"][-1].tile) == "128x128 w8 s2"  # which has no addresses to hold


def test_descriptors_are_for_targets_that_copy_by_them():
    assert set(make_dense_fwd_plan(192, 128, "bf16", ALL, descriptors=True).descriptor_targets) == TMA
    assert make_dense_fwd_plan(192, 128, "bf16", ALL, descriptors=False).descriptor_targets == ()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(d_qk=st.integers(1, 512), d_v=st.integers(1, 512), descriptors=st.booleans())
def test_blocks_cover_any_columns_once(d_qk, d_v, descriptors):
    try:
        plan = make_dense_fwd_plan(d_qk, d_v, "bf16", ALL, descriptors=descriptors)
    except LimitError:  # no target but the widest can do without a tile
        assert max(d_qk, d_v) > 256
        return
    for columns, chunks in ((d_qk, plan.k_chunks), (d_v, plan.v_chunks)):
        assert [column for chunk in chunks for column in range(chunk.start, chunk.start + chunk.columns)] == list(
            range(columns)
        )
        assert all(chunk.block & (chunk.block - 1) == 0 and chunk.block >= 16 for chunk in chunks)


def test_dims_that_no_tile_holds_are_refused_with_the_arithmetic():
    with pytest.raises(LimitError, match=r"sm80: head dims 1024 and 1024 take .* bytes .* registers"):
        make_dense_fwd_plan(1024, 1024, "bf16", ALL, descriptors=False)


@pytest.mark.parametrize("addressing", ["pointers", "descriptors"])
@pytest.mark.parametrize("wrappers", [WRAPPERS, WRAPPERS[:1], WRAPPERS[1:2], WRAPPERS[2:]], ids=str)
def test_a_package_lists_every_tile_and_mask_of_attention_and_every_alignment_of_a_merge(
    addressing, wrappers, tmp_path
):
    found = enumerate_plan(make_plan(make_spec(40, 72, addressing, wrappers=wrappers)), tmp_path)
    assert set(found.jobs) == set(TARGETS)
    check_every_list(found)
    check_tiles(found)
    kernels = {"merge_attn_states": "_merge_states_kernel", "merge_attn_parts": "_merge_parts_kernel"}
    for target in TARGETS:
        for wrapper, kernel in kernels.items():
            alignments = {dict(job.constexprs)["ALIGNMENT"] for job in found.of(target, kernel)}
            assert alignments == ({16, 1} if wrapper in wrappers else set())


def test_a_package_merges_values_of_its_heads_and_of_its_latent_rows():
    rows = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 512, "num_heads": 128, "dtype": "bf16"}
    assert [row.d_v for row in make_plan(make_spec(model=rows)).of(MergeStatesPlan).rows] == [128, 512]
    alone = make_plan(make_spec(model=rows, multi_head=None, wrappers=WRAPPERS[1:]))
    assert [row.d_v for row in alone.of(MergeStatesPlan).rows] == [512]
    assert make_plan(make_spec(wrappers=WRAPPERS[:1])).find(MergeStatesPlan) is None


@pytest.mark.parametrize("d_v", [1, 16, 40, 72, 128, 256, 512, 1280])
def test_tiles_of_a_merge_hold_whole_values(d_v):
    (row,) = make_merge_states_plan([d_v]).rows
    assert d_v <= row.block_d < 2 * d_v
    assert row.masked == (row.block_d > d_v)
    for tile in (row.few, row.many, row.fast, row.parts):
        assert all(one & (one - 1) == 0 and one >= 1 for one in (tile.block_t, tile.block_h, tile.block_p))
        assert tile.block_t <= 8
    assert row.few.block_t == 1


@pytest.mark.parametrize(
    ("dims", "block_n"), [((192, 128), 128), ((128, 128), 128), ((256, 256), 64), ((96, 64), None), ((64, 192), None)]
)
def test_heads_in_runs_of_64_columns_have_a_sm90_kernel(dims, block_n):
    sm90 = make_plan(make_spec(*dims)).of(DenseFwdPlan).sm90
    assert (sm90 and sm90.block_n) == block_n
    if sm90 is not None:
        assert sm90.min_queries == 1
        # Two warpgroups' Q of 64 rows, two stages of K and V; 16 columns or keys a product, twice each.
        assert sm90.expected_shared == 2 * (128 * dims[0] + 2 * block_n * sum(dims))
        assert sm90.expected_products == 4 * (dims[0] // 16 + block_n // 16)


@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (128, 64)], ids=str)
@pytest.mark.parametrize("addressing", ["pointers", "descriptors"])
def test_the_softmax_runs_beside_the_own_product_where_that_was_faster(dims, addressing):
    sm90 = make_plan(make_spec(*dims, addressing=addressing)).of(DenseFwdPlan).sm90
    measured = {((192, 128), "descriptors"), ((256, 256), "pointers")}
    assert sm90.holds_wait_up_to == ((3, 7) if (dims, addressing) in measured else None)


@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (128, 64)], ids=str)
@pytest.mark.parametrize("addressing", ["pointers", "descriptors"])
def test_q_is_ahead_where_that_was_faster(dims, addressing):
    sm90 = make_plan(make_spec(*dims, addressing=addressing)).of(DenseFwdPlan).sm90
    assert sm90.q_ahead == ((dims, addressing) == ((192, 128), "descriptors"))
    assert sm90.cached_bytes == 48 << 20


@pytest.mark.parametrize("changes", [{"backend": "triton"}, {"targets": ("sm80", "sm100")}], ids=str)
def test_without_gluon_or_sm90_there_is_no_swap_ab_kernel(changes):
    assert make_plan(make_spec(**changes)).of(DenseFwdPlan).sm90 is None


def test_work_of_a_call_by_hand():
    plan = make_dense_fwd_plan(192, 128, "bf16", ALL, descriptors=False)
    # 100 pairs x 4 heads x (192 + 128) multiply-adds, two FLOPs each.
    assert plan.flops(100, 4) == 256_000
    # q and out 10 x 4 x 320 x 2 = 25,600; k and v 20 x 2 x 320 x 2 = 25,600.
    assert plan.bytes(10, 20, 4, 2) == 51_200


@pytest.mark.parametrize(
    ("rows", "rate", "tile"),
    [
        (8192, 4800, (1, 8, 128, 4)),
        (8193, 0, (8, 1, 128, 4)),
        (8193, 3352, (8, 1, 128, 4)),
        (65536, 4800, (8, 1, 128, 4)),
        (65537, 3352, (8, 1, 128, 4)),
        (65537, 4800, (2, 4, 128, 2)),
    ],
)
def test_faster_memory_takes_merges_of_fewer_warps(rows, rate, tile):
    package = load_package(Path(__file__).resolve().parents[2] / "generated" / "dsv3_prefill")
    facts = package.root._launch.DeviceFacts("sm90", 132, memory_rate=rate)
    assert package.module("merge_states")._states_tile(facts, 128, rows) == tile
