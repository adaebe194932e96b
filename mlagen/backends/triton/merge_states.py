"""Merges of normalised partial results by their LSE, two or any number of them, and their wrappers."""

from __future__ import annotations

from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.triton.common import Signature, common
from mlagen.plan import MergeStatesPlan, Plan

MODULE = "merge_states"
STATES, PARTS = "merge_attn_states", "merge_attn_parts"


def _states_signature(plan: Plan) -> Signature:
    element = f"*{plan.spec.model.dtype}"
    strides = ("token_stride", "head_stride", "lse_stride")
    return (
        ("out_ptr", element),
        ("out_lse_ptr", "*fp32"),
        ("prefix_ptr", element),
        ("prefix_lse_ptr", "*fp32"),
        ("suffix_ptr", element),
        ("suffix_lse_ptr", "*fp32"),
        ("num_tokens", "i32"),
        ("num_heads", "i32"),
        ("num_prefix_tokens", "i32"),
        *((f"{tensor}_{stride}", "i64") for tensor in ("out", "prefix", "suffix") for stride in strides),
    )


def _parts_signature(plan: Plan, part_dtype: str) -> Signature:
    return (
        ("out_ptr", f"*{plan.spec.model.dtype}"),
        ("out_lse_ptr", "*fp32"),
        ("parts_ptr", f"*{part_dtype}"),
        ("lses_ptr", "*fp32"),
        ("num_parts", "i32"),
        ("num_tokens", "i32"),
        ("num_heads", "i32"),
        ("to_log2", "fp32"),
        ("from_log2", "fp32"),
        ("out_token_stride", "i64"),
        ("out_head_stride", "i64"),
        ("out_lse_stride", "i64"),
        ("parts_stride", "i64"),
        ("parts_token_stride", "i64"),
        ("parts_head_stride", "i64"),
        ("lses_stride", "i64"),
        ("lses_head_stride", "i64"),
    )


def _context(plan: Plan, merge: MergeStatesPlan) -> dict[str, Any]:
    """What the template asks for."""
    wrappers = plan.spec.wrappers
    return {
        **common(plan),
        "merge": merge,
        "values": " or ".join(str(row.d_v) for row in merge.rows),
        "merges_two": STATES in wrappers,
        "merges_parts": PARTS in wrappers,
        "block_p": merge.rows[0].parts.block_p,
        "tiles": "TILES" if STATES in wrappers else "PARTS_TILES",
        "arguments": {
            "states": len(_states_signature(plan)),
            "parts": len(_parts_signature(plan, plan.spec.model.dtype)),
        },
    }


def shared(plan: Plan, family: MergeStatesPlan) -> list[GeneratedFile]:
    """What the family's module imports: nothing."""
    return []


def modules(plan: Plan, family: MergeStatesPlan) -> list[Module]:
    """The family's module."""
    names = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
    return [Module(generated(MODULE, _context(plan, family)), names)]
