"""Results of verification, one per case."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """An error against its tolerance.

    Attributes:
        name: name of the compared value: "out", "out row", "out element", "lse", "max_logits".
        error: the error where it is the largest share of its tolerance; inf for a NaN, or an infinity or zero not met.
        tolerance: the tolerance there, in the same unit.
    """

    name: str
    error: float
    tolerance: float

    @property
    def share(self) -> float:
        """Error over tolerance; the result stands if it is at most 1."""
        if self.error == 0:
            return 0.0
        return self.error / self.tolerance if self.tolerance > 0 else math.inf


@dataclass(frozen=True)
class CaseResult:
    """One case run on one target's tiles.

    Attributes:
        package: name of the generated package.
        case: the case's name, `sparse_fwd: sink is +inf`.
        target: target of the tile table, `sm90`.
        ok: the case passed, or was skipped.
        skipped: why it was not run; None if it was.
        figures: errors against tolerances; none where a case compares bits.
        seconds: wall time, inputs and reference included.
        detail: the finding if `ok` is false, in one line.
        family: the name of the case's family; empty where its worker did not say it.
    """

    package: str
    case: str
    target: str
    ok: bool
    skipped: str | None
    figures: tuple[Figure, ...]
    seconds: float
    detail: str
    family: str = ""

    @property
    def worst(self) -> Figure | None:
        """The figure nearest to, or furthest over, its tolerance."""
        return max(self.figures, key=lambda figure: figure.share, default=None)

    def to_json(self) -> dict[str, Any]:
        """A plain dict; `from_json` reads it. An infinite error becomes null, which JSON knows."""
        data = asdict(self)
        for figure in data["figures"]:
            figure["error"] = figure["error"] if math.isfinite(figure["error"]) else None
        data["figures"] = list(data["figures"])
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CaseResult:
        """The result that `to_json` wrote."""
        figures = tuple(
            Figure(item["name"], math.inf if item["error"] is None else item["error"], item["tolerance"])
            for item in data["figures"]
        )
        return cls(**{**data, "figures": figures})
