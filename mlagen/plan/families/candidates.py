"""Numbers of the kernels around candidate blocks: scores of blocks, and logits of the keys in picked blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlagen.plan.families.mqa_logits import MqaLogitsPlan, MqaLogitsTile
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
        tiles: by target, tiles of logits for rows that begin at 16 bytes and for others; a program has one query token.
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
    tiles: tuple[tuple[str, MqaLogitsTile, MqaLogitsTile], ...]

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> CandidatesPlan | None:
        """Derives the numbers; see `Family`."""
        if not cls.wanted(spec):
            return None
        assert spec.indexer is not None
        assert spec.indexer.candidates is not None  # the wrappers need them
        block = spec.indexer.candidates.block
        scores_keys = any(name in spec.wrappers for name in cls.WRAPPERS if name != SELECT)
        of_logits = MqaLogitsPlan.make(spec, caches, tuned) if scores_keys else None
        tiles = of_logits.tiles if of_logits else ()
        return cls(
            block=block,
            count=spec.indexer.candidates.count,
            score_blocks=COLUMNS // block,
            score_warps=SCORE_WARPS,
            tiles=tuple((target, found.paged[0], found.unaligned[0]) for target, found in tiles),
        )
