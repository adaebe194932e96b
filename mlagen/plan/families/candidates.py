"""Numbers of the kernels around candidate blocks: scores of blocks, and logits of the keys in picked blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlagen.plan.family import Family
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import Spec

SELECT = "select_candidate_blocks"
FLAT, PAGED = "candidate_mqa_logits", "paged_candidate_mqa_logits"
FLAT_PICKS, PAGED_PICKS = "candidate_indexer_topk", "paged_candidate_indexer_topk"
COLUMNS = 1024  # of logits that a program reduces to scores of blocks at a time
SCORE_WARPS = 4


@dataclass(frozen=True, kw_only=True)
class CandidatesPlan(Family):
    """Numbers of the kernels.

    Attributes:
        block: keys of a block.
        count: blocks that a query token keeps, for docstrings.
        score_blocks: blocks that a program scores at a time.
        score_warps: warps of such a program.
        scores_keys: whether a wrapper scores keys in blocks, with the logits' tile of fewest query tokens.
    """

    NAME: ClassVar = "candidates"
    WRAPPERS: ClassVar = {
        SELECT: Op(("out",)),
        FLAT: Op((), {"logits": None}, ("logits_dtype",)),
        PAGED: Op((), {"logits": None}, ("logits_dtype",)),
        FLAT_PICKS: Op(("scores", "workspace"), {"indices": "out"}),
        PAGED_PICKS: Op(("scores", "workspace"), {"indices": "out"}),
    }

    block: int
    count: int
    score_blocks: int
    score_warps: int
    scores_keys: bool

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> CandidatesPlan | None:
        """Derives the numbers; see `Family`."""
        if not cls.wanted(spec):
            return None
        assert spec.indexer is not None
        assert spec.indexer.candidates is not None  # the wrappers need them
        block = spec.indexer.candidates.block
        return cls(
            block=block,
            count=spec.indexer.candidates.count,
            score_blocks=COLUMNS // block,
            score_warps=SCORE_WARPS,
            scores_keys=any(name in spec.wrappers for name in cls.WRAPPERS if name != SELECT),
        )
