from __future__ import annotations

from itertools import count

import pytest
import torch

from mlagen.bench.measure import interleave, spread, summarise


def test_contenders_take_turns_and_the_order_rotates() -> None:
    order: list[str] = []
    ticks = count(1)

    def timer(name: str) -> float:
        order.append(name)
        return float(next(ticks))

    interleave({"a": lambda: timer("a"), "b": lambda: timer("b")}, rounds=3)
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_ratios_are_taken_within_a_round() -> None:
    # The card heats up: both get slower, and the ratio of a round stays.
    found = summarise({"ours": [1.0, 2.0, 4.0], "theirs": [1.5, 3.0, 6.0]})
    assert found.seconds == {"ours": 2.0, "theirs": 3.0}
    assert found.ratios == {"ours": 1.0, "theirs": 1.5}


def test_spread_is_of_the_rounds_but_the_outermost() -> None:
    rounds = [1.0, 1.0, *[2.0] * 7, 3.0, 99.0]
    assert spread(rounds) == (3.0 - 1.0) / 2.0
    assert spread([5.0]) == 0.0
    found = summarise({"ours": [1.0, 2.0, 4.0], "theirs": [1.5, 3.0, 6.0]})
    assert found.spreads["ours"] > 0.5
    assert found.ratio_spreads["theirs"] == 0.0


def test_nobody_to_measure_is_no_error() -> None:
    assert interleave({}, rounds=3).seconds == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_timer_times_a_copy() -> None:
    from mlagen.bench.measure import GraphTimer, eager_time, event_time

    source = torch.rand(1 << 20, device="cuda")
    target = torch.empty_like(source)

    def copy() -> torch.Tensor:
        return target.copy_(source)

    assert all(seconds > 0 for seconds in (GraphTimer([copy, copy])(), event_time(copy), eager_time(copy, loops=20)))
    assert torch.equal(source, target)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("keep_results", [False, True])
def test_a_graph_gives_the_first_sets_result_and_a_time_behind_another_kernel(keep_results: bool) -> None:
    from mlagen.bench.measure import BehindTimer, GraphTimer

    sets = [torch.full((1 << 10,), float(number), device="cuda") for number in range(5)]
    calls = [lambda one=one: one * 2 for one in sets]
    sets[0].fill_(7.0)
    timer = GraphTimer(calls, keep_results=keep_results)
    timer.result().fill_(float("nan"))
    assert torch.equal(timer.result(), torch.full_like(sets[0], 14.0))
    assert 0 < BehindTimer(calls, keep_results=keep_results)() < 1e-3
