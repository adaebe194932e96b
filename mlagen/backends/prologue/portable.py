"""The prologue of attention: norms, RoPE and the insertion of rows in one launch, and its wrappers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mlagen.backends.parts import cache_argument, layout, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.common import FULL_ALIGNMENT, TORCH_DTYPES, alignment_of, common
from mlagen.backends.parts.layout_module import StoredColumns
from mlagen.layout import CacheLayout
from mlagen.plan import Chunk, Plan, ProloguePlan
from mlagen.plan.families.prologue import OVER_HEADS, OVER_ROPE
from mlagen.plan.tiles.chunks import next_power_of_2
from mlagen.work import ITEMSIZE

MODULE = "prologue"
INSERT, INSERT_PADDED = OVER_HEADS


def _row(plan: Plan, one: CacheLayout, chunks: Sequence[StoredColumns]) -> list[dict[str, Any]]:
    """Return the blocks of a row as the cache stores it, each with its source in one tensor or in two."""
    d_c, found = plan.spec.model.kv_lora_rank, []
    for chunk in chunks:
        name, start, end = chunk.name, chunk.start, chunk.end
        block, columns = f"tl.arange(0, {chunk.block})", f"{name}_columns"
        turns, both = end > d_c, start < d_c < end
        latent_ptrs = f"kv_c_rows[:, None] + {columns}[None, :]"
        rope_ptrs = f"k_pe_rows[:, None] + ({columns} - ROPE_START)[None, :]"
        changed = "(has_weight != 0)" if not turns else f"(({columns} >= ROPE_START)[None, :] | (has_weight != 0))"
        found.append(
            {
                **vars(chunk),
                "columns_text": f"{start} + {block}" if start else block,
                "turns": turns,
                "both": both,
                "ptrs": rope_ptrs if turns else latent_ptrs,
                "whole_alignment": alignment_of(start),
                "alignment": alignment_of(math.gcd(start, d_c) if both else start - d_c if turns else start),
                "there": f"there[:, None]{f' & ({columns} < {end})[None, :]' if chunk.masked else ''}",
                "whole_weighs": f"(has_weight != 0) & ({columns} < {end})",
                "weighs": f"(has_weight != 0) & ({columns} < {min(end, d_c)})",
                "changed": f"valid[:, None] & {changed}" if both or not turns else "valid[:, None]",
                "store": layout.store_text(one, name),
            }
        )
    return found


def _latent(chunk: Chunk) -> dict[str, Any]:
    """Template context of a block of Q's columns that RoPE leaves as they are."""
    block, end = f"tl.arange(0, {chunk.block})", chunk.start + chunk.columns
    inside = f" & (columns < {end})[None, :]" if chunk.masked else ""
    return {
        "name": chunk.name,
        "block": chunk.block,
        "columns_text": f"{chunk.start} + {block}" if chunk.start else block,
        "alignment": alignment_of(chunk.start),
        "there": f"there[:, None]{inside}",
        "written": f"written[:, None]{inside}",
        "weighs": f"(has_weight != 0) & (columns < {end})" if chunk.masked else "has_weight != 0",
    }


def _columns(neox: bool, start: str, first: int, half: int) -> dict[str, str]:
    """Template context for the columns that RoPE rotates, from number `first` on, which `start` adds to theirs."""
    columns = "pairs" if neox else "columns"
    return {
        "first": f"({columns}{start})" if start else columns,
        "second": f"(pairs{start} + D_HALF)",
        "first_alignment": alignment_of(first),
        "second_alignment": alignment_of(first + half),
    }


def _rope(plan: Plan) -> dict[str, Any]:
    """Template context for RoPE."""
    dims = plan.spec.model
    half, neox = dims.qk_rope_head_dim // 2, dims.rope == "neox"
    half_block = next_power_of_2(half)
    masked = half_block > half
    inside = ("(pairs < D_HALF)" if neox else "(columns < 2 * D_HALF)") + "[None, :]"
    return {
        "columns": dims.qk_rope_head_dim,
        "half": half,
        "block": 2 * half_block,
        "half_block": half_block,
        "neox": neox,
        "there": f"there[:, None] & {inside}" if masked else "there[:, None]",
        "written": f"written[:, None] & {inside}" if masked else "written[:, None]",
        "turned": f"known[:, None]{' & (pairs < D_HALF)[None, :]' if masked else ''}",
        "weighs": "(has_weight != 0) & (pairs < D_HALF)" if masked else "has_weight != 0",
        "in_head": _columns(neox, " + ROPE_START", dims.kv_lora_rank, half),
        "alone": _columns(neox, "", 0, half),
        "angles_aligned": half * ITEMSIZE % FULL_ALIGNMENT == 0,
    }


def _shared(plan: Plan) -> dict[str, Any]:
    """Return the context of both templates."""
    wrappers = plan.spec.wrappers
    assert plan.layout is not None  # the family has caches
    return {
        **common(plan, "d_qk", "dtype"),
        "layout": plan.layout,
        "d_c": plan.spec.model.kv_lora_rank,
        "rope": _rope(plan),
        "over_heads": any(name in wrappers for name in OVER_HEADS),
        "over_rope": OVER_ROPE in wrappers,
        "needs_e4m3": layout.needs_e4m3(plan.layout),
    }


def _kernels(plan: Plan, family: ProloguePlan) -> dict[str, Any]:
    """Context of the kernels' template."""
    of_layout = layout.context(plan, family.caches, family.caches.main)
    return {
        **_shared(plan),
        **{name: getattr(of_layout, name) for name in ("unit_name", "element", "args", "pads")},
        "stored": _row(plan, family.caches.main.layout, of_layout.stored),
        "latent": [_latent(chunk) for chunk in family.latent],
    }


def _wrappers(plan: Plan, family: ProloguePlan) -> dict[str, Any]:
    """Context of the wrappers' template."""
    return {
        **_shared(plan),
        **vars(cache_argument.context(plan, family.caches, family.caches.main)),
        "inserts": INSERT in plan.spec.wrappers,
        "inserts_padded": INSERT_PADDED in plan.spec.wrappers,
        "torch_dtype": TORCH_DTYPES[plan.spec.model.dtype],
    }


def shared(plan: Plan, family: ProloguePlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    kernels = generated(f"_{MODULE}_kernels", _kernels(plan, family))
    return [*layout.files(plan, family.caches), tiles.file(plan), kernels]


def modules(plan: Plan, family: ProloguePlan) -> list[Module]:
    """The module of the family's wrappers."""
    names = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
    return [Module(generated(MODULE, _wrappers(plan, family)), names)]
