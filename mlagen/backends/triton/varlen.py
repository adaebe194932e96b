"""Multi-head attention over requests of any lengths, by pointers or by tensor descriptors, and its wrapper."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from mlagen.backends import gluon
from mlagen.backends.triton.common import FULL_ALIGNMENT, Signature, alignment_of, by_tile, chunk_of, common, tables
from mlagen.backends.triton.splits import accumulators
from mlagen.plan import CompileJob, Plan, VarlenPlan, VarlenTile, needed

MODULE = "varlen_attention"
WRAPPERS = ("flash_attn_varlen_func",)

BY_POINTERS, BY_DESCRIPTORS = "_varlen_fwd_kernel", "_varlen_fwd_descriptor_kernel"


def _signature(plan: Plan, block_n: int | None) -> Signature:
    """Run-time arguments and their Triton types, by pointers; by descriptors of blocks of `block_n` keys if given."""
    varlen, element = needed(plan.varlen), f"*{plan.spec.model.dtype}"
    chunks = (*varlen.k_chunks, *varlen.v_chunks)
    blocks = [f"tensordesc<{plan.spec.model.dtype}[1,{block_n},{chunk.block}]>" for chunk in chunks]
    described = tuple((f"{chunk.name}_desc", block) for chunk, block in zip(chunks, blocks, strict=True))
    return (
        ("q_ptr", element),
        *((("k_ptr", element), ("v_ptr", element)) if block_n is None else described),
        ("cu_seqlens_q_ptr", "*i32"),
        ("cu_seqlens_k_ptr", "*i32"),
        ("out_ptr", element),
        ("lse_ptr", "*fp32"),
        ("total_q", "i32"),
        ("total_k", "i32"),
        ("num_heads", "i32"),
        ("heads_per_kv", "i32"),
        ("num_requests", "i32"),
        ("request_bits", "i32"),
        ("num_slots", "i32"),
        ("head_group", "i32"),
        ("scale_log2", "fp32"),
        ("q_row_stride", "i64"),
        ("q_head_stride", "i64"),
        ("out_row_stride", "i64"),
        ("out_head_stride", "i64"),
        *((name, "i64") for name in _strides(block_n)),
    )


def _strides(block_n: int | None) -> tuple[str, ...]:
    return () if block_n else ("k_row_stride", "k_head_stride", "v_row_stride", "v_head_stride")


def _addressings(plan: Plan) -> list[dict[str, Any]]:
    """How kernels of the package address k and v, each with what tells its functions from the others'."""
    varlen = needed(plan.varlen)
    pointers = {"descriptors": False, "suffix": "", "arguments": len(_signature(plan, None))}
    descriptors = {"descriptors": True, "suffix": "_descriptor", "arguments": len(_signature(plan, 1))}
    return [descriptors, pointers] if varlen.descriptor_targets else [pointers]


def context(plan: Plan) -> dict[str, Any]:
    """What the template asks for."""
    varlen = needed(plan.varlen)
    k_chunks = [chunk_of(chunk) for chunk in varlen.k_chunks]
    v_chunks = accumulators(varlen.v_chunks)
    for chunk in (*k_chunks, *v_chunks):  # where all rows are aligned, as those of descriptors are
        chunk["told"] = FULL_ALIGNMENT if alignment_of(chunk["start"]) == "ALIGNMENT" else 1
    return {
        **common(plan),
        "d_qk": varlen.d_qk,
        "d_v": varlen.d_v,
        "varlen": varlen,
        **tables(varlen),
        "descriptors": bool(varlen.descriptor_targets),
        "hopper": varlen.hopper,
        "addressings": _addressings(plan),
        "chunks": [*k_chunks, *v_chunks],
        "k_chunks": k_chunks,
        "v_chunks": v_chunks,
    }


SHARED = (gluon.HeadsModule(context, lambda plan: _signature(plan, None)),)


def exports(wrappers: list[str]) -> list[str]:
    """Names that the package takes from the module, given the spec's wrappers that are its own."""
    return wrappers


def _job(plan: Plan, target: str, tile: VarlenTile, shared: int, alignment: int, causal: bool) -> CompileJob:
    described = alignment == FULL_ALIGNMENT and target in needed(plan.varlen).descriptor_targets
    words = [str(tile), "causal" if causal else "", "" if alignment == FULL_ALIGNMENT else "odd rows"]
    return CompileJob(
        module=MODULE,
        kernel=BY_DESCRIPTORS if described else BY_POINTERS,
        variant=" ".join(word for word in words if word),
        target=target,
        signature=_signature(plan, tile.block_n if described else None),
        constexprs=(
            *(() if described else (("ALIGNMENT", alignment),)),
            ("CAUSAL", causal),
            ("BLOCK_M", tile.block_m),
            ("BLOCK_N", tile.block_n),
            ("NUM_STAGES", tile.num_stages),
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        expected_shared=shared,
    )


def jobs(plan: Plan) -> Iterator[CompileJob]:
    """Every tile on every target, and the tile of rows that are not aligned, each causal and not."""
    varlen: VarlenPlan = needed(plan.varlen)
    unaligned = dict(varlen.unaligned)
    for target, rows in varlen.tiles:
        tiles = [(row.tile, row.expected_shared, FULL_ALIGNMENT) for row in by_tile(rows)]
        tiles += [(row.tile, row.expected_shared, 1) for row in by_tile(unaligned[target])]
        for (tile, shared, alignment), causal in itertools.product(tiles, (True, False)):
            yield _job(plan, target, tile, shared, alignment, causal)
