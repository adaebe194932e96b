"""The compressor: states of tokens, and rows of windows of them in attention's cache or the indexer's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mlagen.backends.parts import cache_argument, indexer_layout, layout, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.common import TORCH_DTYPES, alignment_of
from mlagen.backends.parts.layout_module import LayoutModule, StoredColumns
from mlagen.layout import CacheLayout
from mlagen.plan import CompressorPlan, Plan
from mlagen.plan.families.compressor import COMPRESS, SAVE

MODULE, KEYS_MODULE = "compressor", "indexer_compressor"
FP32_BYTES = 4


@dataclass(frozen=True)
class Side:
    """A cache that compressed rows go to.

    Attributes:
        layout: bytes of a row.
        module: module of its wrappers.
        layout_module: module of its layout.
        of_layout: the layout's context.
        rope_start, rope: the first column that RoPE rotates, and how many.
    """

    layout: CacheLayout
    module: str
    layout_module: str
    of_layout: LayoutModule
    rope_start: int
    rope: int

    @property
    def is_main(self) -> bool:
        """Whether it is attention's cache, whose module has all wrappers."""
        return self.module == MODULE


def _sides(plan: Plan, family: CompressorPlan) -> list[Side]:
    """Return the caches that compressed rows go to, attention's first."""
    dims, caches, cache = plan.spec.model, family.caches, family.cache
    layout_module = layout.EXTRA_MODULE if caches.other else layout.MODULE
    of_layout = layout.context(plan, caches, cache)
    start, rope = dims.kv_lora_rank, dims.qk_rope_head_dim
    found = [Side(cache.layout, MODULE, layout_module, of_layout, start, rope)]
    keys = family.keys
    if keys is not None and COMPRESS in plan.spec.wrappers:
        of_keys, rope = indexer_layout.keys_context(plan, keys), keys.indexer.rope_head_dim
        module = indexer_layout.KEYS_MODULE
        found.append(Side(keys.layout, KEYS_MODULE, module, of_keys, keys.rope_start, rope))
    return found


def _block(side: Side, chunk: StoredColumns) -> dict[str, Any]:
    """Return a block of a row's columns as the kernel computes it."""
    first, end = side.rope_start, side.rope_start + side.rope
    block = f"tl.arange(0, {chunk.block})"
    return {
        **vars(chunk),
        "columns_text": f"{chunk.start} + {block}" if chunk.start else block,
        "alignment": alignment_of(chunk.start),
        "there": f"there[:, None] & (columns < {chunk.end})[None, :]" if chunk.masked else "there[:, None]",
        "inside": f"columns < {chunk.end}" if chunk.masked else "",
        "turns": chunk.start < end and first < chunk.end,
        "first_pair": (chunk.start - first) // 2,
    }


def _stored(side: Side) -> list[dict[str, Any]]:
    """Return the blocks of a row as the layout stores them."""
    return [{**_block(side, one), "store": layout.store_text(side.layout, one.name)} for one in side.of_layout.stored]


def _whole(side: Side) -> dict[str, Any] | None:
    """Return one block of all columns, if the first stored one has room for them and the others are parts of it."""
    stored, columns = side.of_layout.stored, side.layout.columns
    first = stored[0]
    fits = len(stored) > 1 and columns <= first.block and not any(one.start % one.block for one in stored)
    return _block(side, replace(first, name="row", end=columns, masked=columns < first.block)) if fits else None


def _shared(plan: Plan, side: Side) -> dict[str, Any]:
    """Return the context of both templates."""
    wrappers = plan.spec.wrappers
    return {
        "dtype": plan.spec.model.dtype,
        "layout": side.layout,
        "layout_module": side.layout_module,
        "columns": side.layout.columns,
        "rope": side.rope,
        "is_main": side.is_main,
        "saves": SAVE in wrappers and side.is_main,
        "compresses": COMPRESS in wrappers,
        "needs_e4m3": layout.needs_e4m3(side.layout),
    }


def _kernels(plan: Plan, side: Side) -> dict[str, Any]:
    """Context of the kernels' template."""
    stored = _stored(side)
    whole = _whole(side)
    return {
        **_shared(plan, side),
        **{name: getattr(side.of_layout, name) for name in ("unit_name", "element", "args", "pads")},
        "stored": stored,
        "whole": whole,
        "blocks": [whole] if whole else stored,
        "turns": any(chunk["turns"] for chunk in stored),
    }


def _wrappers(plan: Plan, side: Side, keys: Side | None) -> dict[str, Any]:
    """Context of the wrappers' template."""
    return {
        **_shared(plan, side),
        **vars(cache_argument.described(plan, side.layout, side.of_layout)),
        "rope_start": side.rope_start,
        "torch_dtype": TORCH_DTYPES[plan.spec.model.dtype],
        "keys_module": keys and keys.module,
        "keys_columns": keys and keys.layout.columns,
        "packed": side.layout.data[0].dtype == "e2m1" and not side.is_main,
        "halves_aligned": side.layout.columns * FP32_BYTES % 16 == 0,
    }


def shared(plan: Plan, family: CompressorPlan) -> list[GeneratedFile]:
    """Files that the family's modules import."""
    found = [*layout.files(plan, family.caches), tiles.file(plan)]
    sides = _sides(plan, family)
    if len(sides) > 1 and family.keys is not None:
        found.append(indexer_layout.keys_file(plan, family.keys))
    return [*found, *(generated(f"_{one.module}_kernels", _kernels(plan, one), f"_{MODULE}_kernels") for one in sides)]


def modules(plan: Plan, family: CompressorPlan) -> list[Module]:
    """The modules of the wrappers; wrappers of the first call those of the one for the indexer's keys."""
    names = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
    sides = _sides(plan, family)
    return [
        Module(
            generated(one.module, _wrappers(plan, one, sides[1] if one.is_main and len(sides) > 1 else None), MODULE),
            names if one.is_main else (),
        )
        for one in sides
    ]
