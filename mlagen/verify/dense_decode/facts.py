"""Facts of a package's spec about dense attention over its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlagen.layout import CacheLayout, layouts_of
from mlagen.verify.call.facts import Facts


@dataclass(frozen=True)
class DenseDecodeFacts:
    """Facts of a package's spec about its cache and its attention.

    Attributes:
        facts: further facts of the spec.
        layout: of the cache.
        window: keys that a query token sees; None: all.
    """

    facts: Facts
    layout: CacheLayout
    window: int | None

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> DenseDecodeFacts:
        """The facts of `SPEC["spec"]`."""
        layout = layouts_of(spec)[0]
        assert layout is not None
        return cls(Facts.of(spec), layout, spec["attention"]["window"])
