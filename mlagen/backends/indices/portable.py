"""Index kernels and their wrappers: indices to cache slots, and top-k combined with window indices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mlagen.backends.parts import tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.plan import IndicesPlan, Plan

MODULE = "indices"
COUNTER, CONVERTER = "compute_global_topk_indices_and_lens", "triton_convert_req_index_to_global_index"
COMBINER = "combine_topk_swa_indices"


def _optional_arguments(wrappers: Collection[str]) -> list[str]:
    """Return the possible values of is_valid_token and lens in wrappers, as text of keyword arguments."""
    if COUNTER not in wrappers:
        return ['{"lens": none}', '{"lens": None}']
    masked = ['{"is_valid_token": token_mask, "lens": none}']
    if CONVERTER not in wrappers:
        return masked
    return [*masked, '{"is_valid_token": None, "lens": none}', '{"is_valid_token": None, "lens": None}']


@dataclass(frozen=True)
class Kernels:
    """Context of the kernels' template.

    Attributes:
        index: the family's plan.
        maps: whether the package maps a request's indices to rows of a paged cache.
        combines: whether it joins top-k indices with those of a window.
        has_token_mask: whether the map takes a mask of valid tokens.
        maps_without: whether a map takes no mask, and counts only on request.
    """

    index: IndicesPlan
    maps: bool
    combines: bool
    has_token_mask: bool
    maps_without: bool


@dataclass(frozen=True)
class Wrappers(Kernels):
    """Context of the wrappers' template.

    Attributes:
        optional: the optional arguments of each variant, as text.
        wrappers: the package's wrappers.
    """

    optional: Sequence[str]
    wrappers: Sequence[str]


def _kernels(plan: Plan, family: IndicesPlan) -> Kernels:
    wrappers = plan.spec.wrappers
    has_token_mask, maps_without = COUNTER in wrappers, CONVERTER in wrappers
    return Kernels(family, has_token_mask or maps_without, COMBINER in wrappers, has_token_mask, maps_without)


def private_files(plan: Plan, family: IndicesPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    return [tiles.file(plan), generated(f"_{MODULE}_kernels", vars(_kernels(plan, family)))]


def modules(plan: Plan, family: IndicesPlan) -> list[Module]:
    """The module of the family's wrappers."""
    wrappers = plan.spec.wrappers
    context = Wrappers(**vars(_kernels(plan, family)), optional=_optional_arguments(wrappers), wrappers=wrappers)
    return [Module(generated(MODULE, vars(context)), family.wanted(plan.spec))]
