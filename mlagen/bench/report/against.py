"""A run against an earlier one, row by row.

A card slows down at its power limit, so times of two runs can differ where no kernel did. A row is judged by its
ratio to a peer that ran in both reports, and by its time only if no peer did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mlagen.bench.report.rows import Contender, Row


@dataclass(frozen=True)
class Change:
    """A shape in both runs.

    Attributes:
        now, then: its rows.
    """

    now: Row
    then: Row

    @cached_property
    def peer(self) -> str | None:
        """The peer that was closest to ours or ahead of it then, of those with a ratio in both runs."""
        ran = [each for each in self.then.contenders if each.is_peer and each.ratio and self.now.of(each.name).ratio]
        return min(ran, key=lambda each: each.quoted_ratio or 0.0).name if ran else None

    def peers(self) -> tuple[Contender, Contender] | None:
        """That peer then and now, with the quoted ratios where both runs have one of the same kind."""
        if self.peer is None:
            return None
        pair = (self.then.of(self.peer), self.now.of(self.peer))
        if not all(each.behind_ratio for each in pair):
            return pair
        then, now = (replace(each, ratio=each.behind_ratio, ratio_spread=each.behind_spread) for each in pair)
        return then, now

    @property
    def speedup(self) -> float | None:
        """The earlier time over this one; above 1, ours got faster."""
        then, now = self.then.ours.seconds, self.now.ours.seconds
        return None if then is None or now is None else then / now

    @property
    def change(self) -> float | None:
        """The row's figure of judgement: the ratio to the peer now over then, or else the speedup."""
        if (pair := self.peers()) is None:
            return self.speedup
        then, now = (each.ratio for each in pair)
        assert then is not None
        assert now is not None
        return now / then

    @property
    def spread(self) -> float | None:
        """Spread of the rounds that gave it, the larger of both runs; None where neither says."""
        if (pair := self.peers()) is None:
            spreads = [self.then.ours.spread, self.now.ours.spread]
        else:
            spreads = [each.ratio_spread for each in pair]
        return max((each for each in spreads if each is not None), default=None)

    @property
    def verdict(self) -> str:
        """`slower`, `faster` or nothing; `does not run` where it did; `not judged` where no spread is known."""
        if self.now.ours.seconds is None:
            return "does not run" if self.then.ours.seconds is not None else ""
        if self.change is None:
            return "runs again"
        if self.spread is None:
            return "not judged"
        if abs(self.change - 1) <= self.spread:
            return ""
        return "slower" if self.change < 1 else "faster"


@dataclass(frozen=True)
class Comparison:
    """A run against an earlier one.

    Attributes:
        name: of the earlier run's file.
        changes: the shapes in both.
        missing: how many shapes of the earlier run are not in this one.
        new: how many of this one were not in that.
    """

    name: str
    changes: tuple[Change, ...]
    missing: int
    new: int

    @property
    def worse(self) -> list[Change]:
        """Rows that got slower by more than the spread of their rounds, or no longer run."""
        return [each for each in self.changes if each.verdict in ("slower", "does not run")]

    @property
    def summary(self) -> str:
        """The result of the comparison, in one line."""
        unjudged = sum(each.verdict == "not judged" for each in self.changes)
        parts = [f"{len(self.worse)} of {len(self.changes)} shapes slower than in {self.name}"]
        parts += [f"{unjudged} not judged, since neither run has the spread of its rounds"] * bool(unjudged)
        parts += [f"{self.missing} of its shapes not in this run"] * bool(self.missing)
        parts += [f"{self.new} of this run not in it"] * bool(self.new)
        return "; ".join(parts)


def compare(rows: Sequence[Row], earlier: Sequence[Row], name: str) -> Comparison:
    """Sets a run against an earlier one; rows belong together by device, package and shape."""
    before = {row.key: row for row in earlier}
    changes = tuple(Change(row, before[row.key]) for row in rows if row.key in before)
    return Comparison(name, changes, len(before) - len(changes), len(rows) - len(changes))
