"""Latents of groups of tokens, V4.1's compressed rows before RoPE, and their insertion into attention's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.backends.parts import cache_argument, layout, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.cache_argument import CacheArgument
from mlagen.backends.parts.common import TORCH_DTYPES, alignment_of, columns_text, fields_of, is_aligned
from mlagen.backends.parts.layout_module import LayoutModule, RowWriter
from mlagen.layout import CacheLayout
from mlagen.plan import Chunk, LatentsPlan, Plan
from mlagen.plan.families.latents import INSERT, POOL
from mlagen.work import FLOAT_BYTES

MODULE = "latents"


@dataclass(frozen=True)
class LatentColumns:
    """A block of a latent's columns as the kernel that makes latents computes it.

    Attributes:
        name: suffix of its variables.
        block: its width.
        columns_text: its columns, as text.
        alignment: known alignment of its addresses, as text.
        exists: the mask of loads from rows of tokens, as text.
        inside: the mask of its columns as arguments of a load or store, as text; empty without padding.
        stored: likewise of the store of a latent, which not every program makes.
        of_token, of_other, of_state: masks of a token's row, of the other one of its group, and of its state, as text.
    """

    name: str
    block: int
    columns_text: str
    alignment: str
    exists: str
    inside: str
    stored: str
    of_token: str
    of_other: str
    of_state: str


@dataclass(frozen=True)
class InsertedColumns:
    """A block of a row's columns as the cache stores it.

    Attributes:
        name: suffix of its variables.
        block: its width.
        columns_text: its columns, as text.
        whole_alignment: known alignment of its addresses in a latent, as text.
        exists: the mask of its loads, as text.
        turns: whether it has columns that RoPE rotates.
        store: arguments of its store_..., as text.
    """

    name: str
    block: int
    columns_text: str
    whole_alignment: str
    exists: str
    turns: bool
    store: str


@dataclass(frozen=True)
class LatentRope:
    """Facts about RoPE.

    Attributes:
        columns, half: rotated columns, and their pairs.
        neox: whether a pair's columns are `half` apart, not neighbours.
        angles_aligned: whether the sines of a row begin at an aligned address.
    """

    columns: int
    half: int
    neox: bool
    angles_aligned: bool


@dataclass(frozen=True)
class Facts:
    """Facts that both templates take.

    Attributes:
        dtype: the model's dtype.
        layout: bytes of a row.
        layout_module: module of its layout.
        columns, d_c: columns of a latent, and the first one that RoPE rotates.
        rope: RoPE.
        pools, inserts: the wrappers of the module.
        needs_e4m3: whether kernels depend on the device's e4m3 support.
    """

    dtype: str
    layout: CacheLayout
    layout_module: str
    columns: int
    d_c: int
    rope: LatentRope
    pools: bool
    inserts: bool
    needs_e4m3: bool


@dataclass(frozen=True)
class Kernels(Facts, RowWriter):
    """Context of the kernels' template.

    Attributes:
        blocks, states: blocks of a latent as it is made, and of a token's state.
        stored: blocks of a row as the layout stores it.
        saved_rows: states that a program loads at once.
    """

    blocks: Sequence[LatentColumns]
    states: Sequence[LatentColumns]
    saved_rows: int
    stored: Sequence[InsertedColumns]


@dataclass(frozen=True)
class Wrappers(Facts, CacheArgument):
    """Context of the wrappers' template.

    Attributes:
        torch_dtype: torch's name of the model's dtype.
        halves_aligned: whether both halves of a state are aligned.
    """

    torch_dtype: str
    halves_aligned: bool


def _block(chunk: Chunk) -> LatentColumns:
    """Return a block of a latent's columns."""
    end = chunk.start + chunk.columns
    return LatentColumns(
        name=chunk.name,
        block=chunk.block,
        columns_text=columns_text(chunk.start, chunk.block),
        alignment=alignment_of(chunk.start),
        exists=f"exists[:, None] & (columns < {end})[None, :]" if chunk.masked else "exists[:, None]",
        inside=f", mask=columns < {end}" if chunk.masked else "",
        stored=f", mask=stored & (columns < {end})" if chunk.masked else ", mask=stored",
        of_token=f"exists & (columns < {end})" if chunk.masked else "exists",
        of_other=f"works & (columns < {end})" if chunk.masked else "works",
        of_state=f"inside & (columns < {end})" if chunk.masked else "inside",
    )


def _stored(plan: Plan, one: CacheLayout, of_layout: LayoutModule) -> list[InsertedColumns]:
    """Return the blocks of a row as the cache stores it."""
    found = []
    for chunk in of_layout.stored:
        found.append(
            InsertedColumns(
                name=chunk.name,
                block=chunk.block,
                columns_text=columns_text(chunk.start, chunk.block),
                whole_alignment=alignment_of(chunk.start),
                exists="valid[:, None]" + (f" & ({chunk.name}_columns < {chunk.end})[None, :]" if chunk.masked else ""),
                turns=chunk.end > plan.spec.model.kv_lora_rank,
                store=layout.store_text(one, chunk.name),
            )
        )
    return found


def _of_layout(plan: Plan, family: LatentsPlan) -> LayoutModule:
    """Return the context of the layout that rows have."""
    return layout.context(plan, family.caches, family.cache)


def _facts(plan: Plan, family: LatentsPlan) -> Facts:
    """Return the facts that both templates take."""
    dims, wrappers, one = plan.spec.model, plan.spec.wrappers, family.cache.layout
    half = dims.qk_rope_head_dim // 2
    return Facts(
        dtype=dims.dtype,
        layout=one,
        layout_module=layout.EXTRA_MODULE if family.caches.other else layout.MODULE,
        columns=one.columns,
        d_c=dims.kv_lora_rank,
        rope=LatentRope(dims.qk_rope_head_dim, half, dims.rope == "neox", is_aligned(half)),
        pools=POOL in wrappers,
        inserts=INSERT in wrappers,
        needs_e4m3=layout.needs_e4m3(one),
    )


def _kernels(plan: Plan, family: LatentsPlan) -> Kernels:
    """Context of the kernels' template."""
    of_layout = _of_layout(plan, family)
    return Kernels(
        **vars(_facts(plan, family)),
        **fields_of(RowWriter, vars(of_layout)),
        blocks=[_block(chunk) for chunk in family.blocks],
        states=[_block(chunk) for chunk in family.states],
        saved_rows=family.saved_rows,
        stored=_stored(plan, family.cache.layout, of_layout),
    )


def _wrappers(plan: Plan, family: LatentsPlan) -> Wrappers:
    """Context of the wrappers' template."""
    one = family.cache.layout
    return Wrappers(
        **vars(_facts(plan, family)),
        **vars(cache_argument.described(plan, one, _of_layout(plan, family))),
        torch_dtype=TORCH_DTYPES[plan.spec.model.dtype],
        halves_aligned=is_aligned(one.columns, FLOAT_BYTES),
    )


def private_files(plan: Plan, family: LatentsPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    kernels = generated(f"_{MODULE}_kernels", vars(_kernels(plan, family)))
    return [*layout.files(plan, family.caches), tiles.file(plan), kernels]


def modules(plan: Plan, family: LatentsPlan) -> list[Module]:
    """The module of the family's wrappers."""
    return [Module(generated(MODULE, vars(_wrappers(plan, family))), family.wanted(plan.spec))]
