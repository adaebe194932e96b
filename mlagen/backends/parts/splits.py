"""Code that the attention families share: the choice of splits, the softmax, and the combine kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlagen.backends.parts.base import GeneratedFile, generated
from mlagen.backends.parts.common import (
    TORCH_DTYPES,
    TRITON_FLOATS,
    Block,
    alignment_of,
    fields_of,
    kernels_of,
    stated_scale,
)
from mlagen.layout import CacheLayout
from mlagen.plan import DenseDecodePlan, Family, MergeStatesPlan, Plan, SparseDecodePlan, SplitsPlan, Tile
from mlagen.plan.splits import PartialRow
from mlagen.spec import QUANT_BLOCK, Presence, SparseAttention

MODULE = "_splits"
QUANT_ARGUMENTS = "\n    out_scales_ptr, num_tokens, out_group_stride: tl.int64,"
ANGLE_ARGUMENTS = "\n    positions_ptr, cos_sin_cache_ptr, num_positions, cos_sin_stride: tl.int64,"


@dataclass(frozen=True)
class OutRope:
    """Template context for the rotation of the output.

    Attributes:
        start: the first column that it rotates; the others follow to the end of V.
        columns: number of these columns.
        half: number of their pairs.
    """

    start: int
    columns: int
    half: int


@dataclass(frozen=True)
class QuantisedOut:
    """Template context for the quantisation of the output.

    Attributes:
        heads: heads of a group.
        columns: columns of a group.
        block, blocks: columns with one scale, and such blocks of a head.
        packed: whether a word holds the scales of a head.
        words: elements of the tensor of scales for a group.
        torch_dtype: torch's name of their dtype.
        contents: the elements, in docstrings.
    """

    heads: int
    columns: int
    block: int
    blocks: int
    packed: bool
    words: int
    torch_dtype: str
    contents: str


@dataclass(frozen=True)
class Attention:
    """Facts of attention that the templates of its kernels and wrappers take.

    Attributes:
        d_qk, d_v: columns of Q and K, and of V.
        dtype: the model's dtype.
        takes_pair: whether Q's RoPE columns are in another tensor.
    """

    d_qk: int
    d_v: int
    dtype: str
    takes_pair: bool


@dataclass(frozen=True)
class AttentionWrappers(Attention):
    """Facts of attention that the templates of its wrappers take.

    Attributes:
        layout: the cache's layout; None without a cache.
        rope_aligned: whether Q's RoPE columns in another tensor are as aligned as in one.
        merges: whether the package merges results.
        torch_dtype: torch's name of the model's dtype.
        lse_base: base of the LSE.
        empty_row_lse: LSE of a row without keys, as text.
        q, q_type, q_sources, q_rope_address, rope_said: text for Q as one tensor or two.
    """

    layout: CacheLayout | None
    rope_aligned: bool
    merges: bool
    torch_dtype: str
    lse_base: str
    empty_row_lse: str
    q: str
    q_type: str
    q_sources: str
    q_rope_address: str
    rope_said: str


@dataclass(frozen=True)
class SplitsFacts(Attention):
    """Facts that both templates of the module take.

    Attributes:
        backend: the spec's back end.
        partials: a row of a split's results.
        partial_type: Triton's name of its dtype; None for fp32.
        row_floats: the constant with the floats of such a row.
        lse_base: base of the LSE.
        cached: whether attention reads a cache.
        recomputes: whether the sm90 kernel may recompute splits, and so reads their sums.
        sm90_tile: tile of the sm90 kernel; None without one.
        splits: the plan of splits.
        tile_names: names that the module imports from `_tiles`, as text.
    """

    backend: str
    partials: PartialRow
    partial_type: str | None
    row_floats: str
    lse_base: str
    cached: bool
    recomputes: bool
    sm90_tile: Tile | None
    splits: SplitsPlan
    tile_names: str


@dataclass(frozen=True)
class Partition(SplitsFacts):
    """Context of the template for ranges of KV blocks.

    Attributes:
        window: keys that a row of the model sees, including its own; None: all.
        table_width: fields that the combine kernel reads of a request.
    """

    window: int | None
    table_width: int


@dataclass(frozen=True)
class Splits(SplitsFacts):
    """Context of the template for splits of indices.

    Attributes:
        shares: whether tokens share indices.
        has_sink, sink_required: whether attention may take a sink, and whether it must.
        has_topk_length, length_required: whether it may take lengths of index lists, and whether it must.
        out_rope, out_quant: the rotation and the quantisation of the output; None without.
        empty_row_lse: LSE of a row without keys, as text.
        kernel_names: kernels that a schedule names, as text.
    """

    shares: bool
    has_sink: bool
    sink_required: bool
    has_topk_length: bool
    length_required: bool
    out_rope: OutRope | None
    out_quant: QuantisedOut | None
    empty_row_lse: str
    kernel_names: str


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


def values_of(presence: Presence, name: str) -> list[str]:
    """Return the possible values of an argument as text: None if it is optional, and its name."""
    return {"none": ["None"], "optional": ["None", name], "required": [name]}[presence]


def rope_aligned(plan: Plan) -> bool:
    """Whether Q's RoPE columns in another tensor are as aligned as in one."""
    return plan.takes_pair and alignment_of(plan.d_v) == "ALIGNMENT"


def out_rope(plan: Plan) -> OutRope | None:
    """Return the rotation of the output, or None."""
    return OutRope(plan.d_v - plan.out_rope, plan.out_rope, plan.out_rope // 2) if plan.out_rope else None


def out_quant(plan: Plan) -> QuantisedOut | None:
    """Return the quantisation of the output, or None."""
    quant, blocks = plan.out_quant, plan.d_v // QUANT_BLOCK
    if quant is None:
        return None
    packed = quant.scales == "ue8m0"
    one = f"a power of two for each {QUANT_BLOCK} columns"
    return QuantisedOut(
        heads=quant.heads_per_group,
        columns=quant.heads_per_group * plan.d_v,
        block=QUANT_BLOCK,
        blocks=blocks,
        packed=packed,
        words=quant.heads_per_group * (1 if packed else blocks),
        torch_dtype="int32" if packed else "float32",
        contents=f"{one}, the ue8m0 bytes of a head in a word" if packed else one,
    )


def rotated(plan: Plan, v_chunks: Sequence[Block]) -> list[Block]:
    """Return the blocks of V with columns that the epilogue rotates."""
    return [chunk for chunk in v_chunks if plan.out_rope and chunk.start + chunk.columns > plan.d_v - plan.out_rope]


def attention_context(plan: Plan, kind: type[Any]) -> dict[str, Any]:
    """Return the facts of attention that are fields of a context's class."""
    spec, attention, (sink, length) = plan.spec, plan.attention, presences(plan)
    dense, partials = plan.find(DenseDecodePlan), plan.splits.partials
    found = {
        "wrappers": spec.wrappers,
        "backend": spec.backend,
        "shares": plan.union is not None,
        "layout": plan.layout,
        "d_qk": plan.d_qk,
        "d_v": plan.d_v,
        "dtype": spec.model.dtype,
        "takes_pair": plan.takes_pair,
        "out_rope": out_rope(plan),
        "out_quant": out_quant(plan),
        "rope_aligned": rope_aligned(plan),
        "merges": plan.find(MergeStatesPlan) is not None,
        "torch_dtype": TORCH_DTYPES[spec.model.dtype],
        "partials": partials,
        "partial_type": TRITON_FLOATS[partials.dtype] if partials.rounds else None,
        "row_floats": "PARTIAL_FLOATS" if partials.rounds else "D_V",
        "has_sink": sink != "none",
        "sink_required": sink == "required",
        "has_topk_length": length != "none",
        "length_required": length == "required",
        "window": dense.window if dense else None,
        "table_width": 3 if attention.window else 2,
        "lse_base": attention.lse_base,
        "empty_row_lse": attention.empty_row_lse.lstrip("+"),
        **wrapper_text(plan),
    }
    return fields_of(kind, found)


def wrapper_text(plan: Plan) -> dict[str, str]:
    """Text of wrappers: Q as one tensor or two, and the softmax scale, which a spec may state."""
    scale, pair = stated_scale(plan.attention.softmax_scale), plan.takes_pair
    said = f"{scale}, from the spec"
    merges = plan.find(MergeStatesPlan) is not None
    return {
        "q": "q, q_rope" if pair else "q",
        "q_type": "torch.Tensor | tuple[torch.Tensor, torch.Tensor]" if pair else "torch.Tensor",
        "q_sources": "**_splits.QUERY, " if pair else "",
        "q_rope_address": "q_rope.data_ptr() | " if rope_aligned(plan) else "",
        "rope_said": " + qk_rope_head_dim" if plan.spec.model.qk_rope_head_dim else "",
        "scale_type": "float | None" if scale else "float",
        "scale_said": f"; None: {said}" if scale else "",
        "scale_else": f"{scale} if sm_scale is None else " if scale else "",
        "default_scale": scale or "D_QK**-0.5",
        "default_scale_said": said if scale else f"{plan.d_qk}**-0.5",
        "merge_import": ", merge_states" if merges else "",
        "merge_sources": ', prefix_lse="lse", suffix_lse="lse"' if merges else "",
    }


def _context(plan: Plan) -> SplitsFacts:
    """Template context."""
    dense, sparse_decode = plan.find(DenseDecodePlan), plan.find(SparseDecodePlan)
    kind = Partition if dense else Splits
    found = {
        "cached": dense is not None or sparse_decode is not None,
        "recomputes": sparse_decode is not None and sparse_decode.sm90 is not None,
        "sm90_tile": next((family.sm90.tile for family in plan.latent if family.sm90), None),
        "splits": plan.splits,
        "kernel_names": kernel_names(plan.latent),
        "tile_names": ", ".join(_tile_names(plan)),
    }
    return kind(**attention_context(plan, kind), **fields_of(kind, found))


def _tile_names(plan: Plan) -> list[str]:
    """Return the names that the module imports from `_tiles`."""
    costs = not plan.find(DenseDecodePlan) and any(family.sm90 for family in plan.latent)
    return ["ANY", *(["Sm90Cost"] if costs else []), "Tile", "TileRow"]


def kernel_names(families: Sequence[Family]) -> str:
    """Return the names of the kernels that schedules of these families name, as text."""
    return ", ".join(f'"{name}"' for name in kernels_of(families))


def file(plan: Plan) -> GeneratedFile:
    """Return the module."""
    return generated(MODULE, vars(_context(plan)), "_partition" if plan.find(DenseDecodePlan) else MODULE)
