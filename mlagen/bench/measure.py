"""How long calls take on a CUDA or ROCm device.

A short call is timed by replaying a CUDA graph over rotating inputs: no launch gaps, and nothing left in L2 from the
last run. A long one is timed by events after L2 was overwritten. A timer measures one round; contenders are interleaved
round by round in one process, since a hot card is slower and only a ratio taken side by side is worth anything.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_cuda: Any = torch.cuda  # torch types its classes only in part

Call = Callable[[], object]
Timer = Callable[[], float]

GRAPH_BELOW_S = 500e-6  # calls shorter than this are timed by graph replay: between events a slow host would show
FLUSH_BYTES = 512 << 20  # overwriting this much empties any L2, and takes longer than Python takes to launch a call
GRAPH_CALLS = 16  # least calls in a graph, so that the gap between two replays does not count
ROUND_S = 2e-3  # least GPU time that one round of a timer covers
WARM_UP_S = 0.05
FOREIGN_NUMBERS = 4096  # which the kernel before a call adds to: one that is launched as everyone's are, and is short
SHORTEST_S = 1e-8
PAUSE_S = 0.5  # of idling, after which a card is not slowed by its power limit


def flush_l2(device: torch.device) -> Call:
    """A call that overwrites a buffer larger than the device's L2."""
    size = max(FLUSH_BYTES, 4 * torch.cuda.get_device_properties(device).L2_cache_size)
    buffer = torch.empty(size // 4, dtype=torch.int32, device=device)
    return buffer.zero_


def warm_up(call: Call, seconds: float = WARM_UP_S) -> None:
    """Runs a call until compilation, autotuning and allocation are done, and then for `seconds`."""
    call()
    torch.cuda.synchronize()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        call()
        torch.cuda.synchronize()


def _elapsed(call: Call) -> float:
    """Seconds on the device from before a call to after it."""
    start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


class GraphTimer:
    """Captures calls, the same work on one input set each, in one graph, over again where they are few.

    Args:
        calls: the calls.
        round_s: least GPU time of a round.
        keep_results: no call's result takes the memory of another's: written again while still in L2, a result would
            never reach the device's memory.
        before: captured in front of each call; its time counts.
    """

    def __init__(
        self, calls: Sequence[Call], round_s: float = ROUND_S, *, keep_results: bool = False, before: Call | None = None
    ) -> None:
        rotated = [*calls[1:], calls[0]] * math.ceil(GRAPH_CALLS / len(calls))
        self._graph, stream = _cuda.CUDAGraph(), _cuda.Stream()
        self._count = len(rotated)
        rotated[-1]()  # the capture must not hold compilation or allocation of a first call
        torch.cuda.synchronize()
        kept: list[object] = []  # until the capture ends; the graph keeps their memory
        with torch.cuda.stream(stream):
            self._graph.capture_begin()  # torch.cuda.graph would also collect garbage and empty the allocator's cache
            try:
                for call in rotated:
                    if before is not None:
                        before()
                    self._last = call()  # the first input set's, which no later call writes over
                    if keep_results:
                        kept.append(self._last)
            finally:
                self._graph.capture_end()
        self._graph.replay()
        self._replays = max(1, math.ceil(round_s / max(_elapsed(self._graph.replay), 1e-6)))

    def __call__(self) -> float:
        """Mean seconds of a call over a round of replays."""
        return _elapsed(self._many) / (self._replays * self._count)

    def _many(self) -> None:
        for _ in range(self._replays):
            self._graph.replay()

    def result(self) -> Any:
        """Replays the graph once and gives the result of the first input set, in memory that replays write again."""
        self._graph.replay()
        return self._last


class BehindTimer:
    """Seconds that a call adds behind a small kernel of someone else's, by graph replay.

    A graph that repeats one call lets a kernel with programmatic launch begin under the one before, which is itself. In
    a model another kernel stands before it, that lets nothing begin early.

    Args:
        calls: the calls, the same work on one input set each.
        keep_results: as of GraphTimer.
    """

    def __init__(self, calls: Sequence[Call], *, keep_results: bool = False) -> None:
        numbers = torch.zeros(FOREIGN_NUMBERS, device=torch.device("cuda", torch.cuda.current_device()))

        def foreign() -> object:
            return numbers.add_(1.0)

        self._pairs = GraphTimer(calls, keep_results=keep_results, before=foreign)
        self._alone = GraphTimer([foreign])

    def __call__(self) -> float:
        """Mean seconds that a call adds, over a round of replays."""
        return max(self._pairs() - self._alone(), SHORTEST_S)


def event_timer(call: Call, flush: Call | None, repeats: int = 3) -> Timer:
    """A timer that gives the median seconds of `repeats` calls, each after a `flush` of L2 (None: L2 as it is)."""

    def once() -> float:
        if flush is not None:
            flush()
        return _elapsed(call)

    return lambda: statistics.median(once() for _ in range(repeats))


def device_timer(calls: Sequence[Call], flush: Call) -> Timer:
    """The timer that suits the calls' length: by graph replay, or by events."""
    warm_up(calls[0])
    by_events = event_timer(calls[0], flush)
    if min(by_events() for _ in range(3)) < GRAPH_BELOW_S:  # one may be disturbed
        return GraphTimer(calls)
    return by_events


def event_time(call: Call, rounds: int = 9, *, flush: bool = True) -> float:
    """Median seconds of a call between events, with L2 overwritten before each if `flush`."""
    warm_up(call)
    device = torch.device("cuda", torch.cuda.current_device())
    return event_timer(call, flush_l2(device) if flush else None, repeats=rounds)()


def eager_timer(call: Call, loops: int = 200) -> Timer:
    """A timer that gives wall seconds a call of `loops` launches from Python and one synchronisation.

    For a call that is shorter on the device than its launch, the time is the launch's cost for the host.
    """

    def once() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(loops):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / loops

    return once


def eager_time(call: Call, loops: int = 200, rounds: int = 5) -> float:
    """Median wall seconds of a call launched from Python."""
    warm_up(call)
    timer = eager_timer(call, loops)
    return statistics.median(timer() for _ in range(rounds))


def after_pause(timer: Timer) -> float:
    """A round of a timer on a card that idled before it; rounds that follow each other find it hot."""
    torch.cuda.synchronize()
    time.sleep(PAUSE_S)
    return timer()


@dataclass(frozen=True)
class Interleaved:
    """Results of rounds of several contenders.

    Attributes:
        seconds: median seconds a call, by contender.
        ratios: median over rounds of a contender's seconds over the first one's.
        spreads, ratio_spreads: how far the rounds of each lie apart, as `spread` says.
    """

    seconds: dict[str, float]
    ratios: dict[str, float]
    spreads: dict[str, float]
    ratio_spreads: dict[str, float]


def interleave(timers: Mapping[str, Timer], rounds: int) -> Interleaved:
    """Runs a round of every contender, then the next, so that all share the card's heat; the order turns each round."""
    names = list(timers)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names) if names else 0
        for name in names[turn:] + names[:turn]:
            samples[name].append(timers[name]())
    return summarise(samples)


def summarise(samples: Mapping[str, Sequence[float]]) -> Interleaved:
    """Medians and spreads of each contender's rounds, and of its ratio to the first contender's in the same round."""
    first = next(iter(samples.values()), ())
    ratios = {name: [time / base for time, base in zip(times, first, strict=True)] for name, times in samples.items()}
    return Interleaved(
        {name: statistics.median(times) for name, times in samples.items()},
        {name: statistics.median(each) for name, each in ratios.items()},
        {name: spread(times) for name, times in samples.items()},
        {name: spread(each) for name, each in ratios.items()},
    )


def spread(samples: Sequence[float]) -> float:
    """From the 10th to the 90th percentile of some rounds, as a share of their median; 0 of a single round."""
    if len(samples) < 2:
        return 0.0
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / statistics.median(samples)
