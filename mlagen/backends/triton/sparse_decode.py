"""Sparse attention over a paged cache of any layout: single-pass and split-KV kernels, and FlashMLA's wrapper."""

from __future__ import annotations

from typing import Any

from mlagen.backends import sm90
from mlagen.backends.triton import extra_layout, layout, splits
from mlagen.backends.triton.common import Signature, chunk_of, imported, tables
from mlagen.backends.triton.splits import accumulators, attention_context, given, presences
from mlagen.layout import CacheLayout
from mlagen.plan import Plan, SparseDecodePlan, needed

MODULE = "sparse_decode"
SHARED = (layout, extra_layout, splits, sm90.SPARSE_DECODE)
WRAPPERS = ("flash_mla_with_kvcache",)


def present(plan: Plan) -> bool:
    """Whether attention over the cache is sparse; another family has the dense one."""
    return plan.sparse_decode is not None


def _caches(plan: Plan) -> list[tuple[str, CacheLayout]]:
    """(prefix of argument names, layout) of each cache."""
    extra = [] if plan.extra_layout is None else [("extra_", plan.extra_layout)]
    return [("", needed(plan.layout)), *extra]


def _signatures(plan: Plan) -> dict[str, Signature]:
    """Run-time arguments and their Triton types of the attention kernels, with every optional tensor given."""
    attention = plan.sparse_attention
    element = f"*{plan.spec.model.dtype}"
    inputs: list[tuple[str, str]] = [("q_ptr", element)]
    sizes: list[tuple[str, str]] = []
    strides = [("q_request_stride", "i64"), ("q_token_stride", "i64"), ("q_head_stride", "i64")]
    for prefix, one in _caches(plan):
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
    there = (True, True, presences(plan)[1] != "none", one.tensor_scale)
    return ", ".join(name for name, given in zip(names, there, strict=True) if given)


def cache_context(plan: Plan, prefix: str, one: CacheLayout) -> dict[str, Any]:
    """A layout as the templates of attention over a cache ask for it."""
    row = one.row_bytes if one.quantised else one.lanes
    alignment = max(field.itemsize for field in one.fields)
    dtype = "uint8, int8 or float8_e4m3fn" if one.quantised else plan.spec.model.dtype
    strides = "any page and row stride"
    if one.planar:
        strides = f"rows end to end; a page's bytes are rounded up to a multiple of {one.page_multiple}"
    shared = plan.extra_layout is not None and not extra_layout.present(plan)  # one kernel reads both caches
    return {
        "prefix": prefix,
        "layout": one,
        "helper": f"_attend_{prefix}cache",
        "module": "_extra_layout" if prefix else "_layout",
        "tokens": "the second cache" if prefix else "either cache" if shared else "the cache",
        "lists": ["", "extra_"] if shared else [""],
        "needs_e4m3": layout.needs_e4m3(one),
        **layout.arguments(one, scale="scale" if shared else "tensor_scale"),
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


def rows_context(plan: SparseDecodePlan) -> dict[str, Any]:
    """The blocks of a row as the templates of attention over a cache ask for them."""
    chunks, v_chunks = [chunk_of(chunk) for chunk in plan.chunks], accumulators(plan.chunks)
    joined = None
    constants = [f"{kind}_{chunk['name'].upper()}" for chunk in chunks for kind in ("D", "START")]
    constants += [f"LANES_{chunk['name'].upper()}" for chunk in chunks if chunk["masked"]]
    if plan.joined:
        first, last = (chunk.name for chunk in plan.loaded)
        joined = {"name": chunks[0]["name"], "first": first, "last": last}
        constants = [f"{kind}_{last.upper()}" for kind in ("D", "START")]
    return {
        "loaded": plan.loaded,
        "joined": joined,
        "chunks": chunks,
        "v_chunks": v_chunks,
        "acc_text": "the accumulator" if len(v_chunks) == 1 else "the accumulators",
        "accs": ", ".join(chunk["acc"] for chunk in v_chunks),
        "chunk_names": imported("_layout", sorted(constants)),
    }


def context(plan: Plan) -> dict[str, Any]:
    """What the template asks for."""
    assert plan.sparse_decode is not None
    attention, extra = plan.sparse_attention, plan.extra_layout
    operands = [{"prefix": prefix, "layout": one} for prefix, one in _caches(plan)]
    caches = [cache_context(plan, "", needed(plan.layout))]
    if extra is not None and extra_layout.present(plan):
        caches.append(cache_context(plan, "extra_", extra))
    both = extra is not None and len(caches) == 1
    lengths, sinks = given(attention.topk_length, "length"), given(attention.attn_sink, "sink")

    def warmed(prefix: str, one: CacheLayout, length: str) -> str:
        operand = _operand(plan, one, f"{prefix}k_cache", "indices", length, "scale")
        return f"_{prefix}operand({operand})"

    lists = [warmed("", needed(plan.layout), length) for length in lengths]
    if extra is not None:
        prefix = caches[-1]["prefix"]
        none = warmed("", extra, "None") if both else "NO_EXTRA"
        others = dict.fromkeys([none, *(warmed(prefix, extra, length) for length in lengths)])
        lists = [f"{one}, {other}" for one in lists for other in others]
    strides = 3 if extra is not None and extra.planar else 4
    checked = ["q", "k_cache", "indices", "topk_length", *(["k_scale"] if needed(plan.layout).tensor_scale else [])]
    if extra is not None:
        checked += ["extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"]
        checked += ["extra_k_scale"] if extra.tensor_scale else []
    checked += ["attn_sink", "out", "workspace"]
    return {
        **attention_context(plan),
        **rows_context(plan.sparse_decode),
        "sparse_decode": plan.sparse_decode,
        **tables(plan.sparse_decode),
        "sm90": plan.sparse_decode.sm90,
        "extra": extra,
        "caches": caches,
        "operands": operands,
        "modules": ["_extra_layout"] * (len(caches) - 1) + ["_launch", "_layout", "_splits"],
        "both": both,
        "main_first": "main_first" if extra else "first",
        "all_indices": "tl.cdiv(topk, BLOCK_N) * BLOCK_N + extra_topk" if extra else "topk",
        "has_tensor_scale": any(one.tensor_scale for _, one in _caches(plan)),
        "has_bytes": any(one.quantised for _, one in _caches(plan)),
        "main_operand": _operand(plan, needed(plan.layout), "k_cache", "indices", "topk_length", "k_scale"),
        "absent_operand": f"({_operand(plan, needed(extra), 'k_cache', 'indices', 'None', 'k_scale')})"
        if both
        else "NO_EXTRA[0]",
        "checked": checked,
        "extra_operand": extra
        and _operand(plan, extra, "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length", "extra_k_scale"),
        "no_extra": extra and f"{_nothing(plan, extra)}, (0, 0, 0), ({', '.join('0' * strides)})",
        "warms_length": "length" in lengths,
        "warms_sink": "sink" in sinks,
        "sinks": ", ".join(sinks) + ("," if len(sinks) == 1 else ""),
        "operand_lists": lists,
        "arguments": {kernel: len(signature) for kernel, signature in _signatures(plan).items()},
    }


def _nothing(plan: Plan, one: CacheLayout) -> str:
    """As many Nones as a list of indices has inputs."""
    return f"({_operand(plan, one, 'None', 'None', 'None', 'None')})"


def exports(wrappers: list[str]) -> list[str]:
    """Names that the package takes from the module, given the spec's wrappers that are its own."""
    return sorted([*wrappers, "FlashMLASchedMeta", "get_mla_metadata", "kvcache_workspace_size"])
