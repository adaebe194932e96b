"""From measured times to tables: few tiles, each near the fastest where it is used and fit for the split rule, and the
least number of tokens for which the sm90 kernel is as fast as any of them.

Pure functions: times come in as data, or as a function that measures on demand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mlagen.plan import Sm90Row, Tile

TILE_TOLERANCE = 1.02  # a tile this near the fastest is as good, if it spares a variant to compile
SPLIT_TOLERANCE = 1.03  # a split count this near the fastest is as good, if it spares a row of the table
RESIDENT = range(1, 33)  # programs a multiprocessor that the split rule may plan with


@dataclass(frozen=True, order=True)
class Regime:
    """A size of call that is measured, for all calls near it.

    Attributes:
        most_heads: most heads of the class it stands for; 0: any number above the other classes.
        num_heads: heads measured; of dense attention, rows a KV head.
        tokens: tokens measured; of dense attention, requests.
    """

    most_heads: int
    num_heads: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.tokens} x h{self.num_heads}"


# Seconds of a call, at a regime and with a tile, over the seconds with the best split count. The rule picks its splits
# when it plans with so many programs a multiprocessor.
Slowdown = Callable[[Regime, Tile, int], float]


@dataclass(frozen=True)
class Choice:
    """A row of the tile table to be.

    Attributes:
        max_heads, max_tokens: largest call; None: any.
        tile: its tile.
        resident: programs a multiprocessor, as the split rule plans.
        slowdown: time of the rule's split count over the best one's, the worst of the row's regimes.
    """

    max_heads: int | None
    max_tokens: int | None
    tile: Tile
    resident: int
    slowdown: float


def choose_tiles(times: Mapping[Regime, Mapping[Tile, float]], tolerance: float = TILE_TOLERANCE) -> dict[Regime, Tile]:
    """A tile for each regime, from as few tiles as serve all regimes within `tolerance` of their fastest.

    Args:
        times: best seconds of each tile, by regime; a regime without times gets no tile.
        tolerance: how much slower than a regime's fastest tile the one it gets may be, as a factor.
    """
    good = {
        regime: {tile: seconds / min(each.values()) for tile, seconds in each.items()}
        for regime, each in times.items()
        if each
    }
    good = {
        regime: {tile: share for tile, share in each.items() if share <= tolerance} for regime, each in good.items()
    }
    open_regimes = set(good)
    taken: list[Tile] = []
    while open_regimes:
        tiles = dict.fromkeys(tile for regime in sorted(open_regimes) for tile in good[regime])

        def merit(tile: Tile, left: frozenset[Regime] = frozenset(open_regimes)) -> tuple[int, float]:
            shares = [good[regime][tile] for regime in left if tile in good[regime]]
            return len(shares), -sum(shares) / len(shares)

        best = max(tiles, key=merit)
        taken.append(best)
        open_regimes = {regime for regime in open_regimes if best not in good[regime]}
    return {regime: min(taken, key=lambda tile: each.get(tile, math.inf)) for regime, each in good.items()}


def boundaries(tokens: Sequence[int]) -> list[int | None]:
    """The largest call that each of the measured token counts, ascending, stands for: halfway to the next by ratio."""
    return [*(math.isqrt(here * after) for here, after in itertools.pairwise(tokens)), None]


def fit_resident(
    tile: Tile,
    regimes: Sequence[Regime],
    slowdown: Slowdown,
    preferred: int,
    tolerance: float = SPLIT_TOLERANCE,
) -> list[tuple[list[Regime], int, float]]:
    """Cuts neighbouring regimes of one tile into runs. In each, one `programs_per_sm` makes the split rule pick well.

    Args:
        tile: the tile.
        regimes: where it is used, by tokens.
        slowdown: see Slowdown.
        preferred: programs that really fit a multiprocessor; of values that do equally well the nearest is taken.
        tolerance: slowdown that counts as good.

    Returns:
        (regimes, programs_per_sm, worst slowdown) of each run. A regime without a good value gets the best one.
    """
    runs: list[tuple[list[Regime], dict[int, float]]] = []
    for regime in regimes:
        shares = {resident: slowdown(regime, tile, resident) for resident in RESIDENT}
        limit = max(tolerance, min(shares.values()))
        good = {resident: share for resident, share in shares.items() if share <= limit}
        before = runs[-1][1] if runs else {}
        both = {resident: max(share, before[resident]) for resident, share in good.items() if resident in before}
        if both:
            runs[-1] = ([*runs[-1][0], regime], both)
        else:
            runs.append(([regime], good))
    result = []
    for members, worst in runs:
        resident = min(worst, key=lambda number: (abs(math.log2(number / preferred)), number))
        result.append((members, resident, worst[resident]))
    return result


def make_choices(
    tiles: Mapping[Regime, Tile],
    slowdown: Slowdown,
    preferred: Callable[[Tile], int],
    tolerance: float = SPLIT_TOLERANCE,
) -> list[Choice]:
    """Rows of the table, most heads last; neighbouring token counts of one tile share a row, and so do equal classes.

    Args:
        tiles: tile of each regime.
        slowdown, preferred, tolerance: as of `fit_resident`.
    """
    tables: list[list[Choice]] = []
    for most_heads, regimes in _classes(tiles).items():
        ends = dict(zip(regimes, boundaries([regime.tokens for regime in regimes]), strict=True))
        rows = []
        for tile, run in itertools.groupby(regimes, key=tiles.__getitem__):
            for members, resident, worst in fit_resident(tile, list(run), slowdown, preferred(tile), tolerance):
                rows.append(Choice(most_heads or None, ends[members[-1]], tile, resident, worst))
        tables.append(rows)
    return _merge_classes(tables)


def _merge_classes(tables: Sequence[list[Choice]]) -> list[Choice]:
    """Drops a class with the same rows as the next one; the last class takes any number of heads."""
    kept: list[list[Choice]] = []
    for rows in tables:
        if kept and [_without_heads(row) for row in kept[-1]] == [_without_heads(row) for row in rows]:
            rows = [
                replace(row, slowdown=max(row.slowdown, old.slowdown))
                for row, old in zip(rows, kept.pop(), strict=True)
            ]
        kept.append(rows)
    return [replace(row, max_heads=None) if rows is kept[-1] else row for rows in kept for row in rows]


def fewest_tokens(rows: Sequence[Sm90Row], num_heads: int) -> int | None:
    """From how many tokens on calls of so many heads run the sm90 kernel; None: none do."""
    return next(row.min_tokens for row in rows if row.max_heads is None or num_heads <= row.max_heads)


def runs_sm90(rows: Sequence[Sm90Row], regime: Regime) -> bool:
    """Whether the rows, if there are any, give a regime to the sm90 kernel."""
    fewest = fewest_tokens(rows, regime.num_heads) if rows else None
    return fewest is not None and fewest <= regime.tokens


def choose_sm90(
    every: Sequence[Regime], faster: Mapping[Regime, bool], present: Sequence[Sm90Row]
) -> tuple[Sm90Row, ...]:
    """Which calls run the sm90 kernel: by class of heads, those from where on no regime is slower with it.

    Args:
        every: the regimes of every class.
        faster: whether the kernel is at least as fast as any portable tile, in the regimes that were measured.
        present: the package's rows, which stay where nothing was measured.
    """
    rows: list[Sm90Row] = []
    for most_heads, regimes in _classes(every).items():
        kept = fewest_tokens(present, regimes[0].num_heads)
        slower = [not faster.get(regime, runs_sm90(present, regime)) for regime in regimes]
        first = max((index + 1 for index, each in enumerate(slower) if each), default=0)
        fewest = (1, *(most and most + 1 for most in boundaries([regime.tokens for regime in regimes])))[first]
        if not any(regime in faster for regime in regimes[max(0, first - 1) : first + 1]):
            fewest = kept  # it lies between the same two as before
        if rows and rows[-1].min_tokens == fewest:
            rows.pop()
        rows.append(Sm90Row(most_heads or None, fewest))
    return (*rows[:-1], replace(rows[-1], max_heads=None))


def _classes(regimes: Iterable[Regime]) -> dict[int, list[Regime]]:
    """Regimes by their class of heads, in the order of heads, then of tokens."""
    classes: dict[int, list[Regime]] = {}
    for regime in sorted(regimes, key=lambda regime: (regime.most_heads or math.inf, regime.tokens)):
        classes.setdefault(regime.most_heads, []).append(regime)
    return classes


def _without_heads(row: Choice) -> tuple[int | None, Tile, int]:
    return row.max_tokens, row.tile, row.resident
