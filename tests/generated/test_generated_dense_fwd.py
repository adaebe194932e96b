"""How a call of multi-head attention is scheduled: by the tables, or as it is forced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checked_in import package_of

from mlagen.compile.worker import load_package

PACKAGE: Any = load_package(package_of("dsv3_prefill_tma"))
LAUNCH, DENSE_FWD, TILES = PACKAGE._launch, PACKAGE.dense_fwd, PACKAGE.dense_fwd._tiles
SM90 = LAUNCH.DeviceFacts("sm90", 132, sm90=True)
DESCRIPTOR = "portable_descriptor"  # the kernel of aligned calls on targets with descriptors


def forced(**choices: Any) -> Any:
    """The facts of an sm90 device inside `force`."""
    with LAUNCH.planned_for(SM90), LAUNCH.force(**choices):
        return LAUNCH.device_facts(torch.device("cpu"))


@pytest.mark.parametrize("rows", [0, 1, 64, 65, 4096])
def test_the_first_row_that_holds_a_call_is_taken(rows: int) -> None:
    tile = next(tile for most, tile in TILES.DENSE_FWD_TILES["sm90"] if rows <= most)
    assert DENSE_FWD.schedule(SM90, True, rows) == (DESCRIPTOR, tile, True)
    assert DENSE_FWD.schedule(SM90, False, rows) == ("portable", TILES.DENSE_FWD_UNALIGNED_TILES["sm90"], False)


def test_calls_run_the_sm90_kernel_from_the_tables_rows_on() -> None:
    fewest = TILES.DENSE_FWD_SM90_QUERIES
    assert DENSE_FWD.schedule(SM90, True, fewest, can_sm90=True) == ("sm90", DENSE_FWD.SM90_TILE, True)
    assert DENSE_FWD.schedule(SM90, True, fewest - 1, can_sm90=True).kernel == DESCRIPTOR


@pytest.mark.parametrize("rows", [0, 4096])
def test_a_forced_kernel_runs_every_call_that_it_can(rows: int) -> None:
    for kernel in ("sm90", "portable", DESCRIPTOR):
        assert DENSE_FWD.schedule(forced(kernel=kernel), True, rows, can_sm90=True).kernel == kernel
        other = "portable" if kernel == "portable" else DESCRIPTOR
        assert DENSE_FWD.schedule(forced(kernel=kernel), True, rows).kernel == other
        assert DENSE_FWD.schedule(forced(kernel=kernel), False, rows).kernel == "portable"


@pytest.mark.parametrize("aligned", [True, False])
def test_a_forced_tile_is_the_portable_kernels(aligned: bool) -> None:
    tile, kernel = TILES.DenseFwdTile(16, 16, 4, 1), DESCRIPTOR if aligned else "portable"
    assert DENSE_FWD.schedule(forced(tile=tile), aligned, 4096) == (kernel, tile, aligned)
    assert DENSE_FWD.schedule(forced(tile=tile), aligned, 4096, can_sm90=True).tile == DENSE_FWD.SM90_TILE


ROW_BYTES = 2 * (DENSE_FWD.QK_HEAD_DIM + DENSE_FWD.V_HEAD_DIM)


def test_heads_run_side_by_side_as_far_as_l2_holds_their_keys_in_groups_of_one_size() -> None:
    assert DENSE_FWD._head_group(9 * ROW_BYTES, 1, 64, 1) == 8  # not 7 groups of 9 and one of 1
    assert DENSE_FWD._head_group(9 * ROW_BYTES, 1, 64, 4) == 32
    assert DENSE_FWD._head_group(9 * ROW_BYTES, 1, 13, 1) == 7  # no divisor: 7 and 6, not 9 and 4
    assert DENSE_FWD._head_group(9 * ROW_BYTES, 1, 8, 1) == 8
    assert DENSE_FWD._head_group(9 * ROW_BYTES, 4, 64, 1) == 2
    assert DENSE_FWD._head_group(9 * ROW_BYTES, 1 << 30, 128, 2) == 2
    assert DENSE_FWD._head_group(128 * ROW_BYTES, 0, 128, 1) == 128


@pytest.mark.parametrize("num_kv_heads", [1, 2, 5, 7, 16, 24, 64, 97, 128])
@pytest.mark.parametrize("rows_in_l2", [1, 2, 3, 9, 19, 200])
def test_even_groups_fill_more_than_half_of_l2(num_kv_heads: int, rows_in_l2: int) -> None:
    count = DENSE_FWD._head_group(rows_in_l2 * ROW_BYTES, 1, num_kv_heads, 1)
    most = min(rows_in_l2, num_kv_heads)
    divisors = [number for number in range(most, most // 2, -1) if num_kv_heads % number == 0]
    assert most // 2 < count <= most
    assert count == divisors[0] if divisors else num_kv_heads % count


@pytest.mark.parametrize("kernel", ["sm90", "portable"])
def test_a_call_groups_heads_as_its_kernel_does(kernel: str) -> None:
    q = k = torch.empty(4096, 64, DENSE_FWD.QK_HEAD_DIM, dtype=torch.bfloat16, device="meta")
    v = out = torch.empty(4096, 64, DENSE_FWD.V_HEAD_DIM, dtype=torch.bfloat16, device="meta")
    starts = torch.empty(2, dtype=torch.int32, device="meta")
    facts = forced(kernel=kernel)
    schedule = DENSE_FWD.schedule(facts, True, 4096, can_sm90=True)
    lse = torch.empty(0, device="meta")
    call = DENSE_FWD._Call(facts, schedule, q, k, v, starts, starts, 4096, 1.0, True, out, lse)
    assert call.head_group == {"sm90": 16, "portable": 8}[kernel]
