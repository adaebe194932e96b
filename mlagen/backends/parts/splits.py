"""Code that the attention families share: the choice of splits, the softmax, and the combine kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mlagen.backends.parts.base import GeneratedFile, generated
from mlagen.backends.parts.common import facts, kernels_of, stated_scale
from mlagen.plan import DenseDecodePlan, Family, MergeStatesPlan, Plan, SparseDecodePlan
from mlagen.spec import Presence, SparseAttention

MODULE = "_splits"
# Facts of attention in the templates of both, of splits of indices, and of ranges of KV blocks.
FACTS = ("backend", "d_qk", "d_v", "dtype", "takes_pair", "partials", "partial_type", "row_floats", "lse_base")
OF_SPLITS = ("shares", "has_sink", "sink_required", "has_topk_length", "length_required", "empty_row_lse")
OF_RANGES = ("window", "table_width")


class Presences(NamedTuple):
    """Whether attention takes a sink, and lengths of index lists."""

    attn_sink: Presence = "none"
    topk_length: Presence = "none"


def presences(plan: Plan) -> Presences:
    """Return the options of a plan's attention."""
    attention = plan.spec.attention
    if not isinstance(attention, SparseAttention):
        return Presences()
    return Presences(attention.attn_sink, attention.topk_length)


def given(presence: Presence, name: str) -> list[str]:
    """Return the possible values of an argument as text: None if it is optional, and its name."""
    return {"none": ["None"], "optional": ["None", name], "required": [name]}[presence]


def attention_context(plan: Plan, *names: str) -> dict[str, Any]:
    """Return the named facts among those that several families of attention need."""
    attention, (sink, length) = plan.attention, presences(plan)
    dense, partials = plan.find(DenseDecodePlan), plan.splits.partials
    found = {
        **facts(plan),
        "partials": partials,
        "partial_type": {"bf16": "tl.bfloat16", "fp16": "tl.float16"}.get(partials.dtype),
        "row_floats": "PARTIAL_FLOATS" if partials.rounds else "D_V",  # the constant's name
        "has_rope": plan.spec.model.qk_rope_head_dim > 0,
        "has_sink": sink != "none",
        "sink_required": sink == "required",
        "has_topk_length": length != "none",
        "length_required": length == "required",
        "dense": dense,
        "window": dense.window if dense else None,
        "table_width": 3
        if attention.window
        else 2,  # fields that the combine kernel reads of a request of dense decode
        "lse_base": attention.lse_base,
        "empty_row_lse": attention.empty_row_lse.lstrip("+"),
        "stated_scale": stated_scale(attention.softmax_scale),
        **wrapper_text(plan),
    }
    return {name: found[name] for name in names}


def wrapper_text(plan: Plan) -> dict[str, str]:
    """Text of wrappers: Q as one tensor or two, and the softmax scale, which a spec may state."""
    scale, pair = stated_scale(plan.attention.softmax_scale), plan.takes_pair
    said = f"{scale}, from the spec"
    merges = plan.find(MergeStatesPlan) is not None
    return {
        "q": "q, q_rope" if pair else "q",
        "q_type": "torch.Tensor | tuple[torch.Tensor, torch.Tensor]" if pair else "torch.Tensor",
        "q_sources": "**_splits.QUERY, " if pair else "",
        "q_rope_address": "q_rope.data_ptr() | " if facts(plan)["rope_aligned"] else "",
        "rope_said": " + qk_rope_head_dim" if plan.spec.model.qk_rope_head_dim else "",
        "scale_type": "float | None" if scale else "float",
        "scale_said": f"; None: {said}" if scale else "",
        "scale_else": f"{scale} if sm_scale is None else " if scale else "",
        "default_scale": scale or "D_QK**-0.5",
        "default_scale_said": said if scale else f"{plan.d_qk}**-0.5",
        "merge_import": ", merge_states" if merges else "",
        "merge_sources": ', prefix_lse="lse", suffix_lse="lse"' if merges else "",
    }


def _context(plan: Plan) -> dict[str, Any]:
    """Template context."""
    dense, sparse_decode = plan.find(DenseDecodePlan), plan.find(SparseDecodePlan)
    shared = attention_context(plan, *FACTS, *(OF_RANGES if dense else OF_SPLITS))
    base_e = shared["lse_base"] == "e"
    of_splits = {"to_base": " * LN2" if base_e else "", "kernel_names": kernel_names(plan.latent)}
    return {
        **shared,
        **({} if dense else of_splits),
        "cached": dense is not None or sparse_decode is not None,
        "redoes": sparse_decode is not None and sparse_decode.sm90 is not None,
        "sm90_tile": next((family.sm90.tile for family in plan.latent if family.sm90), None),
        "splits": plan.splits,
        "lse_text": "(m + tl.log2(l)) * LN2" if base_e else "m + tl.log2(l)",
        "tile_names": ", ".join(_tile_names(plan)),
    }


def _tile_names(plan: Plan) -> list[str]:
    """Return the names that the module imports from `_tiles`."""
    costs = not plan.find(DenseDecodePlan) and any(family.sm90 for family in plan.latent)
    return ["ANY", *(["Sm90Cost"] if costs else []), "Tile", "TileRow"]


def kernel_names(families: Sequence[Family]) -> str:
    """Return the names of the kernels that schedules of these families name, as text."""
    return ", ".join(f'"{name}"' for name in kernels_of(families))


def file(plan: Plan) -> GeneratedFile:
    """Return the module."""
    return generated(MODULE, _context(plan), "_partition" if plan.find(DenseDecodePlan) else MODULE)
