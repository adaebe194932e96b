"""The part of slow tests that a run takes: another part for each commit, so that all parts get their turn."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

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


def half(tasks: Sequence[Task]) -> list[Task]:
    """Half of the cases of a package in their order, others for each commit."""
    taken = set(random.Random(SEED).sample(range(len(tasks)), (len(tasks) + 1) // 2))
    return [task for at, task in enumerate(tasks) if at in taken]


# Every run takes half of the cases, and a slow one all.
by_share = pytest.mark.parametrize("choose", [half, pytest.param(list, marks=pytest.mark.slow)], ids=["half", "every"])
SEED = _seed()  # of this commit; outside of a checkout always the same
