"""The part of slow tests that a run takes: another part for each commit, so that all parts get their turn."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterable
from pathlib import Path


def _seed() -> int:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return int(done.stdout.strip()[:8] or "0", 16)


def drawn(names: Iterable[str], number: int) -> list[str]:
    """A number of names, others for each commit."""
    return random.Random(SEED).sample(sorted(names), number)


SEED = _seed()  # of this commit; outside of a checkout always the same
