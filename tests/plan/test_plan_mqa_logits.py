"""The logits' numbers: a tile for every call that fits its target, and layouts that the kernels read."""

import pytest
from enumerated import check_every_list, enumerate_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_specs import make_spec

from mlagen.errors import LimitError
from mlagen.plan import TARGETS, MqaLogitsPlan, make_plan
from mlagen.plan.families.mqa_logits import COLUMNS, MOST_BLOCK_Q, is_native
from mlagen.plan.tiles.chunks import next_power_of_2
from mlagen.spec import Spec

FP8 = ("fp8_mqa_logits", "fp8_fp4_mqa_logits", "get_paged_mqa_logits_metadata", "fp8_paged_mqa_logits")
FP4 = ("fp8_fp4_mqa_logits", "get_paged_mqa_logits_metadata", "fp8_fp4_paged_mqa_logits")
FLAT, PAGED, SCHEDULE = "_mqa_logits_kernel", "_paged_mqa_logits_kernel", "_schedule_kernel"
FLAT_SM90, PAGED_SM90 = "_mqa_logits_sm90_kernel", "_paged_mqa_logits_sm90_kernel"


def logits_spec(heads: int = 64, columns: int = 128, layout: object = "indexer_fp8", **changes: object) -> Spec:
    """A spec of only the logits."""
    indexer = {"num_heads": heads, "head_dim": columns, "topk": 2048, "rope_head_dim": 0}
    wrappers = FP4 if layout == "indexer_mxfp4" else FP8
    parts = {"indexer": indexer, "indexer_cache": {"layout": layout}, "wrappers": wrappers}
    return Spec.model_validate({**make_spec().model_dump(exclude={"partials"}), **parts, **changes})


def fp8_layout(tile: int, dtype: str = "e4m3", scales: str = "fp32") -> dict[str, object]:
    """Keys and their scales."""
    rule = {"rounding": "power_of_two", "divisor": 224, "floor": 1e-4, "floor_on": "amax"}
    fields = ({"kind": "row", "dtype": dtype}, {"kind": "scales", "of": "row", "dtype": scales, "tile": tile, **rule})
    return {"name": "own", "fields": fields}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(heads=st.integers(1, 128), columns=st.integers(1, 32), packed=st.booleans())
def test_every_call_has_a_tile_that_holds_its_heads(heads, columns, packed):
    spec = logits_spec(
        heads, 4 * columns, "indexer_mxfp4" if packed else fp8_layout(max(16, next_power_of_2(4 * columns)))
    )
    plan = make_plan(spec).of(MqaLogitsPlan)
    assert plan.heads_block >= heads
    for name, tiles in plan.tiles:
        queries = [tile.block_q for tile in tiles.paged]
        assert queries == sorted(set(queries))
        assert tiles.flat == tiles.paged[-1]
        assert [tile.block_q for tile in tiles.unaligned] == queries
        for tile in (*tiles.paged, *tiles.unaligned):
            assert 16 <= tile.block_q * plan.heads_block <= max(COLUMNS, plan.heads_block)
            assert tile.block_q <= MOST_BLOCK_Q
            assert tile.block_n >= 16
        assert (name in plan.native) == (not packed and TARGETS[name].has_e4m3)


def test_products_take_keys_as_they_are_stored_where_the_hardware_does():
    assert [name for name in TARGETS if is_native("e4m3", TARGETS[name])] == [
        "sm89", "sm90", "sm100", "sm120", "gfx950"
    ]  # fmt: skip
    assert [name for name in TARGETS if is_native("e4m3fnuz", TARGETS[name])] == ["gfx942"]
    assert not any(is_native("e2m1", target) for target in TARGETS.values())


@pytest.mark.parametrize(
    ("layout", "columns", "says"),
    [
        ("indexer_fp8", 256, "got e4m3 keys with 2 fp32 scales of 128 columns; fp8_mqa_logits takes one fp32 scale a"),
        (fp8_layout(128, scales="ue8m0"), 128, "got e4m3 keys with 1 ue8m0 scale of 128 columns"),
    ],
)
def test_a_layout_that_no_kernel_reads_is_refused(layout, columns, says):
    with pytest.raises(LimitError, match=rf"^indexer_cache.layout: {says}"):
        make_plan(logits_spec(64, columns, layout))


def test_a_query_that_no_program_holds_is_refused():
    with pytest.raises(
        LimitError, match=r"sm86: shared memory has no room for a query token of 128 heads of 512 columns and 16 keys"
    ):
        make_plan(logits_spec(128, 512, fp8_layout(512)))
    assert make_plan(logits_spec(128, 512, fp8_layout(512), targets=("sm90", "sm100"))).find(MqaLogitsPlan)


@pytest.mark.parametrize("layout", ["indexer_fp8", "indexer_mxfp4"])
def test_variants_are_of_each_tile_and_both_alignments(layout, tmp_path):
    spec = logits_spec(32, 128, layout, targets=("sm90", "gfx942"))
    found = enumerate_plan(make_plan(spec), tmp_path)
    check_every_list(found)
    plan = make_plan(spec).of(MqaLogitsPlan)
    for target, tiles in plan.tiles:
        assert len(found.of(target, SCHEDULE)) == 1
        for kernel, aligned, unaligned in (
            (FLAT, [tiles.flat], tiles.unaligned[-1:]),
            (PAGED, tiles.paged, tiles.unaligned),
        ):
            for alignment, listed in ((16, aligned), (1, unaligned)):
                jobs = [job for job in found.of(target, kernel) if dict(job.constexprs)["ALIGNMENT"] == alignment]
                got = {(dict(job.constexprs)["BLOCK_Q"], dict(job.constexprs)["BLOCK_N"]) for job in jobs}
                assert got == {(tile.block_q, tile.block_n) for tile in listed}
                assert {dict(job.constexprs)["BF16_LOGITS"] for job in jobs} == {False, True}
        if layout == "indexer_fp8":
            assert {dict(job.constexprs)["NATIVE"] for job in found.of(target, FLAT)} == {target == "sm90"}


@pytest.mark.parametrize(
    ("wrapper", "kernels"),
    [
        (FP8[0], {FLAT, FLAT_SM90}),
        (FP8[1], {FLAT, FLAT_SM90}),
        (FP8[2], {SCHEDULE}),
        (FP8[3], {PAGED, PAGED_SM90}),
        (FP4[2], {PAGED, PAGED_SM90}),
    ],
)
def test_a_kernel_that_no_wrapper_launches_is_not_there(wrapper, kernels, tmp_path):
    found = enumerate_plan(make_plan(logits_spec(wrappers=(wrapper,), targets=("sm90",))), tmp_path)
    check_every_list(found)
    assert {kernel for _, kernel in found.kernels} == kernels
