"""The writers and the gathers of the second cache, where its layout is another; a module of the package of its own."""

from __future__ import annotations

from typing import Any

from mlagen.backends.triton import cache, extra_layout
from mlagen.plan import Plan, needed

MODULE = "extra_cache"
TEMPLATE = cache.MODULE
WRAPPERS = cache.WRAPPERS
SHARED = cache.SHARED

present = extra_layout.present


def _side(plan: Plan) -> cache.Side:
    assert plan.extra_layout is not None
    assert plan.spec.extra_cache is not None
    block_size = plan.spec.extra_cache.block_size
    tiled = needed(plan.cache).extra_tiled
    return cache.Side(plan.extra_layout, tiled, MODULE, extra_layout.MODULE, block_size, "the second cache")


def context(plan: Plan) -> dict[str, Any]:
    """What the template asks for."""
    return cache.context_of(plan, _side(plan))


def exports(wrappers: list[str]) -> list[str]:
    """None: the wrappers are called through the module, since the cache's have the same names."""
    return []
