"""Tile tables from times: the times here are made up, since only their arithmetic is at stake."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.bench.package import BenchPackage
from mlagen.bench.tune.choose import (
    SPLIT_TOLERANCE,
    TILE_TOLERANCE,
    Choice,
    Regime,
    boundaries,
    choose_sm90,
    choose_tiles,
    fewest_tokens,
    fit_resident,
    make_choices,
    runs_sm90,
)
from mlagen.bench.tune.tunable import CLASSES, DENSE_DECODE, SPARSE_DECODE, SPARSE_FWD, Tunable
from mlagen.plan import Sm90Row, Tile

A, B, C = Tile(16, 32, 4, 2, True), Tile(16, 64, 4, 2, True), Tile(64, 64, 8, 2, False)
R1, R4, R16 = Regime(16, 16, 1), Regime(16, 16, 4), Regime(16, 16, 16)


def flat(regime: Regime, tile: Tile, resident: int) -> float:
    """Every split count is as good."""
    return 1.0


def test_the_fastest_tile_wins() -> None:
    assert choose_tiles({R1: {A: 2.0, B: 1.0}}) == {R1: B}


def test_a_tile_that_is_nearly_as_fast_everywhere_spares_others() -> None:
    times = {R1: {A: 1.0, B: 1.01}, R4: {B: 1.0, C: 2.0}, R16: {C: 1.0, B: 1.019}}
    assert choose_tiles(times) == dict.fromkeys(times, B)


def test_a_tile_beyond_the_tolerance_is_not_taken() -> None:
    assert choose_tiles({R1: {A: 1.0, B: 1.2}, R4: {B: 1.0}}) == {R1: A, R4: B}


def test_regimes_without_times_get_no_tile() -> None:
    assert choose_tiles({R1: {}, R4: {A: 1.0}}) == {R4: A}


SOME_TIMES = st.dictionaries(
    st.builds(Regime, st.sampled_from([0, 16, 32]), st.just(16), st.sampled_from([1, 4, 16, 64])),
    st.dictionaries(st.sampled_from([A, B, C]), st.floats(1e-6, 1e-3), min_size=1),
    min_size=1,
)


# On a busy machine drawing nested mappings takes long enough for a health check that speaks of nothing tested here.
@settings(deadline=None)
@given(SOME_TIMES)
def test_every_regime_gets_a_tile_near_its_fastest(times: dict[Regime, dict[Tile, float]]) -> None:
    chosen = choose_tiles(times)
    assert chosen.keys() == times.keys()
    for regime, tile in chosen.items():
        assert times[regime][tile] <= TILE_TOLERANCE * min(times[regime].values()) * (1 + 1e-12)


def test_boundaries_lie_between_what_was_measured() -> None:
    assert boundaries([1, 4, 16, 64, 128, 4096]) == [2, 8, 32, 90, 724, None]
    assert boundaries([7]) == [None]


def test_the_value_nearest_to_what_fits_a_multiprocessor_is_taken() -> None:
    assert fit_resident(A, [R1], flat, preferred=5) == [([R1], 5, 1.0)]


def test_one_value_serves_regimes_that_agree() -> None:
    good = {R1: {2, 3, 4}, R4: {4, 5}}

    def slowdown(regime: Regime, tile: Tile, resident: int) -> float:
        return 1.0 if resident in good[regime] else 1.5

    assert fit_resident(A, [R1, R4], slowdown, preferred=2) == [([R1, R4], 4, 1.0)]


def test_regimes_that_disagree_get_rows_of_their_own() -> None:
    good = {R1: {2}, R4: {8}, R16: {8, 9}}

    def slowdown(regime: Regime, tile: Tile, resident: int) -> float:
        return 1.0 if resident in good[regime] else 1.5

    assert fit_resident(A, [R1, R4, R16], slowdown, preferred=1) == [([R1], 2, 1.0), ([R4, R16], 8, 1.0)]


def test_where_no_value_is_good_the_best_is_taken() -> None:
    found = fit_resident(A, [R1], lambda regime, tile, resident: 1.1 + abs(resident - 7) / 10, preferred=1)
    assert found == [([R1], 7, 1.1)]


def test_neighbours_with_one_tile_share_a_row() -> None:
    choices = make_choices({R1: A, R4: A, R16: B}, flat, lambda tile: 2)
    assert choices == [Choice(None, 8, A, 2, 1.0), Choice(None, None, B, 2, 1.0)]


def test_classes_that_agree_share_their_rows() -> None:
    other = Regime(0, 128, 1)
    assert make_choices({R1: A, other: A}, flat, lambda tile: 2) == [Choice(None, None, A, 2, 1.0)]
    assert make_choices({R1: A, other: B}, flat, lambda tile: 2) == [
        Choice(16, None, A, 2, 1.0),
        Choice(None, None, B, 2, 1.0),
    ]


@settings(deadline=None)
@given(st.data())
def test_a_table_holds_every_call_and_ends_each_class_with_any_number_of_tokens(data: st.DataObject) -> None:
    regimes = data.draw(st.sampled_from([SPARSE_FWD, SPARSE_DECODE])).regimes(data.draw(st.integers(1, 128)))
    tiles = {regime: data.draw(st.sampled_from([A, B, C])) for regime in regimes}
    rows = make_choices(tiles, flat, lambda tile: 2)
    assert (rows[-1].max_heads, rows[-1].max_tokens) == (None, None)
    most = [(row.max_heads or math.inf, row.max_tokens or math.inf) for row in rows]
    assert most == sorted(set(most))
    for row, following in itertools.pairwise(rows):
        assert row.max_tokens is not None or row.max_heads != following.max_heads
        assert row.max_tokens is None or row.max_heads == following.max_heads
    for regime, tile in tiles.items():
        row = next(
            row
            for row in rows
            if regime.num_heads <= (row.max_heads or math.inf) and regime.tokens <= (row.max_tokens or math.inf)
        )
        assert row.tile == tile


@pytest.mark.parametrize("kernels", [SPARSE_FWD, SPARSE_DECODE], ids=["sparse_fwd", "sparse_decode"])
@pytest.mark.parametrize("heads", [1, 12, 16, 17, 32, 64, 96, 128])
def test_regimes_measure_heads_that_their_row_holds(heads: int, kernels: Tunable) -> None:
    for regime in kernels.regimes(heads):
        assert regime.num_heads <= heads
        assert regime.most_heads == 0 or regime.num_heads == regime.most_heads


@pytest.mark.parametrize("heads", [1, 5, 16, 40, 64, 96, 128])
def test_rows_of_dense_attention_are_those_of_two_query_tokens_at_most(heads: int) -> None:
    regimes = DENSE_DECODE.regimes(heads)
    rows = [regime.num_heads for regime in regimes if regime.tokens == 1]
    assert rows == [*(most for most in CLASSES if most < 2 * heads), min(128, 2 * heads)]
    assert {regime.tokens for regime in regimes} == {1, 16, 64, 128}
    assert all(regime.most_heads == regime.num_heads for regime in regimes[: -len(DENSE_DECODE.tokens)])
    assert {regime.most_heads for regime in regimes[-len(DENSE_DECODE.tokens) :]} == {0}


def test_programs_a_multiprocessor_that_were_not_tried_are_not_taken() -> None:
    def slowdown(regime: Regime, tile: Tile, resident: int) -> float:
        return {1: 1.0, 2: 1.1, 3: 1.02}.get(resident, math.inf)

    (choice,) = make_choices({R1: A, R4: A}, slowdown, lambda tile: 4)
    assert (choice.tile, choice.resident, choice.slowdown) == (A, 3, 1.02)


NEVER = (Sm90Row(None, None),)
OTHER = [Regime(0, 128, tokens) for tokens in (1, 4, 16)]


@pytest.mark.parametrize(
    ("faster", "fewest"),
    [((True, True, True), 1), ((False, True, True), 3), ((True, False, True), 9), ((True, True, False), None)],
)
def test_the_sm90_kernel_runs_from_where_on_nothing_is_slower_with_it(
    faster: tuple[bool, ...], fewest: int | None
) -> None:
    """Between two token counts that were measured, a call belongs to the nearer, as with tiles."""
    assert choose_sm90([R16, R1, R4], dict(zip((R1, R4, R16), faster, strict=True)), NEVER) == (Sm90Row(None, fewest),)


def test_classes_that_agree_on_the_sm90_kernel_share_a_row() -> None:
    every = [*OTHER, R1, R4, R16]
    assert choose_sm90(every, dict.fromkeys(every, True), NEVER) == (Sm90Row(None, 1),)
    split = {**dict.fromkeys(every, True), R1: False}
    assert choose_sm90(every, split, NEVER) == (Sm90Row(16, 3), Sm90Row(None, 1))


def test_the_packages_choice_stays_where_nothing_was_measured() -> None:
    present = (Sm90Row(16, 2), Sm90Row(None, None))
    every = [R1, R4, R16, *OTHER]
    assert choose_sm90(every, {}, present) == present
    assert choose_sm90(every, dict.fromkeys(OTHER, True), present) == (Sm90Row(16, 2), Sm90Row(None, 1))
    assert choose_sm90(every, {R16: True}, present) == present
    assert choose_sm90(every, {R16: False}, present) == NEVER
    assert choose_sm90(every, {R4: False}, present) == (Sm90Row(16, 9), Sm90Row(None, None))
    assert choose_sm90(every, {R1: True}, present) == (Sm90Row(16, 1), Sm90Row(None, None))


TOKEN_COUNTS = st.none() | st.integers(1, 1 << 13)


@settings(deadline=None)
@given(st.data())
def test_rows_of_the_sm90_kernel_hold_what_was_measured_and_what_was_before(data: st.DataObject) -> None:
    regimes = data.draw(st.sampled_from([SPARSE_FWD, SPARSE_DECODE])).regimes(data.draw(st.integers(1, 128)))
    faster = data.draw(st.dictionaries(st.sampled_from(regimes), st.booleans()))
    heads = sorted(data.draw(st.sets(st.sampled_from([8, 16, 32, 48]))))
    present = [Sm90Row(most, data.draw(TOKEN_COUNTS)) for most in (*heads, None)]
    rows = choose_sm90(regimes, faster, present)
    most_heads = [row.max_heads or math.inf for row in rows]
    assert most_heads == sorted(set(most_heads))
    assert most_heads[-1] == math.inf
    verdicts = {regime: faster.get(regime, runs_sm90(present, regime)) for regime in regimes}
    for regime in regimes:
        above = [each for each in regimes if each.most_heads == regime.most_heads and each.tokens >= regime.tokens]
        assert runs_sm90(rows, regime) == all(verdicts[each] for each in above)
    for most in {regime.most_heads for regime in regimes} - {regime.most_heads for regime in faster}:
        num_heads = next(regime.num_heads for regime in regimes if regime.most_heads == most)
        assert fewest_tokens(rows, num_heads) == fewest_tokens(present, num_heads)


def test_the_packages_own_rule_can_be_fitted(dsv32: BenchPackage) -> None:
    """A device on which 3 programs a multiprocessor are best: the fit finds a value that makes the rule say so."""
    from mlagen.bench.tune.driver import Driver

    driver = Driver(dsv32, "sparse_fwd", dsv32.module("_launch").DeviceFacts("sm90", 132))
    regimes = [Regime(16, 16, tokens) for tokens in (1, 4, 16, 64, 128)]

    def seconds(regime: Regime, splits: int) -> float:
        blocks, programs = 2048 // A.block_n, regime.tokens
        steps = -(-programs * splits // (132 * 3)) * (-(-blocks // splits) + 2)
        return steps + (4 if splits > 1 else 0)

    def slowdown(regime: Regime, tile: Tile, resident: int) -> float:
        splits = driver.schedule(tile, resident, regime.tokens, regime.num_heads, [2048]).num_splits
        return seconds(regime, splits) / min(seconds(regime, count) for count in range(1, 65))

    runs = fit_resident(A, regimes, slowdown, preferred=2)
    assert [regime for members, _, _ in runs for regime in members] == regimes
    assert all(worst <= SPLIT_TOLERANCE for _, _, worst in runs)
