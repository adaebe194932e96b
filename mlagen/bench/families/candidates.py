"""Candidate blocks and the top-k of the keys in them: the family `candidates`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mlagen.bench.families import indexer_select as picks
from mlagen.bench.families import mqa_logits as scored
from mlagen.bench.families.indexer_select import PickInputs, PickShape, pick_call, pick_error
from mlagen.bench.families.mqa_logits import LogitsInputs
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import BLOCK_SIZE, rotation, sets_needed
from mlagen.bench.trial import OURS, Call, Entrant, Family, Setting, Trial
from mlagen.work import logits_bytes, logits_flops, topk_bytes

SELECT, FLAT, PAGED = "select_candidate_blocks", "candidate_indexer_topk", "paged_candidate_indexer_topk"
ONE_LEVEL = "ours, over all keys"
# Requests, query tokens of each, keys of each.
DECODES = (
    *((requests, 1, keys << 10) for requests in (1, 16, 64) for keys in (32, 128)),
    (16, 6, 128 << 10),
)
PREFILL_TOKENS, PREFILL_KEYS = 4096, (32 << 10, 128 << 10)
EAGER_TOKENS = 16  # up to this many tokens, a call's time from Python is of interest
INDEX_BYTES = 4


@dataclass(frozen=True)
class CandidateShape:
    """Sizes of one call.

    Attributes:
        kind: the wrapper.
        requests: of the batch; 1 over flat keys.
        s_q: query tokens a request.
        num_heads: of the indexer.
        keys: of each request; the last query token sees all of them, each before it one less.
        topk: picks a token.
        blocks: candidate blocks a token.
    """

    kind: str
    requests: int
    s_q: int
    num_heads: int
    keys: int
    topk: int
    blocks: int

    @property
    def family(self) -> str:
        """The one family of these shapes."""
        return "candidates"

    @property
    def tokens(self) -> int:
        """Query tokens of the call."""
        return self.requests * self.s_q

    @property
    def over_all_keys(self) -> PickShape:
        """The call of one level."""
        kind = picks.FLAT if self.kind == FLAT else picks.PAGED
        return PickShape(kind, self.requests, self.s_q, self.num_heads, self.keys, self.topk)

    def __str__(self) -> str:
        sizes = f"{self.requests} x {self.s_q} x h{self.num_heads}, kv {self.keys >> 10}K"
        return f"{self.kind} {sizes}, topk {self.topk}, blocks {self.blocks}"


@dataclass(frozen=True)
class CandidateInputs:
    """Tensors of one call.

    Attributes:
        picks: the tensors of the call of one level, and room for picks.
        blocks: i32 [tokens, blocks], each token's blocks; of the selection room for them.
        logits: fp32 [tokens, keys] of the selection.
        ends: i32 [tokens], the logits that each token sees.
        block: keys of a block.
    """

    picks: PickInputs | None
    blocks: torch.Tensor
    logits: torch.Tensor | None
    ends: torch.Tensor
    block: int


def candidate_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[CandidateShape]:
    """Calls that a package is measured at. Blocks come from its own selection."""
    found: list[CandidateShape] = []
    if not package.has(SELECT):
        return found
    indexer = package.spec["indexer"]
    sizes = (indexer["num_heads"],), (indexer["topk"], indexer["candidates"]["count"])
    for kind, needed in ((SELECT, SELECT), (PAGED, picks.PAGED)):
        if package.has(kind) and package.has(needed):
            found += [CandidateShape(kind, b, s_q, *sizes[0], keys, *sizes[1]) for b, s_q, keys in DECODES]
    if package.has(FLAT) and package.has(picks.FLAT):
        found += [CandidateShape(FLAT, 1, PREFILL_TOKENS, *sizes[0], keys, *sizes[1]) for keys in PREFILL_KEYS]
    return found


def candidate_call(shape: CandidateShape, function: Callable[..., Any], inputs: CandidateInputs) -> Call:
    """A call of our wrapper for the top-k in blocks."""
    assert inputs.picks is not None
    one, out = inputs.picks.logits, inputs.picks.indices
    if one.block_table is None:
        flat = (one.q, one.keys, one.weights, one.start, one.end)
        return lambda: function(*flat, inputs.blocks, shape.topk, out=out)
    values, scales = (None if part is None else part.view(*one.end.shape, *part.shape[1:]) for part in one.q)
    pages = ((values, scales), one.cache, one.weights, one.end, one.block_table)
    return lambda: function(*pages, inputs.blocks, shape.topk, out=out)


def select_call(function: Callable[..., Any], inputs: CandidateInputs) -> Call:
    """A call of the selection of blocks, ours or a peer's with its signature."""
    sizes = (inputs.blocks.shape[1], inputs.block)

    def call() -> torch.Tensor:
        function(inputs.logits, None, inputs.ends, *sizes, inputs.blocks)
        return inputs.blocks

    return call


def select_error(inputs: CandidateInputs, call: Call) -> float:
    """Share of the worst row's blocks that are wrong; a peer's may be in any order, and any of equal blocks."""
    inputs.blocks.fill_(-2)
    got, logits = call(), inputs.logits
    assert isinstance(got, torch.Tensor)
    assert logits is not None
    columns, worst = torch.arange(logits.shape[1], device=got.device), 0.0
    for row in range(len(got)):
        end = int(inputs.ends[row])
        scores = logits[row].masked_fill(columns >= end, -torch.inf).view(-1, inputs.block).amax(1)
        scores[(end - 1) // inputs.block] = torch.inf
        best = scores.topk(min(got.shape[1], len(scores))).values
        named = got[row].long().sort(descending=True).values[: len(best)]
        mine = scores.gather(0, named.clamp(0, len(scores) - 1)).masked_fill(named < 0, -torch.inf)
        mine[1:][named[1:] == named[:-1]] = -torch.inf
        there = best > -torch.inf
        worst = max(worst, float((mine.sort(descending=True).values != best)[there].float().mean()))
    return worst


def _select_trial(shape: CandidateShape, setting: Setting, block: int) -> Trial[Any]:
    rows, device = shape.tokens, setting.device
    behind = torch.arange(shape.s_q - 1, -1, -1, device=device)
    ends = (shape.keys - behind).int().repeat(shape.requests)
    moved = topk_bytes(int(ends.sum()), rows, shape.blocks)
    inputs = [
        CandidateInputs(
            None,
            torch.empty(rows, shape.blocks, dtype=torch.int32, device=device),
            torch.randn(rows, shape.keys, device=device),
            ends,
            block,
        )
        for _ in range(rotation(moved, setting.l2_bytes))
    ]
    return Trial(
        inputs=inputs,
        entrants=[Entrant(OURS, partial(select_call, setting.package.wrapper(SELECT)))],
        error_of=partial(select_error, inputs[0]),
        error_limit=0.0,
        flops=0,
        bytes_moved=moved,
        roof=setting.copy_roof,
        graph_only=True,
        launch_bound=rows <= EAGER_TOKENS,
    )


def _with_blocks(shape: CandidateShape, package: BenchPackage, one: LogitsInputs, block: int) -> CandidateInputs:
    """Inputs of a call. Blocks are the best of its own logits, so one level and two have the same best keys."""
    device = one.weights.device
    made = PickInputs(one, torch.empty(shape.tokens, shape.topk, dtype=torch.int32, device=device))
    blocks = torch.empty(shape.tokens, shape.blocks, dtype=torch.int32, device=device)
    pick_call(shape.over_all_keys, package, made, candidate_blocks=blocks)()
    return CandidateInputs(made, blocks, None, one.end, block)


def candidate_trials(setting: Setting) -> Callable[[CandidateShape], Trial[Any]]:
    """Makes calls ready."""
    package, device = setting.package, setting.device
    block = package.spec["indexer"]["candidates"]["block"]

    def trial(shape: CandidateShape) -> Trial[Any]:
        if shape.kind == SELECT:
            return _select_trial(shape, setting, block)
        layout, call = scored.layout_of(package), shape.over_all_keys.logits
        seen = shape.tokens * min(shape.blocks * block, shape.keys)  # pairs of a token and a key in its blocks
        q_bytes = shape.tokens * shape.num_heads * layout.row_bytes
        # Neighbouring tokens of a prefill have most keys in common; a decode step reads a token's own.
        keys_read = seen if shape.kind == PAGED else shape.keys
        read_bytes = q_bytes + keys_read * layout.row_bytes
        sets = sets_needed(read_bytes, setting.l2_bytes)
        size = package.spec["indexer_cache"].get("block_size") or BLOCK_SIZE
        if shape.kind == FLAT:
            made = scored.make_flat_inputs(call, layout, device, sets)
        else:
            made = scored.make_paged_inputs(call, layout, size, device, sets)
        inputs = [_with_blocks(shape, package, one, block) for one in made]
        first = inputs[0].picks
        assert first is not None

        def over_all_keys(given: CandidateInputs) -> Call:
            assert given.picks is not None
            return pick_call(shape.over_all_keys, package, given.picks)

        moved = logits_bytes(read_bytes, shape.tokens * shape.num_heads, 0)
        return Trial(
            inputs=inputs,
            entrants=[
                Entrant(OURS, partial(candidate_call, shape, package.wrapper(shape.kind))),
                Entrant(ONE_LEVEL, over_all_keys),
            ],
            error_of=partial(pick_error, first),
            error_limit=scored.ERROR_LIMIT,
            flops=logits_flops(shape.num_heads, seen, layout.columns),
            bytes_moved=moved + shape.tokens * shape.blocks * INDEX_BYTES + topk_bytes(0, shape.tokens, shape.topk),
            roof=scored.roof_of_logits(setting),
            launch_bound=shape.tokens <= EAGER_TOKENS,
        )

    return trial


BENCHMARKS = {"candidates": Family(candidate_shapes, candidate_trials, ("candidates",))}
