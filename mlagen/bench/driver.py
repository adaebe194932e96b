"""Runs a package's attention with a kernel, a tile and a split count of one's own, by the module's own launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

from mlagen.bench.package import BenchPackage
from mlagen.bench.trial import Call
from mlagen.plan import HOPPER_TARGET, HopperRow, Tile


class Driver:
    """Schedules a package's attention with any tile.

    Args:
        package: the package.
        module: name of the generated module that holds the attention.
        facts: the device as its tile table knows it: `target`, `multiprocessors`, and `hopper` if it has such kernels.

    Attributes:
        hopper: the tile that stands for the module's Hopper kernel; None where there is none, or the device cannot.
        hopper_rows: which calls run that kernel by the package's own table; empty where the target has none.
    """

    def __init__(self, package: BenchPackage, module: str, facts: Any) -> None:
        self.package = package
        self.facts = facts
        self._module = package.module(module)
        self._splits = package.module("_splits")
        table = getattr(self._module, "HOPPER", ()) if facts.target == HOPPER_TARGET else ()
        most = self._splits.ANY
        self.hopper = _plain(self._splits.HOPPER_TILE) if table and facts.hopper else None
        self.hopper_rows = tuple(
            HopperRow(heads if heads < most else None, fewest if fewest < most else None) for heads, fewest in table
        )

    def current(self, num_heads: int, tokens: int) -> tuple[Tile, int]:
        """The portable tile of a call by the package's own table, and the programs a multiprocessor it plans with."""
        tiles, unaligned = self._module.TILES[self.facts.target], self._module.UNALIGNED_TILES[self.facts.target]
        tile = self._splits.choose_tile(tiles, unaligned, self._splits.ALIGNED, tokens, num_heads, False)
        return _plain(tile), tile.programs_per_sm

    def schedule(
        self, tile: Tile, resident: int, tokens: int, num_heads: int, counts: Sequence[int], splits: int = 0
    ) -> Any:
        """The module's Schedule for a tile: the split count its rule picks, or as near to `splits` as blocks allow.

        Args:
            tile: the tile; `hopper` runs the Hopper kernel.
            resident: programs a multiprocessor that the rule plans with; the Hopper kernel is always alone on one.
            tokens, num_heads: sizes of the call.
            counts: indices a token in each of its lists.
            splits: how many; 0: as the rule says.
        """
        hopper = tile == self.hopper
        entry = self._splits.HOPPER_TILE if hopper else self._splits.Tile(**asdict(tile), programs_per_sm=resident)
        blocks = sum(-(-count // tile.block_n) for count in counts)
        aligned = self._splits.ALIGNED
        cost = (self._module.HOPPER_COST,) if hopper else ()
        return self._splits.make_schedule(self.facts, entry, aligned, tokens, num_heads, blocks, splits, False, *cost)

    def scheduled(self, schedule: Any, call: Call) -> Callable[[], Any]:
        """A call of one of the module's wrappers that runs by that schedule instead of its own."""
        module = self._module

        def run() -> Any:
            own = module._schedule
            module._schedule = lambda *_: schedule
            try:
                return call()
            finally:
                module._schedule = own

        return run


def _plain(tile: Any) -> Tile:
    """A tile of a package's table, without its programs a multiprocessor."""
    return Tile(**{field.name: getattr(tile, field.name) for field in fields(Tile)})
