"""Writers and gathers of a cache, and their wrappers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mlagen.backends.parts import cache_argument, layout, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.common import FULL_ALIGNMENT, TORCH_DTYPES, alignment_of, common
from mlagen.backends.parts.layout_module import StoredColumns
from mlagen.layout import CacheLayout, ScalesField
from mlagen.layout.layout import BITS
from mlagen.plan import CachePlan, Chunk, Plan, StoredCache

MODULE, EXTRA_MODULE = "cache", "extra_cache"
CONCAT, INSERT = "concat_and_cache_mla", "quantize_and_insert_k_cache"
GATHER_REQUESTS, GATHER_TOKENS = "dequantize_and_gather_k_cache", "gather_and_maybe_dequant_cache"


@dataclasses.dataclass(frozen=True)
class Side:
    """One cache of a spec, with its own kernels.

    Attributes:
        cache: the cache.
        module: its generated module.
        layout_module: generated module of its layout.
        which: its name in docstrings.
    """

    cache: StoredCache
    module: str
    layout_module: str
    which: str

    @property
    def layout(self) -> CacheLayout:
        """Bytes of a token."""
        return self.cache.layout


def _stored(plan: Plan, one: CacheLayout, chunks: Sequence[StoredColumns]) -> list[dict[str, Any]]:
    """Return a row's blocks, as they are written, each with the argument of its columns."""
    d_c, rope = plan.spec.model.kv_lora_rank, plan.spec.model.qk_rope_head_dim
    found = []
    for chunk in chunks:
        both = chunk.start < d_c < chunk.end
        behind = d_c if rope and chunk.start >= d_c else 0
        start = chunk.start - behind
        found.append(
            {
                **vars(chunk),
                "source": "k_pe" if behind else "kv_c",
                "both": both,
                "source_columns": f"{start} + tl.arange(0, {chunk.block})" if start else f"tl.arange(0, {chunk.block})",
                "source_end": chunk.end - behind,
                "source_alignment": alignment_of(math.gcd(start, d_c if both else 0)),
                "store": layout.store_text(one, chunk.name),
            }
        )
    return found


def _loaded(one: CacheLayout, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
    """Return the blocks of a row's gather. A thread loads at most as many columns as it can store at once."""
    found = []
    for chunk in chunks:
        most = layout.THREAD_COLUMNS * BITS[layout.field_of(one, chunk).dtype] // 8
        claim = "ALIGNMENT" if most == FULL_ALIGNMENT else f"{most} if ALIGNMENT == {FULL_ALIGNMENT} else 1"
        text = layout.load_text(one, alignment=claim)
        end = chunk.start + chunk.columns
        found.append(
            {
                **vars(chunk),
                "end": end,
                "masked": chunk.masked,
                "load": text,
                "row_alignment": alignment_of(chunk.start),
            }
        )
    return found


def _what(wrappers: set[str]) -> str:
    """Return the module's content, for its docstring."""
    parts = [
        ("writers" if {CONCAT, INSERT} <= wrappers else "writer", {CONCAT, INSERT}),
        ("gathers" if {GATHER_REQUESTS, GATHER_TOKENS} <= wrappers else "gather", {GATHER_REQUESTS, GATHER_TOKENS}),
    ]
    return " and ".join(text for text, any_of in parts if any_of & wrappers)


def _shared(plan: Plan, side: Side) -> dict[str, Any]:
    """Return the context of both templates for one of the spec's caches."""
    wrappers = set[str](plan.spec.wrappers)
    return {
        **common(plan, "d_qk", "dtype"),
        "layout": side.layout,
        "layout_module": side.layout_module,
        "which": side.which,
        "concats": CONCAT in wrappers,
        "inserts": INSERT in wrappers,
        "gathers_requests": GATHER_REQUESTS in wrappers,
        "gathers_tokens": GATHER_TOKENS in wrappers,
        "d_c": plan.spec.model.kv_lora_rank,
        "rope": plan.spec.model.qk_rope_head_dim,
        "needs_e4m3": layout.needs_e4m3(side.layout),
    }


def _kernels(plan: Plan, family: CachePlan, side: Side) -> dict[str, Any]:
    """Context of the kernels' template."""
    cached, of_layout = side.layout, layout.context(plan, family.caches, side.cache)
    return {
        **_shared(plan, side),
        "unit_name": of_layout.unit_name,
        "module": side.module,
        "args": layout.arguments(cached),
        "stored": _stored(plan, cached, of_layout.stored),
        "loaded": _loaded(cached, family.caches.chunks),
        "pads": of_layout.pads,
        "cache": family,
    }


def _wrappers(plan: Plan, family: CachePlan, side: Side) -> dict[str, Any]:
    """Context of the wrappers' template."""
    cached = side.layout
    return {
        **_shared(plan, side),
        **cache_argument.context(plan, family.caches, side.cache),
        "torch_dtype": TORCH_DTYPES[plan.spec.model.dtype],
        "what": _what(set(plan.spec.wrappers)),
        "is_fnuz": any(field.dtype == "e4m3fnuz" for field in cached.data),
        "is_ue8m0": any(isinstance(field, ScalesField) and field.dtype == "ue8m0" for field in cached.fields),
    }


def _sides(family: CachePlan) -> list[Side]:
    """Return the caches of a plan."""
    sides = [Side(family.caches.main, MODULE, layout.MODULE, "the cache")]
    if family.caches.other:
        sides.append(Side(family.caches.other, EXTRA_MODULE, layout.EXTRA_MODULE, "the second cache"))
    return sides


def shared(plan: Plan, family: CachePlan) -> list[GeneratedFile]:
    """Files that the family's modules import."""
    kernels = [
        generated(f"_{side.module}_kernels", _kernels(plan, family, side), f"_{MODULE}_kernels")
        for side in _sides(family)
    ]
    return [*layout.files(plan, family.caches), tiles.file(plan), *kernels]


def modules(plan: Plan, family: CachePlan) -> list[Module]:
    """Return the modules of the wrappers of the first and the second cache. Their wrappers have the same names."""
    wrappers = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
    return [
        Module(generated(side.module, _wrappers(plan, family, side), MODULE), wrappers if side.module == MODULE else ())
        for side in _sides(family)
    ]
