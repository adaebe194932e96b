"""Facts of a package's spec about its caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlagen.layout import CacheLayout, layouts_of
from mlagen.verify.call.facts import Facts


@dataclass(frozen=True)
class CacheFacts:
    """Facts of a package's spec about its caches.

    Attributes:
        facts: further facts of the spec.
        layouts: of the cache, and of the second one if there is one.
        topks: indices a token of each.
        e4m3: q may be of e4m3, with a scale.
    """

    facts: Facts
    layouts: tuple[CacheLayout, ...]
    topks: tuple[int, ...]
    e4m3: bool

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> CacheFacts:
        """The facts of `SPEC["spec"]`."""
        main, extra = layouts_of(spec)
        assert main is not None
        e4m3 = spec["attention"].get("products") == "mixed"
        topk, window = spec["attention"]["topk"], spec["attention"].get("window")
        if extra is None:
            return cls(Facts.of(spec), (main,), (topk + (window or 0),), e4m3)
        return cls(Facts.of(spec), (main, extra), (window or topk, topk), e4m3)
