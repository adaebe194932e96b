"""Facts of a package's spec about the compressor, and its wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlagen.layout import indexer_layout_of, layouts_of
from mlagen.verify.call.facts import Facts
from mlagen.verify.paged.side import MAIN, Side

NAME = "compressor"
SAVE, COMPRESS = "save_partial_states", "compress_norm_rope_store"


@dataclass(frozen=True)
class CompressorSide(Side):
    """A cache that compressed rows go to.

    Attributes:
        short: its word in names of cases, "rows" of attention's cache or "keys" of the indexer's.
        rope: columns of a row that RoPE rotates, in pairs 2i and 2i + 1.
        first: the first of them.
        neox: no pairs of other columns.
        packed: two columns of the indexer's keys share a byte.
    """

    short: str
    rope: int
    first: int
    neox: bool
    packed: bool

    @property
    def columns(self) -> int:
        """Columns of a row."""
        return self.layout.columns


def sides_of(spec: Mapping[str, Any]) -> list[CompressorSide]:
    """The caches of `SPEC["spec"]` that compressed rows go to."""
    main, extra = layouts_of(spec)
    layout, facts = extra or main, Facts.of(spec)
    if layout is None:
        return []
    found = [CompressorSide(MAIN, layout, facts, "rows", facts.d_rope, facts.d_c, False, False)]
    keys, indexer = indexer_layout_of(spec), spec.get("indexer")
    if keys is not None and indexer is not None and indexer["rope"] == "gptj":
        rope = indexer["rope_head_dim"]
        first = indexer["head_dim"] - rope if indexer["rope_at"] == "last" else 0
        packed = keys.data[0].dtype == "e2m1"
        if first % 2 == 0 and keys.scales_of(keys.data[0]) is not None:
            found.append(CompressorSide(MAIN, keys, facts, "keys", rope, first, False, packed))
    return found
