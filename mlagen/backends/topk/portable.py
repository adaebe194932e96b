"""Top-k: the same modules in every package that has it, and its tile tables."""

from __future__ import annotations

from mlagen.backends.parts import tiles
from mlagen.backends.parts.base import GeneratedFile, Module, copied
from mlagen.plan import Plan, TopkPlan

MODULE = "topk"


def private_files(plan: Plan, family: TopkPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    return [tiles.file(plan), copied(f"_{MODULE}_kernels"), copied(f"_{MODULE}")]


def modules(plan: Plan, family: TopkPlan) -> list[Module]:
    """The module of the family's wrappers. `_facts` names those of the spec; the package exports no other."""
    return [Module(copied(MODULE), family.wanted(plan.spec))]
