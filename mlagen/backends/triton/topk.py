"""Top-k kernels: of rows, through page tables, and of ranks' candidates; and their wrappers."""

from __future__ import annotations

from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.triton import tiles
from mlagen.plan import Plan, TopkPlan

MODULE = "topk"


def _context(plan: Plan, family: TopkPlan) -> dict[str, Any]:
    """Template context."""
    wrappers = plan.spec.wrappers
    return {
        "wrappers": wrappers,
        "topk": family,
        "selects": any(name in wrappers for name in family.SELECTS),
        "merges": family.MERGE in wrappers,
    }


def shared(plan: Plan, family: TopkPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    return [tiles.file(plan), generated(f"_{MODULE}_kernels", _context(plan, family))]


def modules(plan: Plan, family: TopkPlan) -> list[Module]:
    """The module of the family's wrappers."""
    names = sorted(name for name in family.WRAPPERS if name in plan.spec.wrappers)
    return [Module(generated(MODULE, _context(plan, family)), names)]
