"""The kernel that rotates attention's output back and quantises it, and its wrapper."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.backends.parts import tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.common import TORCH_DTYPES, is_aligned
from mlagen.plan import OutQuantPlan, Plan
from mlagen.spec import QUANT_BLOCK
from mlagen.work import FLOAT_BYTES

MODULE = "out_quant"


@dataclass(frozen=True)
class Facts:
    """Facts that both templates take.

    Attributes:
        dtype: the model's dtype.
        columns, rope: columns of a head, and the last ones, which RoPE rotated.
        group: columns of a scale.
    """

    dtype: str
    columns: int
    rope: int
    group: int


@dataclass(frozen=True)
class Kernels(Facts):
    """Context of the kernel's template.

    Attributes:
        angles_aligned: whether the sines of a row begin at an aligned address.
    """

    angles_aligned: bool


@dataclass(frozen=True)
class Wrappers(Facts):
    """Context of the wrapper's template.

    Attributes:
        torch_dtype: torch's name of the model's dtype.
        packs: whether the scales of a head fill words.
    """

    torch_dtype: str
    packs: bool


def _facts(plan: Plan, family: OutQuantPlan) -> Facts:
    """Return the facts that both templates take."""
    return Facts(plan.spec.model.dtype, family.columns, family.rope, QUANT_BLOCK)


def private_files(plan: Plan, family: OutQuantPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    aligned = is_aligned(family.rope // 2, FLOAT_BYTES)
    context = Kernels(**vars(_facts(plan, family)), angles_aligned=aligned)
    return [tiles.file(plan), generated(f"_{MODULE}_kernels", vars(context))]


def modules(plan: Plan, family: OutQuantPlan) -> list[Module]:
    """The module of the family's wrapper."""
    torch_dtype = TORCH_DTYPES[plan.spec.model.dtype]
    context = Wrappers(**vars(_facts(plan, family)), torch_dtype=torch_dtype, packs=family.packs)
    return [Module(generated(MODULE, vars(context)), family.wanted(plan.spec))]
