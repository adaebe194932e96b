"""The caches of a package that have kernels of their own, and the wrappers of those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlagen.layout import layouts_of
from mlagen.verify.call.facts import Facts
from mlagen.verify.paged.side import EXTRA, MAIN, Side

NAME = "cache"
CONCAT, INSERT = "concat_and_cache_mla", "quantize_and_insert_k_cache"
REQUESTS, TOKENS = "dequantize_and_gather_k_cache", "gather_and_maybe_dequant_cache"
SHORT = {CONCAT: "concat", INSERT: "insert", REQUESTS: "requests", TOKENS: "tokens"}
CACHE_ARGUMENT = {CONCAT: "kv_cache", INSERT: "k_cache", REQUESTS: "k_cache", TOKENS: "src_cache"}
WRITERS, GATHERS = (CONCAT, INSERT), (REQUESTS, TOKENS)


def sides_of(spec: Mapping[str, Any]) -> list[Side]:
    """The caches that have kernels of their own."""
    facts = Facts.of(spec)
    main, extra = layouts_of(spec)
    found = [] if main is None else [Side(MAIN, main, facts)]
    if extra is not None and extra != main:
        found.append(Side(EXTRA, extra, facts))
    return found
