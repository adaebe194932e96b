"""Index kernels and their wrappers: indices to cache slots, and top-k combined with window indices."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.triton import tiles
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


def _context(plan: Plan, family: IndicesPlan) -> dict[str, Any]:
    """Template context."""
    wrappers = plan.spec.wrappers
    has_token_mask, maps_without = COUNTER in wrappers, CONVERTER in wrappers
    return {
        "wrappers": wrappers,
        "index": family,
        "maps": has_token_mask or maps_without,
        "combines": COMBINER in wrappers,
        "has_token_mask": has_token_mask,
        "maps_without": maps_without,  # without a token mask, and with counts only on request
        "optional": _optional_arguments(wrappers),
    }


def shared(plan: Plan, family: IndicesPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    return [tiles.file(plan), generated(f"_{MODULE}_kernels", _context(plan, family))]


def modules(plan: Plan, family: IndicesPlan) -> list[Module]:
    """The module of the family's wrappers."""
    names = sorted(name for name in family.WRAPPERS if name in plan.spec.wrappers)
    return [Module(generated(MODULE, _context(plan, family)), names)]
