"""Random cases of candidate blocks."""

from __future__ import annotations

from dataclasses import replace

from mlagen.verify.call.case import Case
from mlagen.verify.chains.candidates.cases import PATTERNS, BlocksCase, CandidateCase
from mlagen.verify.chains.candidates.invalid import FLAT, FLAT_PICKS, LOGITS, SELECT, SHORT
from mlagen.verify.mqa_logits.cases import FlatCase, PagedCase
from mlagen.verify.mqa_logits.facts import FLAT_PAIR, PAGED_PAIR, LogitsFacts
from mlagen.verify.random.indexer import EDGES, SCORES, draw_flat, draw_paged, most_logits
from mlagen.verify.random.scene import Scene


def candidates(scene: Scene) -> Case:
    """A call that selects blocks, or one for the keys in blocks."""
    shape, call = scene.shape, scene.call
    wrapper = shape.pick(*[name for name in SHORT if name in scene.spec["wrappers"]])
    if wrapper == SELECT:
        return _blocks(scene)
    facts = LogitsFacts.of(scene.spec)
    assert facts is not None
    scored: FlatCase | PagedCase
    if wrapper in (FLAT, FLAT_PICKS):
        drawn = draw_flat(scene, FLAT_PAIR, most_logits(facts))
        scored = replace(drawn, clean=False, compressed=0, multiprocessors=None, tokens=min(drawn.tokens, 64))
    else:
        scored = replace(draw_paged(scene, PAGED_PAIR, most_logits(facts)), clean=False)
    logits = FLAT if isinstance(scored, FlatCase) else "paged_candidate_mqa_logits"
    contents = scored.contents if logits in scene.spec["wrappers"] else "whole"
    picks = wrapper not in LOGITS
    return CandidateCase(
        "", "", wrapper, replace(scored, bf16=scored.bf16 and not picks, contents=contents),
        blocks=call.size(0, 2048 if scene.big else 30),
        pattern=call.pick(*PATTERNS),
        k=call.pick(2048, 512, call.size(1, 4096)) if scene.big else call.size(1, 60),
        gives=shape.pick((), ("scores",)),
        out=shape.mostly("contiguous", "slice", "odd"),
        room=shape.mostly(None, 1, 3, 16) if picks else None,
        memory=shape.mostly("contiguous", "slice", "odd"),
    )  # fmt: skip


def _blocks(scene: Scene) -> BlocksCase:
    """A call that selects blocks from logits."""
    shape, call = scene.shape, scene.call
    repeat = shape.pick(1, 1, 2, 3, 6)
    rows = call.size(0, 300 if scene.big else 4) * repeat
    columns = call.size(0, min(100_000, 2**21 // max(rows, 1)) if scene.big else 400)

    def bounds() -> tuple[int, ...]:
        return tuple(call.pick(call.size(0, columns), columns, *EDGES) for _ in range(max(rows // repeat, 1)))

    return BlocksCase(
        "", "", rows, columns,
        k=call.pick(2048, call.size(1, 4096)) if scene.big else call.size(1, 60),
        scores=call.pick(*SCORES, "infinite"),
        ends=bounds() if call.chance(0.8) else None,
        starts=bounds() if shape.chance(0.5) else None,
        repeat=repeat,
        layout=shape.mostly("contiguous", "slice", "odd"),
        out=shape.mostly("contiguous", "slice", "odd"),
        dtype=shape.pick("float32", "float32", "bfloat16"),
    )  # fmt: skip
