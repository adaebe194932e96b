"""The surroundings that a random case is drawn for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlagen.verify.call.facts import Facts
from mlagen.verify.random.dice import Dice


@dataclass(frozen=True)
class Scene:
    """The surroundings that a random case is drawn for.

    Attributes:
        spec: `SPEC["spec"]` of the package.
        facts: the same, flattened.
        shape: decides all that a kernel is compiled for.
        call: decides the rest.
        big: a GPU runs it.
        kernel: the sm90 kernel that calls are forced to; None: none is.
    """

    spec: Mapping[str, Any]
    facts: Facts
    shape: Dice
    call: Dice
    big: bool
    kernel: str | None = None
