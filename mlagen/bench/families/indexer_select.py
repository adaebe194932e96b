"""Scores of the lightning indexer and their top-k: the family `indexer_select`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mlagen.bench.check import in_chunks
from mlagen.bench.families import mqa_logits as scored
from mlagen.bench.families.mqa_logits import LogitsInputs, LogitsShape
from mlagen.bench.families.topk import DECODE, PREFILL
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import BLOCK_SIZE, sets_needed
from mlagen.bench.trial import OURS, Call, Entrant, Family, Setting, Trial
from mlagen.work import logits_bytes, logits_flops, topk_bytes

FLAT, PAGED = "indexer_topk", "paged_indexer_topk"
TWO_CALLS = "ours, two calls"
# Requests of one query token, keys of each.
DECODES = (
    *((1, keys << 10) for keys in (32, 64, 128)),
    *((16, keys << 10) for keys in (4, 32, 64)),
    *((64, keys << 10) for keys in (4, 32, 64)),
    (128, 32 << 10),
)
EAGER_TOKENS = 16  # up to this many tokens, a call's time from Python is of interest


@dataclass(frozen=True)
class PickShape:
    """Sizes of one call.

    Attributes:
        kind: the wrapper.
        requests: of the batch; 1 over flat keys.
        s_q: query tokens a request.
        num_heads: of the indexer.
        keys: of each request; the last query token sees all of them, each before it one less.
        topk: picks a token.
    """

    kind: str
    requests: int
    s_q: int
    num_heads: int
    keys: int
    topk: int

    @property
    def family(self) -> str:
        """The one family of these shapes."""
        return "indexer_select"

    @property
    def tokens(self) -> int:
        """Query tokens of the call."""
        return self.requests * self.s_q

    @property
    def logits(self) -> LogitsShape:
        """The same call for its logits."""
        kind = scored.FLAT if self.kind == FLAT else scored.PAGED
        return LogitsShape(kind, self.requests, self.s_q, self.num_heads, self.keys)

    def __str__(self) -> str:
        return f"{self.kind} {self.requests} x {self.s_q} x h{self.num_heads}, kv {self.keys >> 10}K, topk {self.topk}"


@dataclass(frozen=True)
class PickInputs:
    """Tensors of one call: those of its logits, and room for indices i32 [tokens, topk]."""

    logits: LogitsInputs
    indices: torch.Tensor


def pick_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[PickShape]:
    """Calls that a package is measured at."""
    found: list[PickShape] = []
    if package.has(PAGED):
        indexer = package.spec["indexer"]
        sizes = (indexer["num_heads"], indexer["topk"])
        found += [PickShape(PAGED, requests, 1, sizes[0], keys, sizes[1]) for requests, keys in DECODES]
    if package.has(FLAT):
        indexer = package.spec["indexer"]
        for keys in scored.PREFILL_KEYS:
            found.append(PickShape(FLAT, 1, scored.PREFILL_TOKENS, indexer["num_heads"], keys, indexer["topk"]))
    return found


def pick_call(shape: PickShape, package: BenchPackage, inputs: PickInputs, **more: torch.Tensor) -> Call:
    """A call of our wrapper, with further results by name; the schedule is made outside, as engines do."""
    one, out, function = inputs.logits, inputs.indices, package.wrapper(shape.kind)
    if one.block_table is None:
        return lambda: function(one.q, one.keys, one.weights, one.start, one.end, shape.topk, out=out, **more)
    schedule = scored.schedule_of(package.wrapper(scored.SCHEDULE), one.end, one.size)
    values, scales = (None if part is None else part.view(*one.end.shape, *part.shape[1:]) for part in one.q)
    pages = (one.cache, one.weights, one.end, one.block_table, schedule, one.context)
    return lambda: function((values, scales), *pages, shape.topk, out=out, **more)


def chain(inputs: PickInputs, logits: Call, select: Callable[[torch.Tensor, PickInputs], Any]) -> Call:
    """Logits, then the top-k of the keys that each token sees, by two calls."""

    def call() -> torch.Tensor:
        select(logits(), inputs)
        return inputs.indices

    return call


def by_rows(prefill: Any, decode: Any, scores: torch.Tensor, inputs: PickInputs) -> None:
    """Top-k by the two functions that vLLM and a package have under the same names."""
    one, indices = inputs.logits, inputs.indices
    sizes = (len(scores), scores.stride(0), scores.stride(1), indices.shape[1])
    if one.start is not None:
        prefill(scores, one.start, one.end, indices, *sizes)
    else:
        decode(scores, 1, one.end, indices, *sizes)


def two_calls(shape: PickShape, package: BenchPackage, inputs: PickInputs) -> Call:
    """Our logits and then our top-k. Raises ImportError where the package has not both."""
    kind, wanted = shape.logits.kind, PREFILL if shape.kind == FLAT else DECODE
    if not (package.has(kind) and package.has(wanted)):
        raise ImportError(f"the package has not both {kind} and {wanted}")
    schedule = package.wrapper(scored.SCHEDULE) if shape.kind == PAGED else None
    logits = scored.logits_call(kind, package.wrapper(kind), schedule, inputs.logits)
    prefill, decode = (package.wrapper(name) if name == wanted else None for name in (PREFILL, DECODE))
    return chain(inputs, logits, partial(by_rows, prefill, decode))


def pick_error(inputs: PickInputs, call: Call) -> float:
    """Relative error of the worst token's picks: their float64 logits, in order of size, against the best there are.

    It is 1 or more where a token picks fewer keys than it sees, one twice, or one that it does not see.
    """
    inputs.indices.fill_(-2)
    got = call()
    assert isinstance(got, torch.Tensor)
    worst = 0.0
    for some in in_chunks(len(got), 4 * inputs.logits.context * 8):
        expected = inputs.logits.expected[some]
        named = got[some].long().sort(1).values
        wrong = (named < 0) | (named >= expected.shape[1])
        wrong[:, 1:] |= named[:, 1:] == named[:, :-1]
        mine = expected.gather(1, named.clamp(0, expected.shape[1] - 1)).masked_fill(wrong, -torch.inf)
        mine = mine.sort(1, descending=True).values
        count = min(mine.shape[1], expected.shape[1])
        best = expected.topk(count, 1).values
        there = best > -torch.inf
        apart = (mine[:, :count] - best).where(there, 0.0).double().norm(dim=1)
        error = apart / best.where(there, 0.0).double().norm(dim=1)
        worst = max(worst, float(error.nan_to_num(nan=torch.inf, posinf=torch.inf).max()))
    return worst


def pick_trials(setting: Setting) -> Callable[[PickShape], Trial[PickInputs]]:
    """Makes calls ready."""
    package, device = setting.package, setting.device
    layout, roof = scored.layout_of(package), scored.roof_of_logits(setting)
    size = package.spec["indexer_cache"].get("block_size") or BLOCK_SIZE

    def trial(shape: PickShape) -> Trial[PickInputs]:
        call = shape.logits
        read_bytes = (shape.tokens * shape.num_heads + shape.requests * shape.keys) * layout.row_bytes
        sets = sets_needed(read_bytes, setting.l2_bytes)
        if shape.kind == FLAT:
            made = scored.make_flat_inputs(call, layout, device, sets)
        else:
            made = scored.make_paged_inputs(call, layout, size, device, sets)
        rooms = [torch.empty(shape.tokens, shape.topk, dtype=torch.int32, device=device) for _ in made]
        inputs = [PickInputs(one, room) for one, room in zip(made, rooms, strict=True)]
        entrants = [Entrant(OURS, partial(pick_call, shape, package))]
        entrants.append(Entrant(TWO_CALLS, partial(two_calls, shape, package)))
        moved = logits_bytes(read_bytes, shape.tokens * shape.num_heads, 0)
        return Trial(
            inputs=inputs,
            entrants=entrants,
            error_of=partial(pick_error, inputs[0]),
            error_limit=scored.ERROR_LIMIT,
            flops=logits_flops(shape.num_heads, call.pairs, layout.columns),
            bytes_moved=moved + topk_bytes(0, shape.tokens, shape.topk),
            roof=roof,
            launch_bound=shape.tokens <= EAGER_TOKENS,
        )

    return trial


BENCHMARKS = {"indexer_select": Family(pick_shapes, pick_trials, ("indexer_select",))}
