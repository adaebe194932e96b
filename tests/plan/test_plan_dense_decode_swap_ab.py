"""The swap-AB kernel of dense attention: the specs that have it, the calls that run it, its resources."""

import pytest
from plan_specs import DENSE, ROOT, make_spec

from mlagen.bench import load_package
from mlagen.plan import DenseDecodePlan, Sm90Row, make_plan


def test_dense_attention_of_few_rows_has_one_by_swap_ab_and_numbers_by_hand():
    dense = make_plan(make_spec(attention={"kind": "dense"}, **DENSE)).of(DenseDecodePlan)
    assert dense.sm90_modules == ("_dense_decode_sm90", "_dense_decode_sm90_swap_ab")
    assert [one.block_h for one in dense.sm90_swap_ab] == [16, 32]
    for one in dense.sm90_swap_ab:
        # Q, two blocks of K and a third left half, both consumers' P, and of each row four maxima, m and l of both.
        tiles = (one.block_h + 2 * 64) * 576 + 64 * 256 + 2 * 64 * one.block_h
        assert one.expected_shared == 2 * tiles + 2 * (4 + 2) * one.block_h * 4
        # 576 columns of a block 16 at a time; then 512 of V, 64 at a time, by 64 keys; of both consumers.
        assert one.expected_products == 2 * (36 + 8 * 4)


def test_dense_attention_whose_blocks_are_narrow_has_no_swap_ab_kernel():
    dense = make_plan(make_spec(attention={"kind": "dense"}, **{**DENSE, "qk_rope_head_dim": 128})).of(DenseDecodePlan)
    assert (dense.sm90.block_n, dense.sm90_swap_ab) == (32, ())
    assert dense.sm90.rows == (Sm90Row(32, 5), Sm90Row(None, 1))
    assert dense.sm90_modules == ("_dense_decode_sm90",)


@pytest.mark.parametrize(
    ("requests", "rows", "batch_invariant", "kernel", "block_h"),
    [
        (1, 1, False, "sm90_swap_ab", 16),
        (1, 16, False, "sm90_swap_ab", 16),
        (2, 17, False, "sm90_swap_ab", 32),
        (1, 17, False, "portable", 16),
        (128, 32, False, "sm90_swap_ab", 32),
        (1, 32, True, "sm90_swap_ab", 32),
        (1, 33, False, "sm90", 64),
        (128, 128, True, "sm90", 64),
    ],
)
def test_few_rows_run_the_swap_ab_kernel_and_others_the_other(requests, rows, batch_invariant, kernel, block_h):
    package = load_package(ROOT / "generated" / "dsv3")
    dense, launch = package.root.dense_decode, package.root._launch
    facts = launch.DeviceFacts("sm90", 132)
    found = dense.schedule(facts, 16, requests, 1, rows, 1, 64, 4096, batch_invariant, True)
    assert (found.kernel, found.tile.block_h) == (kernel, block_h)
    assert dense.schedule(facts, 16, requests, 1, rows, 1, 64, 4096, batch_invariant).kernel == "portable"
    for forced, tile in (("sm90", 64), ("sm90_swap_ab", 16 if rows <= 16 else 32)):
        found = facts._replace(forced=launch.Forced(kernel=forced))
        found = dense.schedule(found, 16, requests, 1, rows, 1, 64, 4096, batch_invariant, True)
        assert (found.kernel, found.tile.block_h) == (forced, tile)
