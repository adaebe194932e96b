"""Results of a sweep, one JSON line a cell, so that an interrupted sweep goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from mlagen.bench.trial import Sizes
from mlagen.plan.tiles.tile import Tile


@dataclass(frozen=True)
class Cell:
    """One measurement: a shape with a tile and a split count."""

    shape: Sizes
    tile: Tile
    splits: int


@dataclass(frozen=True)
class Measured:
    """The result of a cell.

    Attributes:
        seconds: of a call; None if the cell did not run or gave a wrong result.
        why: why there is no time, in one line.
    """

    seconds: float | None
    why: str | None = None


class CellLog:
    """Measured cells of some kernels, with one Triton on one device; others in the same file are kept.

    Args:
        path: the file; None: nothing is kept.
        key: the validity of the measurements: name and hash of the kernels, version of Triton, name of the device.
        shape: makes a shape of the result of `asdict`.
    """

    def __init__(self, path: Path | None, key: dict[str, str], shape: Callable[..., Sizes]) -> None:
        self._path = path
        self._key = key
        self._shape = shape
        self._cells: dict[Cell, Measured] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                self._read(line)

    def _read(self, line: str) -> None:
        try:
            entry: dict[str, Any] = json.loads(line)
            if {name: entry[name] for name in self._key} == self._key:
                cell = Cell(self._shape(**entry["shape"]), Tile(*entry["tile"]), entry["splits"])
                self._cells[cell] = Measured(entry["seconds"], entry["why"])
        except (ValueError, TypeError, KeyError):  # a line that an interrupted run cut short
            return

    def __len__(self) -> int:
        return len(self._cells)

    def get(self, cell: Cell) -> Measured | None:
        """Return the known result of a cell."""
        return self._cells.get(cell)

    def put(self, cell: Cell, measured: Measured) -> None:
        """Keeps a result; a later one of the same cell takes its place."""
        self._cells[cell] = measured
        if self._path is None:
            return
        entry = {
            **self._key,
            "shape": asdict(cell.shape),  # type: ignore[call-overload]
            "tile": astuple(cell.tile),
            "splits": cell.splits,
            "seconds": measured.seconds,
            "why": measured.why,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def best(self, shape: Sizes) -> dict[Tile, tuple[float, int]]:
        """(seconds, splits) of the fastest cell of each tile at a shape."""
        found: dict[Tile, tuple[float, int]] = {}
        for cell, measured in self._cells.items():
            if cell.shape == shape and measured.seconds is not None:
                found[cell.tile] = min(
                    found.get(cell.tile, (measured.seconds, cell.splits)), (measured.seconds, cell.splits)
                )
        return found
