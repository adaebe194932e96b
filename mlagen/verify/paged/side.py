"""One of the caches of a package."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlagen.layout import CacheLayout
from mlagen.verify.call.facts import Facts

MAIN, EXTRA = "", "extra_cache"  # modules of the package with wrappers; "" is the package itself


@dataclass(frozen=True)
class Side:
    """One of the caches of a package, and the model's facts about its rows."""

    module: str
    layout: CacheLayout
    facts: Facts

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        found = getattr(torch, self.facts.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def unit(self) -> int:
        """Bytes of an element of the cache tensor."""
        return 1 if self.layout.quantised else self.dtype.itemsize

    @property
    def alignment(self) -> int:
        """Bytes of the widest value of a row."""
        return self.layout.parts[0].widest

    @property
    def fnuz(self) -> bool:
        """Whether columns are e4m3fnuz."""
        return any(field.dtype == "e4m3fnuz" for field in self.layout.data)

    @property
    def prefix(self) -> str:
        """The prefix of its cases' names."""
        return "extra " if self.module == EXTRA else ""
