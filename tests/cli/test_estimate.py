"""The time that is left: it holds where kinds of tasks differ, and one of each kind comes first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlagen.cli.estimate import Estimate, kind_of
from mlagen.workers import first_of_each

# Seconds a task of each kind, and their number: those of sm90 take fifty times as long, and stand last.
KINDS = {"sm80 small": (0.5, 300), "gfx942 small": (1.0, 300), "sm90 gluon": (25.0, 100)}


@pytest.mark.parametrize("workers", [1, 4])
def test_the_estimate_holds_from_the_first_of_each_kind_on(workers: int) -> None:
    tasks = first_of_each([kind for kind, (_, number) in KINDS.items() for _ in range(number)], lambda kind: kind)
    estimate, elapsed = Estimate(tasks), 0.0
    total = sum(seconds * number for seconds, number in KINDS.values()) / workers
    assert estimate.seconds_left(0.0) is None
    for number, kind in enumerate(tasks, 1):
        elapsed += KINDS[kind][0] / workers
        estimate.done(kind, KINDS[kind][0])
        if number >= len(KINDS):
            left = estimate.seconds_left(elapsed)
            assert left is not None
            assert elapsed + left == pytest.approx(total)


def test_results_that_were_known_take_no_time() -> None:
    estimate = Estimate(["a"] * 4 + ["b"])
    estimate.done("a", None)
    assert estimate.seconds_left(1.0) is None
    estimate.done("a", 2.0)
    assert estimate.seconds_left(3.0) == pytest.approx(9.0)  # three as long as this one


def test_kinds_are_of_kernels_and_of_families_by_target() -> None:
    assert kind_of(SimpleNamespace(kernel="_sort", target="sm90")) == "sm90 _sort"
    assert kind_of(SimpleNamespace(case="merge: k: 512", target="sm80")) == "sm80 merge"


def test_the_first_of_each_kind_come_first_and_the_rest_in_order() -> None:
    assert first_of_each([1, 3, 2, 5, 4, 6], lambda number: number % 2) == [1, 2, 3, 5, 4, 6]
