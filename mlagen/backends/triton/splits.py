"""What the attention families share: the choice of splits, the softmax, and the kernel that merges splits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from mlagen.backends.triton.common import FULL_ALIGNMENT, Signature, chunk_of, common, hopper_kernels
from mlagen.plan import TARGETS, Chunk, CompileJob, MergeTile, Plan

MODULE = "_splits"


def _signature(plan: Plan) -> Signature:
    """Run-time arguments of the merge and their Triton types, with every optional tensor given."""
    element = f"*{plan.spec.model.dtype}"
    sink = (("attn_sink_ptr", "*fp32"),) if plan.spec.attention.attn_sink != "none" else ()
    return (
        ("partial_ptr", "*fp32"),
        *sink,
        ("out_ptr", element),
        ("max_logits_ptr", "*fp32"),
        ("lse_ptr", "*fp32"),
        ("num_heads", "i32"),
        ("num_splits", "i32"),
        ("num_rows", "i32"),
        ("out_token_stride", "i64"),
        ("out_head_stride", "i64"),
    )


def accumulators(chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
    """The chunks of V as templates ask for them, each with the name of its accumulator."""
    in_v = [chunk_of(chunk) for chunk in chunks if chunk.in_v]
    names = ["acc"] if len(in_v) == 1 else [f"acc_{number}" for number in range(len(in_v))]
    return [{**chunk, "acc": acc} for chunk, acc in zip(in_v, names, strict=True)]


def attention_context(plan: Plan) -> dict[str, Any]:
    """What the templates of all attention families ask for."""
    attention = plan.spec.attention
    return {
        **common(plan),
        "has_rope": plan.spec.model.qk_rope_head_dim > 0,
        "has_sink": attention.attn_sink != "none",
        "sink_required": attention.attn_sink == "required",
        "has_topk_length": attention.topk_length != "none",
        "length_required": attention.topk_length == "required",
        "lse_base": attention.lse_base,
        "empty_row_lse": attention.empty_row_lse.lstrip("+"),
    }


def context(plan: Plan) -> dict[str, Any]:
    """What the template asks for."""
    base_e = plan.spec.attention.lse_base == "e"
    return {
        **attention_context(plan),
        "hopper_tile": next((hopper.tile for hopper in hopper_kernels(plan).values() if hopper), None),
        "splits": plan.splits,
        "to_base": " * LN2" if base_e else "",
        "lse_text": "(m + tl.log2(l)) * LN2" if base_e else "m + tl.log2(l)",
        "merge_arguments": len(_signature(plan)),
    }


def dependent_merge(target: str) -> tuple[tuple[str, bool], ...]:
    """What a split kernel takes beside its tile: whether its merge can begin while it still runs."""
    return (("DEPENDENT_MERGE", TARGETS[target].dependent_launch),)


def _merge_job(plan: Plan, target: str, alignment: int, merge: MergeTile) -> CompileJob:
    return CompileJob(
        module=MODULE,
        kernel="_merge_splits_kernel",
        variant=f"{merge.block_s}x{merge.block_d}{'' if alignment == FULL_ALIGNMENT else ' odd rows'}",
        target=target,
        signature=_signature(plan),
        constexprs=(
            ("ALIGNMENT", alignment),
            ("D_BLOCKS", merge.d_blocks),
            ("BLOCK_S", merge.block_s),
            ("BLOCK_D", merge.block_d),
            ("DEPENDENT", TARGETS[target].dependent_launch),
        ),
        num_warps=merge.num_warps,
        num_stages=1,
        expected_shared=merge.expected_shared(TARGETS[target].warp_size),
    )


def jobs(plan: Plan) -> Iterator[CompileJob]:
    """Every tile of the merge, for both alignments on every target."""
    for target, alignment, tile in itertools.product(plan.spec.targets, (FULL_ALIGNMENT, 1), plan.splits.merge):
        yield _merge_job(plan, target, alignment, tile)
