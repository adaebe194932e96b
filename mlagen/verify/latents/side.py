"""Facts of a package's spec about latents, and its wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlagen.layout import CacheLayout, indexer_layout_of, layouts_of
from mlagen.verify.call.facts import Facts
from mlagen.verify.paged.side import MAIN, Side

NAME = "latents"
POOL, INSERT, KEYS = "fused_save_compress_norm", "rope_quant_insert", "indexer_k_norm_rope_store"
SHORT = {POOL: "latents", INSERT: "rows"}


@dataclass(frozen=True)
class LatentsSide(Side):
    """The cache that latents go to.

    Attributes:
        rope: columns of a row that RoPE rotates, its last ones.
        neox: it rotates i and i + rope / 2 together; else 2i and 2i + 1.
        keys: layout of the indexer's keys, where the package makes them of projected latents; else None.
        key_rope: columns of a key that RoPE rotates.
    """

    rope: int
    neox: bool
    keys: CacheLayout | None
    key_rope: int

    @property
    def columns(self) -> int:
        """Columns of a latent."""
        return self.layout.columns

    @property
    def first(self) -> int:
        """The first column that RoPE rotates."""
        return self.columns - self.rope


def side_of(spec: Mapping[str, Any]) -> LatentsSide | None:
    """The cache of `SPEC["spec"]` that latents go to; None without."""
    main, extra = layouts_of(spec)
    layout, facts = extra or main, Facts.of(spec)
    if layout is None:
        return None
    indexer = spec.get("indexer") if KEYS in spec["wrappers"] else None
    keys, key_rope = (indexer_layout_of(spec), indexer["rope_head_dim"]) if indexer else (None, 0)
    return LatentsSide(MAIN, layout, facts, facts.d_rope, spec["model"].get("rope") == "neox", keys, key_rope)
