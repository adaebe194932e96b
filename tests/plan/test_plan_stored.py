"""Where the dequantising kernel finds its loads, in the layouts that it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlagen.plan import SparseDecodePlan, load_plan
from mlagen.plan.sm90.kernel import register_columns
from mlagen.plan.sm90.stored import StoredRows

SPECS = Path(__file__).parents[2] / "specs"


def stored(name: str) -> StoredRows:
    plan = load_plan(SPECS / f"{name}.yaml")
    sm90 = plan.of(SparseDecodePlan).sm90
    assert sm90 is not None
    assert plan.layout is not None
    other = None if plan.extra_layout == plan.layout else plan.extra_layout
    return StoredRows(sm90, plan.layout, other, dual=plan.extra_layout is not None)


def test_fp32_scales_stand_behind_the_latent_and_before_rope():
    rows = stored("dsv32_fp8")
    assert (rows.scales.offset, rows.scales.tile, rows.scale_chunks) == (512, 128, 8)
    assert (rows.tail.offset, rows.tail_words, rows.thread_tail) == (528, 32, 2)
    assert rows.dual is False


def test_a_row_of_two_planes_ends_with_rope_behind_its_last_tile():
    rows = stored("dsv4_pro")
    assert (rows.row_bytes, rows.plane_scales) == (576, 8)
    assert (rows.tile_words, rows.last_byte, rows.tail.offset) == (16, 384, 448)
    assert rows.dual is True


def test_a_piece_is_a_scale_of_the_other_cache():
    rows = stored("dsv41")
    assert (rows.scales.offset, rows.other_scales.offset) == (512, 256)
    assert (rows.other_scales.tile, rows.run) == (16, 8)
    assert rows.q_words == 64


@pytest.mark.parametrize(("columns", "found"), [(64, (16, 32)), (128, (16, 32, 64)), (256, (16, 32, 64, 128))])
def test_registers_of_an_accumulator_differ_by_powers_of_two(columns: int, found: tuple[int, ...]) -> None:
    assert register_columns(columns) == found
