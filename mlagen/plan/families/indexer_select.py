"""Numbers of the wrappers that score keys and select at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlagen.plan.family import Family
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import Spec

# 4096 tokens over 32K keys still go whole; in batches of this size, 4096 over 128K take 2.4 % longer on H200.
LOGITS_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class IndexerSelectPlan(Family):
    """Numbers of the wrappers that launch the kernels of logits and of top-k, which are those of these families.

    Attributes:
        logits_bytes: largest workspace of logits. A call that needs more takes its logits in batches.
    """

    NAME: ClassVar = "indexer_select"
    FLAT: ClassVar = "indexer_topk"
    PAGED: ClassVar = "paged_indexer_topk"
    WRAPPERS: ClassVar = {
        FLAT: Op(("scores", "slots", "workspace"), {"indices": "out"}),
        PAGED: Op(("scores", "slots", "workspace"), {"indices": "out"}),
    }

    logits_bytes: int

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> IndexerSelectPlan | None:
        """Derives the numbers; see `Family`."""
        return cls(logits_bytes=LOGITS_BYTES) if cls.wanted(spec) else None
