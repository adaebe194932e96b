"""The cache writer and its wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlagen.backends.triton.common import FULL_ALIGNMENT, Signature, alignment_of, chunk_of, common
from mlagen.plan import CompileJob, Plan

MODULE = "cache"
WRAPPERS = ("concat_and_cache_mla",)


def _signature(plan: Plan) -> Signature:
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


def context(plan: Plan) -> dict[str, Any]:
    """What the template asks for."""
    fields = {field.name: field for field in plan.layout.fields}
    sources = {"nope": ("kv_c", fields["latent"]), "rope": ("k_pe", fields.get("rope"))}
    chunks = []
    for chunk in plan.cache.chunks:
        source, field = sources[chunk.name.split("_")[0]]
        start = chunk.start - (field.first_lane if field else 0)
        chunks.append(
            {**chunk_of(chunk), "source": source, "source_start": start, "source_alignment": alignment_of(start)}
        )
    return {
        **common(plan),
        "chunks": chunks,
        "latent": fields["latent"],
        "rope": fields.get("rope"),
        "cache": plan.cache,
        "arguments": len(_signature(plan)),
    }


def _cache_job(plan: Plan, target: str, alignment: int) -> CompileJob:
    return CompileJob(
        module="cache",
        kernel="_concat_and_cache_kernel",
        variant=f"{plan.cache.block_t} tokens{'' if alignment == FULL_ALIGNMENT else ', odd rows'}",
        target=target,
        signature=_signature(plan),
        constexprs=(("ALIGNMENT", alignment), ("BLOCK_T", plan.cache.block_t)),
        num_warps=plan.cache.num_warps,
        num_stages=1,
        expected_shared=0,
    )


def exports(wrappers: list[str]) -> list[str]:
    """Names that the package takes from the module, given the spec's wrappers that are its own."""
    return wrappers


def jobs(plan: Plan) -> Iterator[CompileJob]:
    """Both alignments on every target."""
    for target in plan.spec.targets:
        for alignment in (FULL_ALIGNMENT, 1):
            yield _cache_job(plan, target, alignment)
