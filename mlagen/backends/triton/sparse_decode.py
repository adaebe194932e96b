"""Sparse attention over a paged cache of any layout: single-pass and split-KV kernels, and FlashMLA's wrapper."""

from __future__ import annotations

from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.triton import layout, splits
from mlagen.backends.triton.common import Signature, chunk_of, imported, tables
from mlagen.backends.triton.splits import accumulators, attention_context, given, presences
from mlagen.layout import CacheLayout
from mlagen.plan import CachedFamily, Caches, Plan, SparseDecodePlan, StoredCache

MODULE = "sparse_decode"


def _prefixed(caches: Caches) -> list[tuple[str, CacheLayout]]:
    """(prefix of argument names, layout) of each cache."""
    extra = [("extra_", caches.extra.layout)] if caches.extra else []
    return [("", caches.main.layout), *extra]


def _signatures(plan: Plan, caches: Caches) -> dict[str, Signature]:
    """Run-time arguments and their Triton types of the attention kernels, with every optional tensor given."""
    attention = plan.sparse_attention
    element = f"*{plan.spec.model.dtype}"
    inputs: list[tuple[str, str]] = [("q_ptr", element)]
    sizes: list[tuple[str, str]] = []
    strides = [("q_request_stride", "i64"), ("q_token_stride", "i64"), ("q_head_stride", "i64")]
    for prefix, one in _prefixed(caches):
        inputs += [(f"{prefix}k_cache_ptr", "*u8" if one.quantised else element), (f"{prefix}indices_ptr", "*i32")]
        inputs += [(f"{prefix}topk_length_ptr", "*i32")] if attention.topk_length != "none" else []
        inputs += [(f"{prefix}k_scale_ptr", "*fp32")] if one.tensor_scale else []
        sizes += [(f"{prefix}{name}", "i32") for name in ("num_slots", "page_size", "topk")]
        rows = () if one.planar else ("row_stride",)
        names = ("page_stride", *rows, "indices_request_stride", "indices_token_stride")
        strides += [(f"{prefix}{name}", "i64") for name in names]
    sizes += [("s_q", "i32"), ("num_heads", "i32")]
    sink = (("attn_sink_ptr", "*fp32"),) if attention.attn_sink != "none" else ()
    pieces = [(name, "i32") for name in ("first_token", "num_splits", "split_size", "num_rows")]
    scale = ("sm_scale_log2", "fp32")
    outputs = (("out_ptr", element), ("lse_ptr", "*fp32"))
    out_strides = (("out_token_stride", "i64"), ("out_head_stride", "i64"))
    partial = ("partial_ptr", "*fp32")
    return {
        "fwd": (*inputs, *sink, *outputs, *sizes, scale, *strides, *out_strides),
        "split": (*inputs, partial, *sizes, *pieces, scale, *strides),
    }


def _operand(plan: Plan, one: CacheLayout, *names: str) -> str:
    """What one list of indices is passed as: `names` of cache, indices, length and scale, as far as there are any."""
    there = (True, True, presences(plan).topk_length != "none", one.tensor_scale)
    return ", ".join(name for name, given in zip(names, there, strict=True) if given)


def cache_context(plan: Plan, caches: Caches, cache: StoredCache) -> dict[str, Any]:
    """A cache as the templates of attention over a cache ask for it."""
    one, prefix = cache.layout, "extra_" if cache is caches.other else ""
    shared = caches.extra is not None and caches.other is None  # one kernel reads both caches
    row = one.row_bytes if one.quantised else one.lanes
    alignment = max(field.itemsize for field in one.fields)
    dtype = "uint8, int8 or float8_e4m3fn" if one.quantised else plan.spec.model.dtype
    strides = "any page and row stride"
    if one.planar:
        strides = f"rows end to end; a page's bytes are rounded up to a multiple of {one.page_multiple}"
    return {
        "prefix": prefix,
        "layout": one,
        "helper": f"_attend_{prefix}cache",
        "module": layout.EXTRA_MODULE if prefix else layout.MODULE,
        "tokens": "the second cache" if prefix else "either cache" if shared else "the cache",
        "lists": ["", "extra_"] if shared else [""],
        "needs_e4m3": layout.needs_e4m3(one),
        **layout.arguments(one, scale="scale" if shared else "tensor_scale", constants="config."),
        "operand": _operand(plan, one, "cache", "indices", "length", "scale"),
        "row": row,
        "unit_name": "bytes" if one.quantised else "lanes",
        "torch_dtype": "torch.uint8" if one.quantised else "DTYPE",
        "alignment": alignment,
        "late": f"{alignment} * late" if one.quantised and alignment > 1 else "late",
        "page_bytes": f"-(-page_size * {row} // {one.page_multiple}) * {one.page_multiple}",
        "dtypes": dtype,
        "strides": strides,
    }


def rows_context(family: CachedFamily) -> dict[str, Any]:
    """The blocks of a row as the templates of attention over a cache ask for them."""
    chunks, v_chunks = [chunk_of(chunk) for chunk in family.chunks], accumulators(family.chunks)
    joined = None
    constants = [f"{kind}_{chunk['name'].upper()}" for chunk in chunks for kind in ("D", "START")]
    constants += [f"LANES_{chunk['name'].upper()}" for chunk in chunks if chunk["masked"]]
    if family.joined:
        first, last = (chunk.name for chunk in family.caches.chunks)
        joined = {"name": chunks[0]["name"], "first": first, "last": last}
        constants = [f"{kind}_{last.upper()}" for kind in ("D", "START")]
    return {
        "loaded": family.caches.chunks,
        "joined": joined,
        "chunks": chunks,
        "v_chunks": v_chunks,
        "acc_text": "the accumulator" if len(v_chunks) == 1 else "the accumulators",
        "accs": ", ".join(chunk["acc"] for chunk in v_chunks),
        "chunk_names": imported("_layout", sorted(constants)),
    }


def _context(plan: Plan, family: SparseDecodePlan) -> dict[str, Any]:
    """What the template asks for."""
    attention, main = plan.sparse_attention, family.caches.main.layout
    extra = family.caches.extra.layout if family.caches.extra else None
    operands = [{"prefix": prefix, "layout": one} for prefix, one in _prefixed(family.caches)]
    caches = [cache_context(plan, family.caches, family.caches.main)]
    if family.caches.other:
        caches.append(cache_context(plan, family.caches, family.caches.other))
    both = extra is not None and len(caches) == 1
    lengths, sinks = given(attention.topk_length, "length"), given(attention.attn_sink, "sink")

    def warmed(prefix: str, one: CacheLayout, length: str) -> str:
        operand = _operand(plan, one, f"{prefix}k_cache", "indices", length, "scale")
        return f"_{prefix}operand({operand})"

    lists = [warmed("", main, length) for length in lengths]
    if extra is not None:
        prefix = caches[-1]["prefix"]
        none = warmed("", extra, "None") if both else "NO_EXTRA"
        others = dict.fromkeys([none, *(warmed(prefix, extra, length) for length in lengths)])
        lists = [f"{one}, {other}" for one in lists for other in others]
    strides = 3 if extra is not None and extra.planar else 4
    checked = ["q", "k_cache", "indices", "topk_length", *(["k_scale"] if main.tensor_scale else [])]
    if extra is not None:
        checked += ["extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"]
        checked += ["extra_k_scale"] if extra.tensor_scale else []
    checked += ["attn_sink", "out", "workspace"]
    return {
        **attention_context(plan),
        **rows_context(family),
        "sparse_decode": family,
        **tables(family),
        "sm90": family.sm90,
        "extra": extra,
        "caches": caches,
        "needs_e4m3": any(cache["needs_e4m3"] for cache in caches),
        "operands": operands,
        "modules": [layout.EXTRA_MODULE] * (len(caches) - 1) + ["_launch", "_layout", "_splits"],
        "both": both,
        "main_first": "main_first" if extra else "first",
        "all_indices": "tl.cdiv(topk, BLOCK_N) * BLOCK_N + extra_topk" if extra else "topk",
        "has_tensor_scale": any(one.tensor_scale for _, one in _prefixed(family.caches)),
        "has_bytes": any(one.quantised for _, one in _prefixed(family.caches)),
        "main_operand": _operand(plan, main, "k_cache", "indices", "topk_length", "k_scale"),
        "absent_operand": f"({_operand(plan, extra, 'k_cache', 'indices', 'None', 'k_scale')})"
        if extra is not None and both
        else "NO_EXTRA[0]",
        "checked": checked,
        "extra_operand": extra
        and _operand(plan, extra, "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length", "extra_k_scale"),
        "no_extra": extra and f"{_nothing(plan, extra)}, (0, 0, 0), ({', '.join('0' * strides)})",
        "warms_length": "length" in lengths,
        "warms_sink": "sink" in sinks,
        "sinks": ", ".join(sinks) + ("," if len(sinks) == 1 else ""),
        "operand_lists": lists,
        "arguments": {kernel: len(signature) for kernel, signature in _signatures(plan, family.caches).items()},
    }


def _nothing(plan: Plan, one: CacheLayout) -> str:
    """As many Nones as a list of indices has inputs."""
    return f"({_operand(plan, one, 'None', 'None', 'None', 'None')})"


def shared(plan: Plan, family: SparseDecodePlan) -> list[GeneratedFile]:
    """What the family's module imports."""
    return [*layout.files(plan, family.caches), splits.file(plan)]


def modules(plan: Plan, family: SparseDecodePlan) -> list[Module]:
    """The family's module."""
    names = sorted([*family.WRAPPERS, "FlashMLASchedMeta", "get_mla_metadata", "kvcache_workspace_size"])
    return [Module(generated(MODULE, _context(plan, family)), names)]
