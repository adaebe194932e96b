"""Two caches of any named layouts: each pair has tiles on each target, or an error that names the excess."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from pairs import SLACK, V4, V32, Dims, all_pairs, make_pair

from mlagen.errors import LimitError
from mlagen.plan import TARGETS, SparseDecodePlan, Tile, make_plan
from mlagen.plan.tiles.cached_row import CachedRow
from mlagen.plan.tiles.chunks import make_chunks
from mlagen.plan.tritons import MINORS, rows_under
from mlagen.spec.stored import NAMED_LAYOUTS

SMALL = ("sm86", "sm89", "sm120")  # of 101,376 bytes a program
# Pairs, in either order, that those cannot hold: q twice and the tiles of K for both products are too much.
TOO_MUCH: dict[Dims, tuple[set[str], ...]] = {
    V32: ({"fp8_per_tensor", "nvfp4_ds_mla"}, {"fp8_per_tensor", "nvfp4_v41"}),
    V4: ({"fp8_per_tensor", "nvfp4_ds_mla"}, {"mxfp8_v41", "nvfp4_ds_mla"}),
}
PAIRS = all_pairs(tuple(TARGETS))


def cached(dims: Dims, first: str, second: str) -> CachedRow:
    return make_plan(make_pair(dims, first, second, ("sm80",))).of(SparseDecodePlan).cached


def test_every_layout_is_in_a_pair_on_either_side_with_every_other_that_its_dtype_allows():
    met = {(first, second) for _, first, second in PAIRS}
    assert {first for first, _ in met} == {second for _, second in met} == set(NAMED_LAYOUTS)
    assert len(met) == 62  # of 64: no dtype goes with both of bf16 and fp16


@pytest.mark.parametrize("target", list(TARGETS))
def test_every_pair_has_tiles_on_every_target_but_those_that_are_named(target):
    refused = set()
    for (dims, first, second), spec in PAIRS.items():
        try:
            family = make_plan(spec.model_copy(update={"targets": (target,)})).of(SparseDecodePlan)
        except LimitError:
            refused.add((dims, first, second))
            continue
        for row in (*rows_under(family.tiles, target, MINORS[0]), *dict(family.unaligned)[target]):
            assert 0 < row.expected_shared <= TARGETS[target].shared_limit
    named = {pair for pair in PAIRS if target in SMALL and {*pair[1:]} in TOO_MUCH.get(pair[0], ())}
    assert refused == named


# Bytes that Triton 3.7.1 takes for the split kernel: (dims, cache, second cache, target, tile): bytes.
TAKEN = {
    # q once more: as 8-bit and as 4-bit values are multiplied.
    (V32, "fp8_ds_mla", "nvfp4_ds_mla", "sm120", Tile(16, 32, 8, 2, True)): 107_008,
    (V32, "fp8_ds_mla", "nvfp4_ds_mla", "sm120", Tile(16, 32, 8, 1, True)): 53_248,
    (V32, "nvfp4_ds_mla", "fp8_ds_mla", "sm120", Tile(16, 32, 8, 2, True)): 88_576,
    (V4, "ue8m0_v4", "nvfp4_v41", "sm80", Tile(16, 32, 8, 2, True)): 118_784,
    (V4, "nvfp4_v41", "ue8m0_v4", "sm80", Tile(16, 32, 8, 2, True)): 108_544,
    (V4, "ue8m0_v4", "nvfp4_v41", "sm80", Tile(16, 32, 8, 1, True)): 98_304,
    (V4, "nvfp4_v41", "ue8m0_v4", "sm80", Tile(16, 32, 8, 1, True)): 98_304,
    (V32, "fp8_per_tensor", "nvfp4_ds_mla", "sm80", Tile(16, 32, 8, 1, True)): 104_448,
    (V32, "nvfp4_ds_mla", "fp8_per_tensor", "sm80", Tile(16, 32, 8, 1, True)): 88_064,
    # As 8-bit and as 16-bit values.
    (V32, "fp8_ds_mla", "bf16", "sm120", Tile(16, 32, 4, 2, True)): 104_960,
    (V32, "bf16", "fp8_ds_mla", "sm120", Tile(16, 32, 4, 2, True)): 88_576,
    (V4, "bf16", "ue8m0_v4", "sm120", Tile(16, 16, 4, 2, True)): 68_096,
    (V32, "bf16", "nvfp4_ds_mla", "sm120", Tile(16, 32, 8, 2, False)): 74_880,
    # Both of 8 bits: once.
    (V32, "fp8_per_tensor", "fp8_ds_mla", "sm120", Tile(16, 16, 4, 2, True)): 64_512,
    # The values of the first move as they are stored.
    (V4, "nvfp4_v41", "mxfp8_v41", "sm120", Tile(16, 32, 8, 2, True)): 75_776,
    (V4, "mxfp8_v41", "nvfp4_v41", "sm120", Tile(16, 32, 8, 2, True)): 59_392,
    # wgmma takes q in one order, with any K.
    (V32, "fp8_ds_mla", "bf16", "sm90", Tile(64, 64, 8, 2, False)): 221_440,
    (V4, "ue8m0_v4", "bf16", "sm90", Tile(64, 64, 8, 2, False)): 205_056,
    (V4, "mxfp8_v41", "bf16", "sm90", Tile(64, 64, 8, 2, False)): 196_864,
    (V4, "mxfp8_v41", "bf16", "sm100", Tile(64, 32, 8, 2, False)): 164_512,
}


@pytest.mark.parametrize(("dims", "first", "second", "target", "tile"), TAKEN, ids=str)
def test_a_program_over_two_layouts_takes_no_more_shared_memory_than_is_expected(dims, first, second, target, tile):
    taken = TAKEN[dims, first, second, target, tile]
    assert taken <= cached(dims, first, second).shared(tile, TARGETS[target]) <= SLACK * taken


@pytest.mark.parametrize(("first", "second"), [("ue8m0_v4", "nvfp4_v41"), ("nvfp4_v41", "ue8m0_v4")])
@pytest.mark.parametrize("target", SMALL)
def test_pairs_that_two_stages_are_too_much_for_take_one(first, second, target):
    family = make_plan(make_pair(V4, first, second, (target,))).of(SparseDecodePlan)
    assert [row.tile for row in rows_under(family.tiles, target, MINORS[0])] == [Tile(16, 32, 8, 1, True)]


def numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", text)]


@pytest.mark.parametrize("target", SMALL)
def test_a_pair_that_does_not_fit_is_refused_with_the_arithmetic_and_a_fix(target):
    with pytest.raises(LimitError) as caught:
        make_plan(make_pair(V32, "fp8_per_tensor", "nvfp4_ds_mla", (target,)))
    message = caught.value.message
    assert message.startswith(f"{target}: tile 16x32 w8 s1 ahead of attention over a cache needs ")
    needs, q, rows, row, again, k, rows_of_k, over, limit, tiles = numbers(message.split(" needs ")[1])
    assert (q, rows_of_k, tiles) == (rows * row, 32, 6)
    assert needs == q + again + k
    assert over == needs - limit > 0
    assert limit == TARGETS[target].shared_limit
    assert "accumulators" not in message
    assert caught.value.hint == (
        f"the spec's targets without {target}, or a layout of narrower rows for cache or extra_cache"
    )


def test_too_many_accumulators_are_named():
    chunks = make_chunks([("nope", 2048), ("rope", 256)], 2304)
    wide = replace(cached(V32, "fp8_ds_mla", "fp8_ds_mla"), chunks=chunks)
    with pytest.raises(
        LimitError, match=r"sm90: V of 2304 columns needs 144 accumulators per thread in tile .*, more than 80"
    ):
        wide.untuned(128, TARGETS["sm90"])
