"""The part of slow tests that a run takes: another part for each commit, so that all parts get their turn."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

Task = TypeVar("Task")


def _seed() -> int:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return int(done.stdout.strip()[:8] or "0", 16)


def drawn(names: Iterable[str], number: int) -> list[str]:
    """A number of names, others for each commit."""
    return random.Random(SEED).sample(sorted(names), number)


def some(names: Iterable[str], number: int) -> list[Any]:
    """Parameters of a test: a number of names for each commit, and the others in the slow run."""
    every = sorted(names)
    taken = drawn(every, number)
    return [pytest.param(name, marks=[] if name in taken else pytest.mark.slow) for name in every]


def third(tasks: Sequence[Task]) -> list[Task]:
    """A third of the cases of a package in their order, others for each commit."""
    taken = set(random.Random(SEED).sample(range(len(tasks)), (len(tasks) + 2) // 3))
    return [task for at, task in enumerate(tasks) if at in taken]


# Every run takes a third of the cases, and a slow one all.
by_share = pytest.mark.parametrize(
    "choose", [third, pytest.param(list, marks=pytest.mark.slow)], ids=["third", "every"]
)
SEED = _seed()  # of this commit; outside of a checkout always the same
