"""Runs a package's attention with a tile and a split count of one's own, by the module's own launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

from mlagen.bench.package import BenchPackage
from mlagen.bench.trial import Call
from mlagen.plan.tiles import Tile


class Driver:
    """Schedules a package's attention with any tile.

    Args:
        package: the package.
        module: name of the generated module that holds the attention.
        facts: the device as its tile table knows it: `target` and `multiprocessors`.
    """

    def __init__(self, package: BenchPackage, module: str, facts: Any) -> None:
        self.package = package
        self.facts = facts
        self._module = package.module(module)
        self._splits = package.module("_splits")

    def current(self, num_heads: int, tokens: int) -> tuple[Tile, int]:
        """The tile that the package's own table has for a call, and the programs a multiprocessor it plans with."""
        tiles, unaligned = self._module.TILES[self.facts.target], self._module.UNALIGNED_TILES[self.facts.target]
        tile = self._splits.choose_tile(tiles, unaligned, self._splits.ALIGNED, tokens, num_heads, False)
        return Tile(**{field.name: getattr(tile, field.name) for field in fields(Tile)}), tile.programs_per_sm

    def schedule(
        self, tile: Tile, resident: int, tokens: int, num_heads: int, counts: Sequence[int], splits: int = 0
    ) -> Any:
        """The module's Schedule for a tile: the split count its rule picks, or as near to `splits` as blocks allow.

        Args:
            tile: the tile.
            resident: programs a multiprocessor that the rule plans with.
            tokens, num_heads: sizes of the call.
            counts: indices a token in each of its lists.
            splits: how many; 0: as the rule says.
        """
        entry = self._splits.Tile(**asdict(tile), programs_per_sm=resident)
        blocks = sum(-(-count // tile.block_n) for count in counts)
        aligned = self._splits.ALIGNED
        return self._splits.make_schedule(self.facts, entry, aligned, tokens, num_heads, blocks, splits, False)

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
