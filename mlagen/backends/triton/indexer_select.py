"""Logits of the indexer and their top-k in one call: wrappers over the kernels of both families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.triton import mqa_logits
from mlagen.plan import IndexerSelectPlan, MqaLogitsPlan, Plan

MODULE = "indexer_select"
PICKS = {"picks_flat": IndexerSelectPlan.FLAT, "picks_paged": IndexerSelectPlan.PAGED}
BYTES_OF_A_WORD = 4  # byte scales that callers may pass as one int32


def _context(plan: Plan, family: IndexerSelectPlan) -> dict[str, Any]:
    """Template context."""
    logits = mqa_logits.context(plan, plan.of(MqaLogitsPlan))
    picks = {name: wrapper in plan.spec.wrappers for name, wrapper in PICKS.items()}
    return {**logits, **picks, **_shapes(logits), "logits_mib": family.logits_bytes >> 20}


def _shapes(logits: Mapping[str, Any]) -> dict[str, str]:
    """Return descriptions of a query and of flat keys for docstrings, from the context of the logits."""
    heads, width, scales = logits["num_heads"], logits["width"], logits["num_scales"]
    if not logits["packed"]:
        name = logits["key_type"]
        flat, paged = (f"{name} [{rows}, {heads}, {width}]" for rows in ("M", "B, next_n"))
        return {
            "q_flat": f"{flat}, any token and head stride, and None",
            "q_paged": f"{paged}, any stride of requests, tokens and heads, and None",
            "kv_flat": f"{name} [N, {width}], any row stride, and float32 [N], the keys and their scales",
        }
    words = scales == BYTES_OF_A_WORD

    def pair(rows: str, more: str) -> str:
        packed = f"int32 [{rows}{more}] or " if words else ""
        return f"int8 or uint8 [{rows}{more}, {width}], e2m1, and {packed}uint8 [{rows}{more}, {scales}]"

    return {
        "q_flat": pair("M", f", {heads}"),
        "q_paged": pair("B, next_n", f", {heads}"),
        "kv_flat": f"{pair('N', '')}, the keys and their scales",
    }


def shared(plan: Plan, family: IndexerSelectPlan) -> list[GeneratedFile]:
    """Return no files: its modules import those of the logits and of top-k."""
    return []


def modules(plan: Plan, family: IndexerSelectPlan) -> list[Module]:
    """The module of the family's wrappers."""
    names = sorted(name for name in family.WRAPPERS if name in plan.spec.wrappers)
    return [Module(generated(MODULE, _context(plan, family)), names)]
