"""Merges of normalised partial results by their LSE, two or any number of them, and their wrappers."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.backends.parts import tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.common import TORCH_DTYPES
from mlagen.backends.parts.splits import presences
from mlagen.plan import MergeStatesPlan, Plan
from mlagen.spec import SparseAttention

MODULE = "merge_states"
STATES, PARTS = "merge_attn_states", "merge_attn_parts"


@dataclass(frozen=True)
class Kernels:
    """Context of the kernels' template.

    Attributes:
        dtype: the model's dtype.
        merge: the family's plan.
        block_p: parts that a program adds at once.
        empty_lse: LSE of a row without keys, as text.
        merges_states: whether the package has `merge_attn_states`.
        merges_parts: whether it has `merge_attn_parts`.
    """

    dtype: str
    merge: MergeStatesPlan
    block_p: int
    empty_lse: str
    merges_states: bool
    merges_parts: bool


@dataclass(frozen=True)
class Wrappers:
    """Context of the wrappers' template.

    Attributes:
        dtype, torch_dtype: the model's dtype, and its name in torch.
        lse_base: base of the package's LSE.
        empty_lse: LSE of a row without keys, as text.
        has_sink: whether merges take a sink. Attention without one may belong to a model with sinks.
        sink_required: whether they require it.
        attends: whether the package computes attention.
        values: numbers of V's columns, as text.
        merges_states, merges_parts: the wrappers of the package.
        table: name of the tile table.
    """

    dtype: str
    torch_dtype: str
    lse_base: str
    empty_lse: str
    has_sink: bool
    sink_required: bool
    attends: bool
    values: str
    merges_states: bool
    merges_parts: bool
    table: str


def _empty_lse(plan: Plan) -> str:
    return plan.spec.attention.empty_row_lse.lstrip("+") if plan.spec.attention else "-inf"


def private_files(plan: Plan, family: MergeStatesPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    wrappers = plan.spec.wrappers
    context = Kernels(
        dtype=plan.spec.model.dtype,
        merge=family,
        block_p=family.rows[0].parts.block_p,
        empty_lse=_empty_lse(plan),
        merges_states=STATES in wrappers,
        merges_parts=PARTS in wrappers,
    )
    return [tiles.file(plan), generated("_merge_states_kernels", vars(context))]


def modules(plan: Plan, family: MergeStatesPlan) -> list[Module]:
    """The module of the family's wrappers."""
    wrappers, attention, sink = plan.spec.wrappers, plan.spec.attention, presences(plan).attn_sink
    context = Wrappers(
        dtype=plan.spec.model.dtype,
        torch_dtype=TORCH_DTYPES[plan.spec.model.dtype],
        lse_base=attention.lse_base if attention else "e",
        empty_lse=_empty_lse(plan),
        has_sink=sink != "none" or not isinstance(attention, SparseAttention),
        sink_required=sink == "required",
        attends=bool(plan.tiled),
        values=" or ".join(str(row.d_v) for row in family.rows),
        merges_states=STATES in wrappers,
        merges_parts=PARTS in wrappers,
        table=f"MERGE_{'STATES' if STATES in wrappers else 'PARTS'}_TILES",
    )
    return [Module(generated(MODULE, vars(context)), family.wanted(plan.spec))]
