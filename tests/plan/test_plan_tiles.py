"""Targets and the tiles that an untuned one takes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_specs import dims, make_spec

from mlagen.errors import LimitError
from mlagen.plan import TARGETS, SparseFwdPlan, Tile, Tuned, make_plan
from mlagen.plan.rows import row_chunks
from mlagen.plan.tiles.chunks import make_chunks
from mlagen.plan.tiles.tile import default_rows, make_row

# Bytes of shared memory that a program may take.
LIMITS = {
    "sm80": 166_912,
    "sm86": 101_376,
    "sm89": 101_376,
    "sm90": 232_448,
    "sm100": 232_448,
    "sm120": 101_376,
    "gfx942": 65_536,
    "gfx950": 163_840,
}


def test_the_targets_are_these_with_these_limits():
    assert {name: target.shared_limit for name, target in TARGETS.items()} == LIMITS
    assert all(name == target.name for name, target in TARGETS.items())


def test_amd_wavefronts_are_twice_as_wide():
    assert {name: target.warp_size for name, target in TARGETS.items()} == {
        name: 64 if name.startswith("gfx") else 32 for name in LIMITS
    }


def test_e4m3_converts_in_hardware_from_sm89_and_gfx950_on():
    assert {name for name, target in TARGETS.items() if target.has_e4m3} == {"sm89", "sm90", "sm100", "sm120", "gfx950"}


@pytest.mark.parametrize("target", list(TARGETS))
@settings(max_examples=150, deadline=None, derandomize=True)
@given(dims=dims(), num_heads=st.integers(1, 128))
def test_every_dims_that_a_spec_takes_has_tiles_that_fit(target, dims, num_heads):
    facts = TARGETS[target]
    rows = default_rows(num_heads, row_chunks(make_spec(**dims)), facts)
    for row in rows:
        assert 0 < row.expected_shared <= LIMITS[target]
        assert row.programs_per_sm * row.tile.num_warps * facts.warp_size <= facts.threads_per_sm
        resident = row.programs_per_sm * (row.expected_shared + facts.shared_reserve)
        assert row.programs_per_sm == 1 or resident <= facts.shared_per_sm
        assert row.max_tokens is None
        assert row.reason
    *bounded, last = [row.max_heads for row in rows]
    assert last is None
    assert bounded == sorted(set(bounded)) == [row.tile.block_h for row in rows[:-1]]


def test_few_heads_take_one_row_and_many_take_up_to_64_in_a_program():
    chunks = row_chunks(make_spec())
    tables = {heads: default_rows(heads, chunks, TARGETS["sm90"]) for heads in (1, 16, 17, 32, 33, 128)}
    blocks = {heads: [row.tile.block_h for row in rows] for heads, rows in tables.items()}
    assert blocks == {1: [16], 16: [16], 17: [16, 32], 32: [16, 32], 33: [16, 32, 64], 128: [16, 32, 64]}


def numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", text)]


@pytest.mark.parametrize("target", list(TARGETS))
def test_a_row_too_wide_for_shared_memory_is_told_with_the_arithmetic(target):
    with pytest.raises(LimitError) as caught:
        default_rows(128, make_chunks([("nope", 8192)], 8192), TARGETS[target])
    message = caught.value.message
    assert message.startswith(f"{target}: tile 16x16 ")
    assert caught.value.exit_code == 1
    needs, rows_of_q, q, rows_of_k, k, over, limit = numbers(message.split(" needs ")[1])
    assert (rows_of_q, rows_of_k, q, k) == (16, 16, 16_384, 16_384)
    assert limit == LIMITS[target]
    assert over == needs - limit > 0


def test_a_v_too_wide_for_the_registers_is_told_with_the_arithmetic():
    with pytest.raises(LimitError) as caught:
        default_rows(128, make_chunks([("nope", 2048), ("rope", 256)], 2304), TARGETS["sm90"])
    # 16 heads of 2,304 columns over the 256 threads of 8 warps.
    assert caught.value.message == (
        "sm90: V of 2304 columns takes 144 accumulators a thread in tile 16x16 w8 s2 ahead, more than 80"
    )


def test_a_tuned_tile_that_its_target_cannot_hold_is_refused():
    with pytest.raises(LimitError, match=r"sm86: tile 64x64 w8 s2 needs .* than the 101,376 a program gets"):
        make_row(Tile(64, 64, 8, 2, False), row_chunks(make_spec()), TARGETS["sm86"], "tuned")


def test_tuned_rows_replace_a_targets_own_and_leave_the_others():
    spec = make_spec(targets=("sm90", "gfx942"))
    tuned = (make_row(Tile(32, 16, 4, 2, False), row_chunks(spec), TARGETS["gfx942"], "tuned"),)
    tiles = dict(make_plan(spec, Tuned({("sparse_fwd", "gfx942"): tuned})).of(SparseFwdPlan).tiles)
    assert tiles == {**dict(make_plan(spec).of(SparseFwdPlan).tiles), "gfx942": tuned}
