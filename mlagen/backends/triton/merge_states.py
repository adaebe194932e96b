"""Merges of normalised partial results by their LSE, two or any number of them, and their wrappers."""

from __future__ import annotations

from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.triton import tiles
from mlagen.backends.triton.common import common
from mlagen.backends.triton.splits import presences
from mlagen.plan import MergeStatesPlan, Plan
from mlagen.spec import SparseAttention

MODULE = "merge_states"
STATES, PARTS = "merge_attn_states", "merge_attn_parts"


def _context(plan: Plan, merge: MergeStatesPlan) -> dict[str, Any]:
    """Context of the templates."""
    wrappers, attention, sink = plan.spec.wrappers, plan.spec.attention, presences(plan).attn_sink
    sparse = isinstance(attention, SparseAttention)
    return {
        **common(plan, "dtype", "torch_dtype"),
        "lse_base": attention.lse_base if attention else "e",
        "empty_lse": attention.empty_row_lse.lstrip("+") if attention else "-inf",
        "has_sink": sink != "none" or not sparse,  # attention without a sink argument may belong to a model with sinks
        "sink_required": sink == "required",
        "attends": bool(plan.tiled),
        "has_tensor_scale": True,  # values of a quantised output
        "merge": merge,
        "values": " or ".join(str(row.d_v) for row in merge.rows),
        "merges_states": STATES in wrappers,
        "merges_parts": PARTS in wrappers,
        "block_p": merge.rows[0].parts.block_p,
        "table": f"MERGE_{'STATES' if STATES in wrappers else 'PARTS'}_TILES",
    }


def shared(plan: Plan, family: MergeStatesPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    return [tiles.file(plan), generated("_merge_states_kernels", _context(plan, family))]


def modules(plan: Plan, family: MergeStatesPlan) -> list[Module]:
    """The module of the family's wrappers."""
    names = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
    return [Module(generated(MODULE, _context(plan, family)), names)]
