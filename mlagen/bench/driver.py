"""Runs a package's kernels with a tile and a split count of one's own, by the module's own schedule and launch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import torch

from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import Inputs
from mlagen.plan.tiles import Tile

ANY = 1 << 31
CANDIDATE = "candidate"  # name under which a tile table holds the tile that is tried


class Driver:
    """Schedules and launches a package's attention with any tile.

    Args:
        package: the package.
        facts: the device as its tile table knows it: `target` and `multiprocessors`.
    """

    def __init__(self, package: BenchPackage, facts: Any) -> None:
        self.package = package
        self.facts = facts
        self._module = package.module
        self._names = list(inspect.signature(self._module._attention).parameters)

    def current(self, num_heads: int, tokens: int) -> tuple[Tile, int]:
        """The tile that the package's own table has for a call, and the programs a multiprocessor it plans with."""
        tile = self._module._schedule(self.facts, self._module.ALIGNED, tokens, num_heads, 1, 1, False).tile
        return Tile(**{field.name: getattr(tile, field.name) for field in fields(Tile)}), tile.programs_per_sm

    def schedule(self, tile: Tile, resident: int, tokens: int, num_heads: int, topk: int, splits: int = 0) -> Any:
        """The module's Schedule for a tile: the split count its rule picks, or as near to `splits` as blocks allow."""
        entry = self._module.Tile(**asdict(tile), programs_per_sm=resident)
        self._module.TILES[CANDIDATE] = [(ANY, ANY, entry)]
        rule = getattr(self._module._schedule, "__wrapped__", self._module._schedule)  # around its cache
        try:
            facts = self.facts._replace(target=CANDIDATE)
            return rule(facts, self._module.ALIGNED, tokens, num_heads, topk, splits, False)
        finally:
            del self._module.TILES[CANDIDATE]

    def workspace(self, device: torch.device) -> torch.Tensor:
        """A workspace as large as the module ever takes by itself."""
        return torch.empty(self._module.WORKSPACE_BYTES // 4, dtype=torch.float32, device=device)

    def call(
        self, schedule: Any, inputs: Inputs, out: torch.Tensor, workspace: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """A call that writes `out` [tokens, num_heads, d_v] by that schedule, and gives it."""
        values = {
            "schedule": schedule,
            "workspace": workspace,
            "q": inputs.q,
            "kv": inputs.kv,
            "indices": inputs.indices,
            "sm_scale": inputs.sm_scale,
            "topk_length": inputs.topk_length,
            "attn_sink": inputs.attn_sink,
            "out": out,
            "max_logits": None,
            "lse": None,
        }
        arguments = [values[name] for name in self._names]
        attention = self._module._attention

        def call() -> torch.Tensor:
            attention(*arguments)
            return out

        return call
