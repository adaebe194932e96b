"""Estimate of the time left for tasks of several kinds. Some kinds take a hundred times as long as others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any


def kind_of(one: Any) -> str:
    """Return the kind of a compile job, a case or a result: its target, and its kernel or family."""
    name = one.kernel if hasattr(one, "kernel") else one.case.partition(":")[0]
    return f"{one.target} {name}"


class Estimate:
    """The time left, from the seconds that tasks of each kind have taken so far.

    Args:
        kinds: the kinds of all tasks.
    """

    def __init__(self, kinds: Iterable[str]) -> None:
        self._left = Counter(kinds)
        self._tasks: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    def done(self, kind: str, seconds: float | None) -> None:
        """Record a task that is done.

        Args:
            kind: kind of the task.
            seconds: seconds of a worker's time; None if the result was looked up.
        """
        self._left[kind] -= 1
        if seconds is not None:
            self._tasks[kind] += 1
            self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    def seconds_left(self, elapsed: float) -> float | None:
        """Return the estimated seconds until all tasks are done; None before the first.

        Args:
            elapsed: wall-clock seconds since the work began, with one worker or several.
        """
        worked = sum(self._seconds.values())
        if not worked:
            return None
        mean = worked / self._tasks.total()
        means: Mapping[str, float] = {kind: self._seconds[kind] / tasks for kind, tasks in self._tasks.items()}
        return elapsed / worked * sum(left * means.get(kind, mean) for kind, left in self._left.items())
