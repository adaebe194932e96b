"""What a package's spec says of dense attention over its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlagen.layout import CacheLayout, layouts_of
from mlagen.verify.facts import Facts


@dataclass(frozen=True)
class DenseDecodeFacts:
    """What a package's spec says of its cache and its attention.

    Attributes:
        facts: what it says besides.
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
