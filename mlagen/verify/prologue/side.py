"""Facts of a package's spec about attention's prologue, and its wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlagen.layout import layouts_of
from mlagen.verify.call.facts import Facts
from mlagen.verify.paged.side import MAIN, Side

NAME = "prologue"
INSERT = "fused_deepseek_v4_qnorm_rope_kv_insert"
PADDED = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
CONCAT = "concat_and_cache_mla_rope_fused"
SHORT = {INSERT: "insert", PADDED: "padded", CONCAT: "concat"}
CACHE_ARGUMENT = {INSERT: "k_cache", PADDED: "k_cache", CONCAT: "kv_cache"}
Q_ARGUMENT = {INSERT: "q", PADDED: "q_in", CONCAT: "q_pe"}
POSITIONS_ARGUMENT = {INSERT: "positions", PADDED: "position_ids", CONCAT: "positions"}


@dataclass(frozen=True)
class PrologueSide(Side):
    """The cache that a prologue writes to.

    Attributes:
        rope: columns of a row that RoPE rotates, its last ones.
        neox: it rotates i and i + rope / 2 together; else 2i and 2i + 1.
    """

    rope: int
    neox: bool

    @property
    def first(self) -> int:
        """The first column that RoPE rotates."""
        return self.layout.columns - self.rope


def side_of(spec: Mapping[str, Any]) -> PrologueSide | None:
    """The cache of `SPEC["spec"]`; None without one or without RoPE."""
    layout, facts = layouts_of(spec)[0], Facts.of(spec)
    style = spec["model"].get("rope")
    return None if layout is None or style is None else PrologueSide(MAIN, layout, facts, facts.d_rope, style == "neox")
