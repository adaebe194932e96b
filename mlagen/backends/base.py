"""What every back end tells of a file it generates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GeneratedFile:
    """One file of a package: its name, the template that makes it and the values the template asks for."""

    name: str
    template: str
    context: Mapping[str, Any]
