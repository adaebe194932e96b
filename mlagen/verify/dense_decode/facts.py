"""Facts of a package's spec about dense attention over its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlagen.layout import CacheLayout, layouts_of
from mlagen.verify.call.case import ROWS_32, SM90
from mlagen.verify.call.facts import Facts

E4M3_P = (SM90, ROWS_32)


@dataclass(frozen=True)
class DenseDecodeFacts:
    """Facts of a package's spec about its cache and its attention.

    Attributes:
        facts: further facts of the spec.
        layout: of the cache.
        window: keys that a query token sees; None: all.
        e4m3_p: whether P is e4m3 in the sm90 kernels of E4M3_P.
    """

    facts: Facts
    layout: CacheLayout
    window: int | None
    e4m3_p: bool

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> DenseDecodeFacts:
        """The facts of `SPEC["spec"]`."""
        layout = layouts_of(spec)[0]
        assert layout is not None
        attention = spec["attention"]
        return cls(Facts.of(spec), layout, attention["window"], attention.get("products") == "fp8")
