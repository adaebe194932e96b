"""The portable Triton back end: single-pass, split-KV and merge kernels, the cache writer, and their wrappers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from mlagen.backends.base import GeneratedFile
from mlagen.plan import Chunk, CompileJob, Plan, TileRow, layout_fingerprint
from mlagen.plan.work import ITEMSIZE
from mlagen.spec import spec_digest

TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
SPARSE_WRAPPERS = ("triton_mla_sparse_attention", "flash_mla_sparse_fwd")
CACHE_WRAPPERS = ("concat_and_cache_mla",)
FULL_ALIGNMENT = 16
INDEX_GROUP = 16

Signature = tuple[tuple[str, str], ...]


def _common(plan: Plan) -> dict[str, Any]:
    spec = plan.spec
    return {
        "title": spec.title,
        "wrappers": spec.wrappers,
        "targets": spec.targets,
        "layout": plan.layout,
        "d_qk": plan.d_qk,
        "d_v": plan.d_v,
        "dtype": spec.model.dtype,
        "torch_dtype": TORCH_DTYPES[spec.model.dtype],
    }


def _alignment(lane: int) -> str:
    """What may be claimed of addresses that begin `lane` lanes into an aligned row: ALIGNMENT, or nothing."""
    return "ALIGNMENT" if lane * ITEMSIZE % FULL_ALIGNMENT == 0 else "1"


def _chunk(chunk: Chunk) -> dict[str, Any]:
    """A chunk as templates ask for it."""
    return {**dataclasses.asdict(chunk), "masked": chunk.masked, "alignment": _alignment(chunk.start)}


def _accumulators(plan: Plan) -> list[dict[str, Any]]:
    """The chunks of V, each with the name of its accumulator."""
    chunks = [_chunk(chunk) for chunk in plan.sparse.chunks if chunk.in_v]
    names = ["acc"] if len(chunks) == 1 else [f"acc_{number}" for number in range(len(chunks))]
    return [{**chunk, "acc": acc} for chunk, acc in zip(chunks, names, strict=True)]


def _optional_arguments(plan: Plan) -> list[str]:
    """What the wrappers can pass for topk_length, attn_sink, max_logits and lse, as text of a tuple each."""
    attention, wrappers = plan.spec.attention, plan.spec.wrappers
    given = {"none": ["None"], "optional": ["None", "length"], "required": ["length"]}
    lengths = given[attention.topk_length]
    sinks = [name.replace("length", "sink") for name in given[attention.attn_sink]]
    found = []
    if "triton_mla_sparse_attention" in wrappers:
        found += [f"{lengths[0]}, {sinks[0]}, None, {lse}" for lse in ("None", "stats")]
    if "flash_mla_sparse_fwd" in wrappers:
        found += [f"{length}, {sink}, stats, stats" for length in lengths for sink in sinks]
    return found


def _sparse_signatures(plan: Plan) -> dict[str, Signature]:
    """Run-time arguments and their Triton types of the attention kernels, with every optional tensor given."""
    attention = plan.spec.attention
    element = f"*{plan.spec.model.dtype}"
    length = (("topk_length_ptr", "*i32"),) if attention.topk_length != "none" else ()
    sink = (("attn_sink_ptr", "*fp32"),) if attention.attn_sink != "none" else ()
    page = (("kv_page_stride", "i64"),) if plan.spec.cache.block_size is not None else ()
    inputs = (("q_ptr", element), ("kv_ptr", element), ("indices_ptr", "*i32"), *length)
    partials = (("partial_ptr", "*fp32"),)
    outputs = (("out_ptr", element), ("max_logits_ptr", "*fp32"), ("lse_ptr", "*fp32"))
    sizes = (("s_kv", "i32"), ("topk", "i32"), ("num_heads", "i32"))
    num_splits, num_rows = ("num_splits", "i32"), ("num_rows", "i32")
    scale = (("sm_scale_log2", "fp32"),)
    q_strides = (("q_token_stride", "i64"), ("q_head_stride", "i64"))
    in_strides = (*q_strides, *page, ("kv_row_stride", "i64"), ("indices_token_stride", "i64"))
    out_strides = (("out_token_stride", "i64"), ("out_head_stride", "i64"))
    return {
        "fwd": (*inputs, *sink, *outputs, *sizes, *scale, *in_strides, *out_strides),
        "split": (*inputs, *partials, *sizes, num_splits, ("split_size", "i32"), num_rows, *scale, *in_strides),
        "merge": (*partials, *sink, *outputs, ("num_heads", "i32"), num_splits, num_rows, *out_strides),
    }


def _cache_signature(plan: Plan) -> Signature:
    element = f"*{plan.spec.model.dtype}"
    rope = plan.spec.model.qk_rope_head_dim > 0
    return (
        ("kv_c_ptr", element),
        *((("k_pe_ptr", element),) if rope else ()),
        ("kv_cache_ptr", element),
        ("slot_mapping_ptr", "*i64"),
        ("num_tokens", "i32"),
        ("num_slots", "i64"),
        ("block_size", "i32"),
        ("kv_c_stride", "i64"),
        *((("k_pe_stride", "i64"),) if rope else ()),
        ("page_stride", "i64"),
        ("row_stride", "i64"),
    )


def _sparse_context(plan: Plan) -> dict[str, Any]:
    attention, sparse = plan.spec.attention, plan.sparse
    base_e = attention.lse_base == "e"
    paged = plan.spec.cache.block_size is not None
    optional = _optional_arguments(plan)
    return {
        **_common(plan),
        "chunks": [_chunk(chunk) for chunk in sparse.chunks],
        "v_chunks": _accumulators(plan),
        "optional": optional,
        "warms_length": any("length" in one for one in optional),
        "warms_sink": any("sink" in one for one in optional),
        "sparse": sparse,
        "tiles": sparse.tiles,
        "paged": paged,
        "has_rope": plan.spec.model.qk_rope_head_dim > 0,
        "kv_shape": f"[pages, {plan.layout.block_size}, {plan.d_qk}]" if paged else f"[s_kv, 1, {plan.d_qk}]",
        "page_rows": plan.layout.block_size if paged else 1,
        "has_sink": attention.attn_sink != "none",
        "sink_required": attention.attn_sink == "required",
        "has_topk_length": attention.topk_length != "none",
        "length_required": attention.topk_length == "required",
        "lse_base": attention.lse_base,
        "to_base": " * LN2" if base_e else "",
        "lse_text": "(m + tl.log2(l)) * LN2" if base_e else "m + tl.log2(l)",
        "empty_row_lse": attention.empty_row_lse.lstrip("+"),
        "merge": sparse.merge,
        "arguments": {kernel: len(signature) for kernel, signature in _sparse_signatures(plan).items()},
    }


def _cache_context(plan: Plan) -> dict[str, Any]:
    fields = {field.name: field for field in plan.layout.fields}
    sources = {"nope": ("kv_c", fields["latent"]), "rope": ("k_pe", fields.get("rope"))}
    chunks = []
    for chunk in plan.cache.chunks:
        source, field = sources[chunk.name.split("_")[0]]
        start = chunk.start - (field.first_lane if field else 0)
        chunks.append({**_chunk(chunk), "source": source, "source_start": start, "source_alignment": _alignment(start)})
    return {
        **_common(plan),
        "chunks": chunks,
        "latent": fields["latent"],
        "rope": fields.get("rope"),
        "cache": plan.cache,
        "arguments": len(_cache_signature(plan)),
    }


def _modules(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """(module, names it exports) of the package."""
    wanted: set[str] = set(plan.spec.wrappers)
    cache = [name for name in CACHE_WRAPPERS if name in wanted]
    sparse = [name for name in SPARSE_WRAPPERS if name in wanted]
    if cache:
        yield "cache", cache
    if sparse:
        yield "sparse_attention", sorted([*sparse, "workspace_size"])


def files(plan: Plan) -> list[GeneratedFile]:
    """The files of the package, in the order they are written: what is imported comes before what imports it."""
    modules = list(_modules(plan))
    contexts = {"cache": _cache_context, "sparse_attention": _sparse_context}
    spec = {
        "spec": plan.spec.model_dump(mode="json"),
        "spec_sha256": spec_digest(plan.spec),
        "layout": plan.layout.name,
        "layout_fingerprint": layout_fingerprint(plan.layout),
        "row_bytes": plan.layout.row_bytes,
    }
    exported = sorted(["SPEC", "warmup", *(name for _, names in modules for name in names)])
    package = {**_common(plan), "modules": modules, "exported": exported, "spec_literal": _literal(spec)}
    return [
        GeneratedFile("_launch.py", "_launch.py.jinja", _common(plan)),
        *(GeneratedFile(f"{name}.py", f"{name}.py.jinja", contexts[name](plan)) for name, _ in modules),
        GeneratedFile("__init__.py", "__init__.py.jinja", package),
    ]


def _literal(value: Any, indent: int = 0) -> str:
    """A Python literal in the house's format: one line where it fits, else one entry a line with a trailing comma."""
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {_literal(item, indent + 4)}" for key, item in value.items()]
        brackets = "{}"
    elif isinstance(value, list):
        entries = [_literal(item, indent + 4) for item in value]
        brackets = "[]"
    else:
        return json.dumps(value) if isinstance(value, str) else repr(value)
    inner = "".join(f"{' ' * (indent + 4)}{entry},\n" for entry in entries)
    return f"{brackets[0]}\n{inner}{' ' * indent}{brackets[1]}" if entries else brackets


def _merge_job(plan: Plan, target: str, alignment: int) -> CompileJob:
    merge = plan.sparse.merge
    return CompileJob(
        module="sparse_attention",
        kernel="_merge_splits_kernel",
        variant=f"{merge.block_s}x{merge.block_d}{'' if alignment == FULL_ALIGNMENT else ' odd rows'}",
        target=target,
        signature=_sparse_signatures(plan)["merge"],
        constexprs=(
            ("ALIGNMENT", alignment),
            ("D_BLOCKS", merge.d_blocks),
            ("BLOCK_S", merge.block_s),
            ("BLOCK_D", merge.block_d),
        ),
        num_warps=merge.num_warps,
        num_stages=1,
        expected_shared=merge.expected_shared,
    )


def _sparse_jobs(plan: Plan, target: str, rows: tuple[TileRow, ...], unaligned: TileRow) -> Iterator[CompileJob]:
    signatures = _sparse_signatures(plan)
    variants = [(row, FULL_ALIGNMENT, INDEX_GROUP, "") for row in {row.tile: row for row in rows}.values()]
    variants += [
        (unaligned, FULL_ALIGNMENT, 1, " odd topk"),
        (unaligned, 1, INDEX_GROUP, " odd rows"),
        (unaligned, 1, 1, " odd rows and topk"),
    ]
    for row, alignment, group, suffix in variants:
        tile = row.tile
        for kernel in ("fwd", "split"):
            yield CompileJob(
                module="sparse_attention",
                kernel=f"_sparse_{kernel}_kernel",
                variant=f"{tile.block_h}x{tile.block_n}{' ahead' if tile.indices_ahead else ''}{suffix}",
                target=target,
                signature=signatures[kernel],
                constexprs=(
                    ("ALIGNMENT", alignment),
                    ("INDEX_GROUP", group),
                    ("BLOCK_H", tile.block_h),
                    ("BLOCK_N", tile.block_n),
                    ("INDICES_AHEAD", tile.indices_ahead),
                    ("NUM_STAGES", tile.num_stages),
                ),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                expected_shared=row.expected_shared,
            )
    for alignment in (FULL_ALIGNMENT, 1):
        yield _merge_job(plan, target, alignment)


def _cache_job(plan: Plan, target: str, alignment: int) -> CompileJob:
    return CompileJob(
        module="cache",
        kernel="_concat_and_cache_kernel",
        variant=f"{plan.cache.block_t} tokens{'' if alignment == FULL_ALIGNMENT else ', odd rows'}",
        target=target,
        signature=_cache_signature(plan),
        constexprs=(("ALIGNMENT", alignment), ("BLOCK_T", plan.cache.block_t)),
        num_warps=plan.cache.num_warps,
        num_stages=1,
        expected_shared=0,
    )


def compile_jobs(plan: Plan) -> list[CompileJob]:
    """Every kernel of the package for every target, tile and alignment, with all optional tensors given."""
    modules = dict(_modules(plan))
    unaligned = dict(plan.sparse.unaligned)
    jobs: list[CompileJob] = []
    for target, rows in plan.sparse.tiles:
        if "sparse_attention" in modules:
            jobs.extend(_sparse_jobs(plan, target, rows, unaligned[target]))
        if "cache" in modules:
            jobs.extend(_cache_job(plan, target, alignment) for alignment in (FULL_ALIGNMENT, 1))
    return jobs
