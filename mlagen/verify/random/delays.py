"""Copies of packages whose sm90 kernels sleep before they synchronise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def delayed_copies(folders: Sequence[Path], work: Path) -> list[Path]:
    """Copies of packages with delays in `work`."""
    raise NotImplementedError
