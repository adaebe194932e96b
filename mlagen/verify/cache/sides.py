"""The caches of a package that have kernels of their own, and the wrappers of those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.layout import CacheLayout, PadField, layouts_of
from mlagen.verify.facts import Facts

NAME = "cache"
CONCAT, INSERT = "concat_and_cache_mla", "quantize_and_insert_k_cache"
REQUESTS, TOKENS = "dequantize_and_gather_k_cache", "gather_and_maybe_dequant_cache"
SHORT = {CONCAT: "concat", INSERT: "insert", REQUESTS: "requests", TOKENS: "tokens"}
MAIN, EXTRA = "", "extra_cache"  # modules of the package with wrappers; "" is the package itself
CACHE_ARGUMENT = {CONCAT: "kv_cache", INSERT: "k_cache", REQUESTS: "k_cache", TOKENS: "src_cache"}
WRITERS, GATHERS = (CONCAT, INSERT), (REQUESTS, TOKENS)


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
        return max(1 if isinstance(field, PadField) else field.itemsize for field in self.layout.fields)

    @property
    def fnuz(self) -> bool:
        """Whether columns are e4m3fnuz."""
        return any(field.dtype == "e4m3fnuz" for field in self.layout.data)

    @property
    def prefix(self) -> str:
        """The prefix of its cases' names."""
        return "extra " if self.module == EXTRA else ""


def sides_of(spec: Mapping[str, Any]) -> list[Side]:
    """The caches that have kernels of their own."""
    facts = Facts.of(spec)
    main, extra = layouts_of(spec)
    found = [] if main is None else [Side(MAIN, main, facts)]
    if extra is not None and extra != main:
        found.append(Side(EXTRA, extra, facts))
    return found
