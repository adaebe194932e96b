"""The module that knows the bytes of a token in the second cache, where its layout is another."""

from __future__ import annotations

from typing import Any

from mlagen.backends.triton import layout
from mlagen.plan import Plan, needed

MODULE = "_extra_layout"
TEMPLATE = layout.MODULE


def present(plan: Plan) -> bool:
    """Whether there is a second cache of another layout, or one whose writers find other scales."""
    return plan.extra_layout is not None and plan.extra_layout != plan.layout


def context(plan: Plan) -> dict[str, Any]:
    """What the template asks for."""
    assert plan.extra_layout is not None
    return layout.context_of(plan, plan.extra_layout, needed(plan.cache).extra_tiled)
