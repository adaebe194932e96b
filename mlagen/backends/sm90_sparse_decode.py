"""The sm90 kernel of sparse decode for e4m3 Q and an e4m3 cache."""

from __future__ import annotations

from typing import Any

from mlagen.backends.grouped import shared
from mlagen.backends.sm90 import FACTS, REST_OF_SHAPES, Sm90Module, required, sparse_decode_arguments
from mlagen.backends.triton.common import Signature
from mlagen.plan import Plan, SparseDecodePlan
from mlagen.plan.sm90 import PRODUCT_DEPTH


def _arguments(plan: Plan) -> Signature:
    """Return the arguments: those for a Q of the model's dtype, with Q's bytes and its scale."""
    found: list[tuple[str, str]] = []
    for name, kind in sparse_decode_arguments(plan):
        found.append((name, "*u8" if name in ("q_ptr", "q_rope_ptr") else kind))
        if name == "k_scale_ptr":
            found.append(("q_scale_ptr", "*fp32"))
    return tuple(found)


def _details(plan: Plan) -> dict[str, Any]:
    sm90 = required(plan.of(SparseDecodePlan).sm90_e4m3)
    tiles = ("q_l", "q_r", "k_l", "k_r", "q_tail", "k_tail")
    statistics = ("p0", "p1", "m0", "m1", "alpha0", "alpha1", "l0", "l1")
    return {
        "splits_constants": "D_V, NEG_LARGE",
        "product_keys": PRODUCT_DEPTH,
        "chunks": sm90.block_n // PRODUCT_DEPTH,
        "half_words": sm90.d_half // 4,
        **shared(tiles, statistics, ("q_ready", "k_ready")),
        "shapes": [
            f"q e4m3 [requests, s_q, num_heads, {plan.d_qk}], q_scale f32 [1].",
            f"out {plan.spec.model.dtype} [tokens, num_heads, {plan.d_v}], where tokens is",
            REST_OF_SHAPES,
        ],
    }


SPARSE_DECODE_E4M3 = Sm90Module(
    MODULE="_sparse_decode_sm90_e4m3",
    TEMPLATE="sm90/sparse_decode_e4m3",
    plan_of=lambda plan: found.sm90_e4m3 if (found := plan.find(SparseDecodePlan)) else None,
    arguments=_arguments,
    details=_details,
    facts=(*FACTS, "layout"),
    columns=(),
)
