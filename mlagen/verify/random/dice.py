"""Chance: sizes that are log-uniform, choices and coins, the same for the same name."""

from __future__ import annotations

import math
import random
from typing import TypeVar

Value = TypeVar("Value")


class Dice:
    """A source of chance.

    Args:
        name: decides all that is drawn.
    """

    def __init__(self, name: str) -> None:
        self._random = random.Random(name)

    def size(self, least: int, most: int) -> int:
        """A log-uniform integer in [least, most]; `least` is 0 or more."""
        if most <= least:
            return least
        low, high = math.log(least + 1), math.log(most + 2)
        return min(most, int(math.exp(self._random.uniform(low, high))) - 1 if least else self._from_zero(high))

    def _from_zero(self, high: float) -> int:
        return int(math.exp(self._random.uniform(0.0, high))) - 1

    def pick(self, *values: Value) -> Value:
        """One of the values, each as likely."""
        return self._random.choice(values)

    def mostly(self, usual: Value, *others: Value) -> Value:
        """The usual value three times in four, else one of the others."""
        return usual if not others or self._random.random() < 0.75 else self._random.choice(others)

    def chance(self, share: float) -> bool:
        """True in this share of the draws."""
        return self._random.random() < share

    def seed(self) -> int:
        """A seed of a generator of tensors."""
        return self._random.getrandbits(31)

    def shuffled(self, values: tuple[Value, ...]) -> tuple[Value, ...]:
        """The values in another order."""
        return tuple(self._random.sample(values, len(values)))
