"""The prologue of attention: norms, RoPE and the insertion of rows in one launch, and its wrappers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.backends.parts import cache_argument, layout, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.cache_argument import NamedArgument
from mlagen.backends.parts.common import TORCH_DTYPES, alignment_of, columns_text, fields_of, is_aligned
from mlagen.backends.parts.layout_module import RowWriter, StoredColumns
from mlagen.layout import CacheLayout
from mlagen.plan import CachePlan, Chunk, Plan, ProloguePlan
from mlagen.plan.families.prologue import OVER_HEADS, OVER_ROPE
from mlagen.plan.tiles.chunks import next_power_of_2

MODULE = "prologue"
INSERT, INSERT_PADDED = OVER_HEADS


@dataclass(frozen=True)
class RowBlock:
    """A block of a row as the cache stores it, with its source in one tensor or in two.

    Attributes:
        name: suffix of its variables.
        block: its width.
        columns_text: its columns, as text.
        turns: whether it has columns that RoPE rotates.
        straddles: whether it has columns of the latent and of RoPE.
        ptrs: addresses of its columns in two tensors, as text.
        alignment, whole_alignment: known alignment of its addresses in two tensors and in one, as text.
        exists: the mask of its loads, as text.
        weighs, whole_weighs: masks of the norm's weights for two tensors and for one, as text.
        changed: the mask of the columns that a norm or RoPE changes, as text.
        store: arguments of its store_..., as text.
    """

    name: str
    block: int
    columns_text: str
    turns: bool
    straddles: bool
    ptrs: str
    alignment: str
    whole_alignment: str
    exists: str
    weighs: str
    whole_weighs: str
    changed: str
    store: str


@dataclass(frozen=True)
class LatentBlock:
    """A block of Q's columns that RoPE leaves as they are.

    Attributes:
        name: suffix of its variables.
        block: its width.
        columns_text: its columns, as text.
        alignment: known alignment of its addresses, as text.
        exists, written, weighs: masks of its loads, of its stores and of the norm's weights, as text.
    """

    name: str
    block: int
    columns_text: str
    alignment: str
    exists: str
    written: str
    weighs: str


@dataclass(frozen=True)
class Pairs:
    """Text for the columns that RoPE rotates.

    Attributes:
        first, second: the columns of a neox pair. Without neox, `first` has the columns of all pairs.
        first_alignment, second_alignment: known alignment of their addresses.
    """

    first: str
    second: str
    first_alignment: str
    second_alignment: str


@dataclass(frozen=True)
class Rope:
    """Template context for RoPE.

    Attributes:
        columns: number of rotated columns.
        half: number of their pairs.
        block, half_block: blocks of columns and of pairs.
        neox: whether a pair's columns are `half` apart, not neighbours.
        exists, written: masks of loads and of stores, as text.
        rotates: the mask of the angles, as text.
        weighs: the mask of the norm's weights, as text.
        in_head: the columns in whole heads.
        apart: the columns in a separate tensor.
        angles_aligned: whether the sines of a row begin at an aligned address.
    """

    columns: int
    half: int
    block: int
    half_block: int
    neox: bool
    exists: str
    written: str
    rotates: str
    weighs: str
    in_head: Pairs
    apart: Pairs
    angles_aligned: bool


@dataclass(frozen=True)
class Facts:
    """Facts that both templates take.

    Attributes:
        dtype: the model's dtype.
        d_qk, d_c: columns of a row, and of its latent part.
        layout: the cache's layout.
        rope: RoPE.
        over_heads, over_rope: whether the package has wrappers over whole heads, and over their RoPE columns.
        needs_e4m3: whether kernels depend on the device's e4m3 support.
    """

    dtype: str
    d_qk: int
    d_c: int
    layout: CacheLayout
    rope: Rope
    over_heads: bool
    over_rope: bool
    needs_e4m3: bool


@dataclass(frozen=True)
class Kernels(Facts, RowWriter):
    """Context of the kernels' template.

    Attributes:
        stored: blocks of a row.
        latent: blocks of Q's columns without RoPE.
    """

    stored: Sequence[RowBlock]
    latent: Sequence[LatentBlock]


@dataclass(frozen=True)
class Wrappers(Facts, NamedArgument):
    """Context of the wrappers' template.

    Attributes:
        inserts, inserts_padded: the wrappers of the package over whole heads.
        torch_dtype: torch's name of the model's dtype.
    """

    inserts: bool
    inserts_padded: bool
    torch_dtype: str


def _row(plan: Plan, one: CacheLayout, chunks: Sequence[StoredColumns]) -> list[RowBlock]:
    """Return the blocks of a row as the cache stores it."""
    d_c, found = plan.spec.model.kv_lora_rank, []
    for chunk in chunks:
        name, start, end = chunk.name, chunk.start, chunk.end
        columns, turns, straddles = f"{name}_columns", end > d_c, start < d_c < end
        latent_ptrs = f"kv_c_rows[:, None] + {columns}[None, :]"
        rope_ptrs = f"k_pe_rows[:, None] + ({columns} - ROPE_START)[None, :]"
        changed = "(has_weight != 0)" if not turns else f"(({columns} >= ROPE_START)[None, :] | (has_weight != 0))"
        found.append(
            RowBlock(
                name=name,
                block=chunk.block,
                columns_text=columns_text(start, chunk.block),
                turns=turns,
                straddles=straddles,
                ptrs=rope_ptrs if turns else latent_ptrs,
                alignment=alignment_of(math.gcd(start, d_c) if straddles else start - d_c if turns else start),
                whole_alignment=alignment_of(start),
                exists=f"exists[:, None]{f' & ({columns} < {end})[None, :]' if chunk.masked else ''}",
                weighs=f"(has_weight != 0) & ({columns} < {min(end, d_c)})",
                whole_weighs=f"(has_weight != 0) & ({columns} < {end})",
                changed=f"valid[:, None] & {changed}" if straddles or not turns else "valid[:, None]",
                store=layout.store_text(one, name),
            )
        )
    return found


def _latent(chunk: Chunk) -> LatentBlock:
    """Return a block of Q's columns that RoPE leaves as they are."""
    end = chunk.start + chunk.columns
    inside = f" & (columns < {end})[None, :]" if chunk.masked else ""
    return LatentBlock(
        name=chunk.name,
        block=chunk.block,
        columns_text=columns_text(chunk.start, chunk.block),
        alignment=alignment_of(chunk.start),
        exists=f"exists[:, None]{inside}",
        written=f"written[:, None]{inside}",
        weighs=f"(has_weight != 0) & (columns < {end})" if chunk.masked else "has_weight != 0",
    )


def _pairs(neox: bool, start: str, first: int, half: int) -> Pairs:
    """Return the columns that RoPE rotates, from number `first` on, which `start` adds to theirs."""
    columns = "pairs" if neox else "columns"
    return Pairs(
        first=f"({columns}{start})" if start else columns,
        second=f"(pairs{start} + D_HALF)",
        first_alignment=alignment_of(first),
        second_alignment=alignment_of(first + half),
    )


def _rope(plan: Plan) -> Rope:
    """Template context for RoPE."""
    dims = plan.spec.model
    half, neox = dims.qk_rope_head_dim // 2, dims.rope == "neox"
    half_block = next_power_of_2(half)
    masked = half_block > half
    inside = ("(pairs < D_HALF)" if neox else "(columns < 2 * D_HALF)") + "[None, :]"
    return Rope(
        columns=dims.qk_rope_head_dim,
        half=half,
        block=2 * half_block,
        half_block=half_block,
        neox=neox,
        exists=f"exists[:, None] & {inside}" if masked else "exists[:, None]",
        written=f"written[:, None] & {inside}" if masked else "written[:, None]",
        rotates=f"known[:, None]{' & (pairs < D_HALF)[None, :]' if masked else ''}",
        weighs="(has_weight != 0) & (pairs < D_HALF)" if masked else "has_weight != 0",
        in_head=_pairs(neox, " + ROPE_START", dims.kv_lora_rank, half),
        apart=_pairs(neox, "", 0, half),
        angles_aligned=is_aligned(half),
    )


def _facts(plan: Plan, family: ProloguePlan) -> Facts:
    """Return the facts that both templates take."""
    wrappers, model, one = plan.spec.wrappers, plan.spec.model, family.caches.main.layout
    return Facts(
        dtype=model.dtype,
        d_qk=plan.d_qk,
        d_c=model.kv_lora_rank,
        layout=one,
        rope=_rope(plan),
        over_heads=any(name in wrappers for name in OVER_HEADS),
        over_rope=OVER_ROPE in wrappers,
        needs_e4m3=layout.needs_e4m3(one),
    )


def _kernels(plan: Plan, family: ProloguePlan) -> Kernels:
    """Context of the kernels' template."""
    of_layout = layout.context(plan, family.caches, family.caches.main)
    return Kernels(
        **vars(_facts(plan, family)),
        **fields_of(RowWriter, vars(of_layout)),
        stored=_row(plan, family.caches.main.layout, of_layout.stored),
        latent=[_latent(chunk) for chunk in family.latent],
    )


def _wrappers(plan: Plan, family: ProloguePlan) -> Wrappers:
    """Context of the wrappers' template."""
    checked_in = CachePlan.NAME if plan.find(CachePlan) else None
    return Wrappers(
        **vars(_facts(plan, family)),
        **vars(cache_argument.context(plan, family.caches, family.caches.main, checked_in)),
        inserts=INSERT in plan.spec.wrappers,
        inserts_padded=INSERT_PADDED in plan.spec.wrappers,
        torch_dtype=TORCH_DTYPES[plan.spec.model.dtype],
    )


def private_files(plan: Plan, family: ProloguePlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    kernels = generated(f"_{MODULE}_kernels", vars(_kernels(plan, family)))
    return [*layout.files(plan, family.caches), tiles.file(plan), kernels]


def modules(plan: Plan, family: ProloguePlan) -> list[Module]:
    """The module of the family's wrappers."""
    return [Module(generated(MODULE, vars(_wrappers(plan, family))), family.wanted(plan.spec))]
