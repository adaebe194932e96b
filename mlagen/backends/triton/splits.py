"""Code that the attention families share: the choice of splits, the softmax, and the combine kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mlagen.backends.base import GeneratedFile, generated
from mlagen.backends.triton.common import chunk_of, facts, stated_scale
from mlagen.plan import Chunk, DenseDecodePlan, Plan, SparseDecodePlan
from mlagen.spec import Presence, SparseAttention

MODULE = "_splits"
FACTS = (
    *("backend", "shares", "d_qk", "d_v", "dtype", "takes_pair", "partials", "partial_type", "row_floats"),
    *("has_sink", "sink_required", "has_topk_length", "length_required", "dense", "window", "table_width"),
    *("lse_base", "empty_row_lse"),
)


def accumulators(chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
    """Template context of V's chunks, each with the name of its accumulator."""
    in_v = [chunk_of(chunk) for chunk in chunks if chunk.in_v]
    names = ["acc"] if len(in_v) == 1 else [f"acc_{number}" for number in range(len(in_v))]
    return [{**chunk, "acc": acc} for chunk, acc in zip(in_v, names, strict=True)]


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
    }
    return {name: found[name] for name in names}


def _context(plan: Plan) -> dict[str, Any]:
    """Template context."""
    shared = attention_context(plan, *FACTS)
    base_e = shared["lse_base"] == "e"
    dense, sparse_decode = shared["dense"], plan.find(SparseDecodePlan)
    return {
        **shared,
        "cached": dense is not None or sparse_decode is not None,
        "redoes": sparse_decode is not None and sparse_decode.sm90 is not None,
        "sm90_tile": next((family.sm90.tile for family in plan.latent if family.sm90), None),
        "splits": plan.splits,
        "to_base": " * LN2" if base_e else "",
        "lse_text": "(m + tl.log2(l)) * LN2" if base_e else "m + tl.log2(l)",
        "tile_names": ", ".join(_tile_names(plan)),
        "kernel_names": ", ".join(f'"{name}"' for name in kernel_names(plan)),
    }


def _tile_names(plan: Plan) -> list[str]:
    """Return the names that the module imports from `_tiles`."""
    costs = not plan.find(DenseDecodePlan) and any(family.sm90 for family in plan.latent)
    return ["ANY", *(["Sm90Cost"] if costs else []), "Tile", "TileRow"]


def kernel_names(plan: Plan) -> list[str]:
    """Return the kernels that a schedule may name."""
    names = ["portable", *(["sm90"] if any(family.sm90 for family in plan.latent) else [])]
    names += ["sm90_swap_ab"] if any(getattr(family, "swap_ab", ()) for family in plan.latent) else []
    return names + (["sm90_shared"] if plan.union else [])


def file(plan: Plan) -> GeneratedFile:
    """Return the module."""
    return generated(MODULE, _context(plan))
