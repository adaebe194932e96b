"""The Tritons that packages are proved with."""

from __future__ import annotations

import re
from collections.abc import Iterable

# One release a minor version, which stands for all of its releases.
TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")


def minor(version: str) -> tuple[int, ...]:
    """The leading two numbers of a version: (3, 8) of 3.8.0+git123."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def minors(versions: Iterable[str]) -> tuple[str, ...]:
    """Versions without what follows their leading two numbers, each once: 3.8 of 3.8.0."""
    return tuple(dict.fromkeys(".".join(map(str, minor(version))) for version in versions))
