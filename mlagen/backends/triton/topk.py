"""Top-k kernels: of rows, through page tables, and of ranks' candidates; and their wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.backends.base import GeneratedFile, Module, copied, generated
from mlagen.backends.triton import tiles
from mlagen.plan import Plan, TopkPlan

MODULE = "topk"


@dataclass(frozen=True)
class Kernels:
    """Context of the kernels' template.

    Attributes:
        selects: whether the package has wrappers that select keys.
        merges: whether it merges candidates of several ranks.
    """

    selects: bool
    merges: bool


@dataclass(frozen=True)
class Wrappers(Kernels):
    """Context of the wrappers' template."""

    topk: TopkPlan
    wrappers: Sequence[str]


def _kernels(plan: Plan, family: TopkPlan) -> Kernels:
    wrappers = plan.spec.wrappers
    return Kernels(any(name in wrappers for name in family.SELECTS), family.MERGE in wrappers)


def shared(plan: Plan, family: TopkPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    return [tiles.file(plan), copied(f"_{MODULE}_kernels")]


def modules(plan: Plan, family: TopkPlan) -> list[Module]:
    """The module of the family's wrappers."""
    names = sorted(name for name in family.WRAPPERS if name in plan.spec.wrappers)
    context = Wrappers(**vars(_kernels(plan, family)), topk=family, wrappers=plan.spec.wrappers)
    return [Module(generated(MODULE, vars(context)), names)]
