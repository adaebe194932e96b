"""How long work still takes, where tasks of some kinds take a hundred times as long as those of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any


def kind_of(one: Any) -> str:
    """The kind of a compile job, a case, or the result of one: its kernel or the family of its case, and its target."""
    name = one.kernel if hasattr(one, "kernel") else one.case.partition(":")[0]
    return f"{one.target} {name}"


class Estimate:
    """The time left, from the seconds that tasks of each kind have taken so far.

    Args:
        kinds: of all tasks.
    """

    def __init__(self, kinds: Iterable[str]) -> None:
        self._left = Counter(kinds)
        self._tasks: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    def done(self, kind: str, seconds: float | None) -> None:
        """Takes note of a task that is done.

        Args:
            kind: the task's.
            seconds: that it took a worker; None: its result was known.
        """
        self._left[kind] -= 1
        if seconds is not None:
            self._tasks[kind] += 1
            self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    def seconds_left(self, elapsed: float) -> float | None:
        """Seconds of time until all is done; None where no task was.

        Args:
            elapsed: seconds of time since the work began, by one worker or several.
        """
        worked = sum(self._seconds.values())
        if not worked:
            return None
        mean = worked / self._tasks.total()
        means: Mapping[str, float] = {kind: self._seconds[kind] / tasks for kind, tasks in self._tasks.items()}
        return elapsed / worked * sum(left * means.get(kind, mean) for kind, left in self._left.items())
