"""Index kernels: a request's indices to slots of the cache, and top-k with window indices; and their wrappers."""

from __future__ import annotations

from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.triton.common import Signature, common
from mlagen.plan import IndicesPlan, Plan

MODULE = "indices"
COUNTER, CONVERTER = "compute_global_topk_indices_and_lens", "triton_convert_req_index_to_global_index"
COMBINER = "combine_topk_swa_indices"


PARTS = ("parts", "parts_multiplier", "parts_shift")  # of a token's indices, where a program need not count them


def _map_signature(plan: Plan) -> Signature:
    token_mask = (("is_valid_token_ptr", "*i1"),) if COUNTER in plan.spec.wrappers else ()
    return (
        ("indices_ptr", "*i32"),
        ("request_ptr", "*i32"),
        ("block_table_ptr", "*i32"),
        *token_mask,
        ("out_ptr", "*i32"),
        ("lens_ptr", "*i32"),
        ("topk", "i32"),
        ("num_requests", "i32"),
        ("block_size", "i32"),
        ("index_limit", "i32"),
        ("block_limit", "i32"),
        ("multiplier", "i32"),
        ("shift", "i32"),
        *(tuple((name, "i32") for name in PARTS) if CONVERTER in plan.spec.wrappers else ()),
        ("indices_stride", "i64"),
        ("block_table_stride", "i64"),
    )


COMBINE_SIGNATURE: Signature = (
    ("topk_indices_ptr", "*i32"),
    ("query_start_ptr", "*i32"),
    ("seq_lens_ptr", "*i32"),
    ("gather_lens_ptr", "*i32"),
    ("out_ptr", "*i32"),
    ("lens_ptr", "*i32"),
    ("num_tokens", "i32"),
    ("num_requests", "i32"),
    ("request_bits", "i32"),
    ("num_indices", "i32"),
    ("topk", "i32"),
    ("window_size", "i32"),
    ("compress_ratio", "i32"),
    ("request_rows", "i32"),
    ("window_row", "i32"),
    ("column_blocks", "i32"),
    ("topk_indices_stride", "i64"),
)


def _optional_arguments(plan: Plan) -> list[str]:
    """What the wrappers can pass for is_valid_token and lens, as text of the arguments."""
    wrappers = plan.spec.wrappers
    if COUNTER not in wrappers:
        return ["none", "None"]
    return ["token_mask, none", *(["None, none", "None, None"] if CONVERTER in wrappers else [])]


def _context(plan: Plan, family: IndicesPlan) -> dict[str, Any]:
    """What the template asks for."""
    wrappers = plan.spec.wrappers
    has_token_mask, maps_without = COUNTER in wrappers, CONVERTER in wrappers
    absent = ["is_valid_token is None"] * has_token_mask + ["lens is None"]
    return {
        **common(plan),
        "index": family,
        "maps": has_token_mask or maps_without,
        "combines": COMBINER in wrappers,
        "has_token_mask": has_token_mask,
        "maps_without": maps_without,  # without a token mask, and without counts unless they are asked for
        "absent": (f"({', '.join(absent)})" if len(absent) > 1 else absent[0]) if maps_without else "None",
        "optional": _optional_arguments(plan),
        "arguments": {"map": len(_map_signature(plan)), "combine": len(COMBINE_SIGNATURE)},
    }


def shared(plan: Plan, family: IndicesPlan) -> list[GeneratedFile]:
    """What the family's module imports: nothing."""
    return []


def modules(plan: Plan, family: IndicesPlan) -> list[Module]:
    """The family's module."""
    names = sorted(name for name in family.WRAPPERS if name in plan.spec.wrappers)
    return [Module(generated(MODULE, _context(plan, family)), names)]
