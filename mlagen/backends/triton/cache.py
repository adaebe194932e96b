"""The writers and the gathers of a cache, and their wrappers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.triton import layout
from mlagen.backends.triton.common import (
    FULL_ALIGNMENT,
    TORCH_DTYPES,
    Signature,
    alignment_of,
    common,
)
from mlagen.layout import CacheLayout, PadField, ScalesField
from mlagen.plan import CachePlan, Plan, StoredCache

MODULE, EXTRA_MODULE = "cache", "extra_cache"
CONCAT, INSERT = "concat_and_cache_mla", "quantize_and_insert_k_cache"
GATHER_REQUESTS, GATHER_TOKENS = "dequantize_and_gather_k_cache", "gather_and_maybe_dequant_cache"

# What vLLM's kv_cache_dtype says of a layout, beside the layout's own name.
KV_CACHE_DTYPES = {"fp8_per_tensor": ("fp8", "fp8_e4m3")}


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the caches of a spec, with kernels of its own.

    Attributes:
        cache: the cache.
        layout_module: generated module that knows its bytes.
        which: what docs call it.
    """

    cache: StoredCache
    layout_module: str
    which: str

    @property
    def layout(self) -> CacheLayout:
        """Bytes of a token."""
        return self.cache.layout


def _signatures(plan: Plan, side: Side) -> dict[str, Signature]:
    """Run-time arguments of each kernel and their Triton types, with every optional tensor given."""
    element = f"*{plan.spec.model.dtype}"
    stored = "*u8" if side.layout.quantised else element
    rope = plan.spec.model.qk_rope_head_dim > 0
    scale = (("scale_ptr", "*fp32"),) if side.layout.tensor_scale else ()
    row = () if side.layout.planar else (("row_stride", "i64"),)
    divider = (("block_size", "i32"), ("multiplier", "i32"), ("shift", "i32"))
    pages = (("num_pages", "i32"), ("num_columns", "i32"), *divider)
    return {
        "write": (
            ("kv_c_ptr", element),
            *((("k_pe_ptr", element),) if rope else ()),
            ("cache_ptr", stored),
            ("slot_mapping_ptr", "*i64"),
            *scale,
            ("num_tokens", "i32"),
            ("num_slots", "i32"),
            *divider,
            ("kv_c_stride", "i64"),
            *((("k_pe_stride", "i64"),) if rope else ()),
            ("page_stride", "i64"),
            *row,
        ),
        "gather_requests": (
            ("out_ptr", element),
            ("cache_ptr", stored),
            ("seq_lens_ptr", "*i32"),
            ("gather_lens_ptr", "*i32"),
            ("block_table_ptr", "*i32"),
            *scale,
            ("max_tokens", "i32"),
            ("programs", "i32"),
            ("programs_multiplier", "i32"),
            ("programs_shift", "i32"),
            *pages,
            ("out_request_stride", "i64"),
            ("out_token_stride", "i64"),
            ("block_table_stride", "i64"),
            ("page_stride", "i64"),
            *row,
        ),
        "gather_tokens": (
            ("dst_ptr", element),
            ("cache_ptr", stored),
            ("block_table_ptr", "*i32"),
            ("cu_seq_lens_ptr", "*i32"),
            ("token_to_seq_ptr", "*i32"),
            ("seq_starts_ptr", "*i32"),
            *scale,
            ("num_tokens", "i32"),
            ("num_requests", "i32"),
            ("programs", "i32"),
            *pages,
            ("dst_stride", "i64"),
            ("block_table_stride", "i64"),
            ("page_stride", "i64"),
            *row,
        ),
    }


def _stored(plan: Plan, one: CacheLayout, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks in which a row is written, each with the argument that holds its lanes."""
    d_c, rope = plan.spec.model.kv_lora_rank, plan.spec.model.qk_rope_head_dim
    found = []
    for chunk in chunks:
        both = chunk["start"] < d_c < chunk["end"]
        behind = d_c if rope and chunk["start"] >= d_c else 0
        start = chunk["start"] - behind
        found.append(
            {
                **chunk,
                "source": "k_pe" if behind else "kv_c",
                "both": both,
                "source_lanes": f"{start} + tl.arange(0, {chunk['block']})"
                if start
                else f"tl.arange(0, {chunk['block']})",
                "source_end": chunk["end"] - behind,
                "source_alignment": alignment_of(math.gcd(start, d_c if both else 0)),
                "store": layout.store_text(one, chunk["name"]),
            }
        )
    return found


def _loaded(one: CacheLayout, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks in which a row is gathered: a thread loads no more lanes at once than it can store at once."""
    found = []
    for chunk in chunks:
        most = layout.THREAD_LANES * chunk["bits"] // 8
        claim = "ALIGNMENT" if most == FULL_ALIGNMENT else f"{most} if ALIGNMENT == {FULL_ALIGNMENT} else 1"
        text = layout.load_text(one, alignment=claim)
        found.append({**chunk, "load": text, "row_alignment": alignment_of(chunk["start"])})
    return found


def _texts(strings: tuple[str, ...], name: str) -> str:
    """Strings and the name of one more as the entries of a tuple."""
    return ", ".join([*(f'"{string}"' for string in strings), name]) + ("" if strings else ",")


def _what(wrappers: set[str]) -> str:
    """What the module holds, for its docstring."""
    parts = [
        ("writers" if {CONCAT, INSERT} <= wrappers else "writer", {CONCAT, INSERT}),
        ("gathers" if {GATHER_REQUESTS, GATHER_TOKENS} <= wrappers else "gather", {GATHER_REQUESTS, GATHER_TOKENS}),
    ]
    return " and ".join(text for text, any_of in parts if any_of & wrappers)


def _field_alignment(side: Side) -> int:
    """Bytes of the widest value of a row."""
    unit = layout.unit_of(side.layout)
    return max(1 if isinstance(field, PadField) else field.itemsize for field in side.layout.fields) // unit


def _cache_doc(plan: Plan, side: Side) -> str:
    """The cache argument, for docstrings."""
    if not side.layout.quantised:
        row = side.layout.row_bytes // layout.unit_of(side.layout)
        return f"{plan.spec.model.dtype} [pages, block_size, {row}], any block_size, any page and row stride."
    strides = "rows end to end, any page stride" if side.layout.planar else "any page and row stride"
    return f"8-bit [pages, block_size, {side.layout.row_bytes}], any block_size, {strides}."


def _context(plan: Plan, family: CachePlan, side: Side) -> dict[str, Any]:
    """What the template asks for, of one of the spec's caches."""
    cached, unit = side.layout, layout.unit_of(side.layout)
    wrappers, torch_dtype = set[str](plan.spec.wrappers), TORCH_DTYPES[plan.spec.model.dtype]
    of_layout = layout.context(plan, family.caches, side.cache)
    fnuz = any(field.dtype == "e4m3fnuz" for field in cached.data)
    bytes_dtypes = ("uint8", "int8", "float8_e4m3fnuz" if fnuz else "float8_e4m3fn")
    dtypes = bytes_dtypes if cached.quantised else (torch_dtype,)
    names = (*(KV_CACHE_DTYPES.get(cached.name, ()) if cached.quantised else ("auto", torch_dtype)), cached.name)
    strides = "cache.page_stride" if cached.planar else "(cache.page_stride | cache.row_stride)"
    return {
        **common(plan),
        "layout": cached,
        "layout_module": side.layout_module,
        "what": _what(wrappers),
        "which": side.which,
        "concats": CONCAT in wrappers,
        "inserts": INSERT in wrappers,
        "gathers_requests": GATHER_REQUESTS in wrappers,
        "gathers_tokens": GATHER_TOKENS in wrappers,
        "d_c": plan.spec.model.kv_lora_rank,
        "rope": plan.spec.model.qk_rope_head_dim,
        "itemsize": 2,
        "row": cached.row_bytes // unit,
        "unit_name": of_layout["unit_name"],
        "page_multiple": math.lcm(cached.page_multiple, unit) // unit,
        "field_alignment": _field_alignment(side),
        "late": max(1, _field_alignment(side)),
        "cache_dtypes": ", ".join(f"torch.{name}" for name in dtypes) + ("," if len(dtypes) == 1 else ""),
        "cache_strides": strides if unit == 1 else f"{unit} * {strides}",
        "kv_cache_dtypes": _texts(names[:-1], "LAYOUT"),
        "kv_cache_dtypes_doc": " or ".join(f'"{name}"' for name in names),
        "default_kv_cache_dtype": f'"{names[0]}"',
        "cache_doc": _cache_doc(plan, side),
        "block_size": side.cache.block_size or 64,
        "is_ue8m0": any(isinstance(field, ScalesField) and field.dtype == "ue8m0" for field in cached.fields),
        "needs_e4m3": layout.needs_e4m3(cached),
        "args": layout.arguments(cached),
        "stored": _stored(plan, cached, of_layout["stored"]),
        "loaded": _loaded(cached, of_layout["loaded"]),
        "pads": of_layout["pads"],
        "cache": family,
        "arguments": {kernel: len(signature) for kernel, signature in _signatures(plan, side).items()},
    }


def shared(plan: Plan, family: CachePlan) -> list[GeneratedFile]:
    """What the family's modules import."""
    return layout.files(plan, family.caches)


def modules(plan: Plan, family: CachePlan) -> list[Module]:
    """The module of the cache's kernels, and that of the second one's, whose wrappers have the same names."""
    side = Side(family.caches.main, layout.MODULE, "the cache")
    wrappers = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
    found = [Module(generated(MODULE, _context(plan, family, side)), wrappers)]
    if family.caches.other:
        side = Side(family.caches.other, layout.EXTRA_MODULE, "the second cache")
        found.append(Module(generated(EXTRA_MODULE, _context(plan, family, side), MODULE), ()))
    return found
