"""The cases of sparse attention over rows: plain data, made from a spec and from where it runs.

Every case poisons irrelevant data: KV rows that no index names (row 0 among them), the bytes between rows and
around buffers, and buffers to be written are NaN; entries of indices that do not count name poisoned rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mlagen.verify.call.case import SHARED, SM90, SWAP_AB, Case
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.patterns import INDEX_PROMISES, SHARES, SINK_PROMISES
from mlagen.verify.checks import merges, out_rope, pairs, variants
from mlagen.verify.sparse_fwd.invalid import FLASH, VLLM, refused

WRAPPERS = (FLASH, VLLM)
INT32_ELEMENTS = 2**31  # elements an int32 offset reaches
UNION_STEP = 2048  # indices of a token that the list's kernel reads at a time
MANY_ROWS = 140_000  # more than the bitmap of a list has bits for


@dataclass(frozen=True)
class Problem:
    """Inputs of one attention call.

    Attributes:
        tokens, heads, topk: sizes of q and indices.
        rows: rows of kv, rounded up to whole pages where the cache has pages.
        indices: pattern of the indices, a key of mlagen.verify.call.patterns.INDEX_PATTERNS.
        length: pattern of topk_length; None: not passed.
        sink: pattern of attn_sink; None: not passed.
        scale: sm_scale as a multiple of d_qk ** -0.5; None: passed as None, which means the spec's.
        q_size: factor of Q's values.
        q, kv, out: layout in memory, a key of mlagen.verify.call.memory.LAYOUTS; `out` None: the wrapper allocates it.
        index_layout: likewise of indices.
        positions: pattern of positions, a key of mlagen.verify.checks.out_rope.PATTERNS; for specs that rotate out.
    """

    tokens: int
    heads: int
    topk: int
    rows: int
    indices: str = "random"
    length: str | None = None
    sink: str | None = None
    scale: float | None = 1.0
    q_size: float = 1.0
    q: str = "contiguous"
    kv: str = "contiguous"
    out: str | None = None
    index_layout: str = "slice"
    positions: str = "any"


@dataclass(frozen=True)
class SparseFwdCase(Case):
    """A sparse attention call against the reference.

    Attributes:
        wrapper: the wrapper called.
        problem: its inputs.
        splits: num_kv_splits; None: not passed.
        multiprocessors: size of the device that the wrapper plans for; None: as it is (8 on a CPU).
        batch_invariant: enable_batch_invariant.
    """

    wrapper: str
    problem: Problem
    splits: int | None = None
    multiprocessors: int | None = None
    batch_invariant: bool = False
    attends: ClassVar[bool] = True

    @property
    def kernels(self) -> tuple[str, ...]:
        """The sm90 kernels; rows are shared without splits, unless bits must depend on nothing but their row."""
        shares = not self.batch_invariant and (self.splits or 0) <= 1
        return (SM90, SWAP_AB, SHARED) if shares else (SM90, SWAP_AB)


class _Suite:
    """Builds cases with the sizes that suit a device and the arguments that a spec requires."""

    def __init__(self, facts: Facts, device: str) -> None:
        self.facts = facts
        self.big = device == "cuda"
        # The interpreter takes 20 to 45 ms a program: few tokens, and one tile of heads unless the case is about heads.
        self.base = Problem(tokens=3, heads=10, topk=112, rows=211)
        # A merge runs a program a head: fewer still where a call is split.
        self.split_heads = facts.num_heads if self.big else 3
        if self.big:
            self.base = Problem(tokens=17, heads=facts.num_heads, topk=facts.topk, rows=2 * facts.topk + 1001)

    def problem(self, **changes: Any) -> Problem:
        problem = replace(self.base, **changes)
        problem = replace(problem, heads=self.facts.whole_groups(problem.heads))
        if self.facts.sink == "required" and problem.sink is None:
            problem = replace(problem, sink="random")
        if self.facts.length == "required" and problem.length is None:
            problem = replace(problem, length="full")
        return problem

    def wrappers(self, problem: Problem, splits: int | None) -> list[str]:
        """The wrappers that can be given these inputs, the preferred one first."""
        found = []
        for wrapper in WRAPPERS if splits is None else WRAPPERS[::-1]:
            fits = wrapper in self.facts.wrappers
            if wrapper == VLLM:
                fits &= problem.sink is None or self.facts.sink == "required"
                fits &= problem.length is None or self.facts.length == "required"
            else:
                fits &= splits is None
            if fits:
                found.append(wrapper)
        return found

    def sparse(
        self, name: str, promise: str, *, each_wrapper: bool = False, **settings: Any
    ) -> Iterator[SparseFwdCase]:
        """One case, or one a wrapper; none if the spec lacks a feature of it."""
        case_fields = {"check", "splits", "multiprocessors", "batch_invariant", "every_target", "only_sm90", "in_full"}
        options = {key: settings.pop(key) for key in case_fields & settings.keys()}
        problem = self.problem(**settings)
        if (problem.sink and self.facts.sink == "none") or (problem.length and self.facts.length == "none"):
            return
        wrappers = self.wrappers(problem, options.get("splits"))
        for wrapper in wrappers if each_wrapper else wrappers[:1]:
            suffix = f" ({wrapper})" if each_wrapper else ""
            yield SparseFwdCase(f"sparse_fwd: {name}{suffix}", promise, wrapper, problem, **options)


def _typical(suite: _Suite) -> Iterator[SparseFwdCase]:
    facts, big = suite.facts, suite.big
    yield from suite.sparse(
        "typical", "an ordinary call gives the reference's result", each_wrapper=True, every_target=True
    )
    promise = "every stage of shared memory is used again, by a program's next tile too"
    yield from suite.sparse("long", promise, tokens=9, topk=720, splits=1, only_sm90=True, every_target=True)
    yield from suite.sparse(
        "model's own sizes",
        "the model's own heads and topk",
        tokens=8 if big else 1,
        heads=facts.num_heads,
        topk=facts.topk,
        rows=4 * facts.topk,
        indices="full",
    )
    yield from suite.sparse("single token", "a batch of one", each_wrapper=True, tokens=1)
    yield from suite.sparse(
        "many tokens", "a large batch", tokens=515 if big else 40, heads=5, topk=16 if not big else 304
    )
    if big:  # several a program, with more heads and with partials
        yield from suite.sparse("many tokens, 20 heads", "a large batch", tokens=515, heads=20, topk=304)
        yield from suite.sparse("many tokens, split", "a large batch", tokens=515, heads=20, topk=304, splits=2)
    yield from suite.sparse("no tokens", "an empty batch gives empty results", each_wrapper=True, tokens=0)


def _sizes(suite: _Suite) -> Iterator[SparseFwdCase]:
    facts, big = suite.facts, suite.big
    topks = (48, 1, 17, 80, 128)  # in 16s, which take the tile tables, and not
    for number, heads in enumerate((1, 5, 6, 12, 16, 17, 20, 32, 33, 64, 96, 128)):
        yield from suite.sparse(
            f"heads: {heads}",
            f"{heads} heads a rank, whatever the tile holds",
            every_target=heads in (17, 33, 128),
            heads=heads,
            tokens=5 if big else 1,
            topk=facts.topk if big else topks[number % len(topks)],
        )
    for topk in sorted({1, 17, 128, 2047, facts.topk + 128}):
        promise = f"{topk} indices a token, of which some are absent"
        yield from suite.sparse(f"topk: {topk}", promise, tokens=2, heads=5, topk=topk, rows=4099)
    yield from suite.sparse("rows: one", "s_kv is 1, or one page", rows=1, indices="row zero")
    yield from suite.sparse("rows: none", "s_kv is 0: every index is out of range", rows=0, indices="int32 range")


def _indices(suite: _Suite) -> Iterator[SparseFwdCase]:
    for pattern, promise in INDEX_PROMISES.items():
        yield from suite.sparse(f"indices: {pattern}", promise, every_target=pattern == "int32 range", indices=pattern)
    heads = suite.split_heads
    promise = "splits without a valid index weigh nothing"
    yield from suite.sparse("indices: late, split", promise, heads=heads, indices="late", topk=496, splits=4)
    yield from suite.sparse(
        "indices: none, split", "empty splits alone give an empty row", heads=heads, indices="none", splits=3
    )
    yield from suite.sparse(
        "topk_length: mixed", "lengths 0, 1, topk, past topk and negative", length="mixed", tokens=7
    )
    for pattern, promise in {
        "zero": "a length of 0 is an empty row",
        "too long": "a length past topk means topk",
        "negative": "a negative length is an empty row",
    }.items():
        yield from suite.sparse(f"topk_length: {pattern}", promise, length=pattern)
    for pattern in ("negative", "mixed"):
        yield from suite.sparse(
            f"topk_length: {pattern}, in splits",
            "what a split begins with does not wrap a length round",
            heads=heads,
            length=pattern,
            topk=1008,
            tokens=3,
            multiprocessors=1000,
        )


def _sinks(suite: _Suite) -> Iterator[SparseFwdCase]:
    for pattern, promise in SINK_PROMISES.items():
        yield from suite.sparse(f"sink: {pattern}", promise, sink=pattern)
    yield from suite.sparse(
        "sink: on empty rows", "an empty row stays 0 under any sink", sink="mixed", indices="some rows none"
    )
    yield from suite.sparse(
        "sink: with lengths",
        "sink and topk_length together, in splits if there are any",
        sink="mixed",
        length="mixed",
        tokens=7,
        heads=max(5, suite.split_heads),
        topk=912,
        multiprocessors=10_000,
    )


def _logits(suite: _Suite) -> Iterator[SparseFwdCase]:
    for name, scale, promise in (
        ("wide", 6.0, "maxima that rise a little and a lot from block to block are followed"),
        ("large", 40.0, "a softmax that saturates stays finite"),
        ("huge", 4e4, "logits near 1e5 lose no row"),
        ("tiny", 1e-6, "a softmax that is all but uniform"),
        ("none", 2.0**-120, "a softmax that is uniform: the mean of the valid rows"),
    ):
        yield from suite.sparse(f"logits: {name}", promise, scale=scale)
    if suite.facts.softmax_scale is not None:
        yield from suite.sparse("scale: None", "None is the spec's softmax scale", each_wrapper=True, scale=None)
    if suite.facts.dtype == "bfloat16":  # fp16 does not hold them
        promise = "a product far below -1e30 is a score like others, once scaled"
        yield from suite.sparse(
            "logits: small of huge products", promise, scale=2.0**-105, q_size=2.0**105, indices="first column"
        )


def _layouts(suite: _Suite) -> Iterator[SparseFwdCase]:
    for part, layouts in {
        "q": ("slice", "transposed", "odd"),
        "kv": ("slice", "odd"),
        "index_layout": ("contiguous", "odd"),
        "out": ("contiguous", "slice", "transposed", "odd"),
    }.items():
        for layout in layouts:
            settings: dict[str, Any] = {part: layout, "every_target": (part, layout) == ("kv", "odd")}
            promise = "a tensor may be a view of a wider buffer, whose other bytes are neither read nor written"
            yield from suite.sparse(f"layout: {part.removesuffix('_layout')} {layout}", promise, **settings)
    heads = suite.split_heads
    yield from suite.sparse(
        "layout: out odd, split", "the merge too takes any strides", heads=heads, out="odd", splits=3
    )
    few: dict[str, Any] = {"heads": 5, "topk": 48}
    rows = min(INT32_ELEMENTS // suite.facts.d_qk + 50_000, INT32_ELEMENTS - 1)
    promise = "KV row offsets are 64 bits wide"
    yield from suite.sparse(
        "offsets: kv past 2^31 elements", promise, tokens=2, rows=rows, kv="far", indices="far", **few
    )
    promise = "offsets of q, indices and out by token are 64 bits wide"
    far: dict[str, Any] = {"q": "far", "out": "far", "index_layout": "far"}
    yield from suite.sparse("offsets: tokens past 2^31 elements", promise, tokens=3, **far, **few)


def _pairs(suite: _Suite) -> Iterator[SparseFwdCase]:
    for name, promise, check in pairs.cases(suite.facts):
        settings: dict[str, Any] = {"tokens": 3, "heads": 20 if suite.big else 3, "check": check, "topk": 304}
        yield from suite.sparse(name, promise, each_wrapper=True, every_target=check == "pair", **settings)
        yield from suite.sparse(f"{name}, split", promise, splits=3, **settings)
        if suite.big:
            yield from suite.sparse(f"{name}, many heads", promise, **{**settings, "heads": 70})


def _splits(suite: _Suite) -> Iterator[SparseFwdCase]:
    for splits in (0, 1, 2, 3, 7):
        promise = "any split count gives the same result"
        yield from suite.sparse(
            f"splits: {splits}", promise, heads=suite.split_heads, topk=496, splits=splits, every_target=splits == 3
        )
    promise = "the splits of several blocks of heads"
    yield from suite.sparse("splits: blocks of heads", promise, tokens=2, heads=70, topk=144, splits=2)
    promise = "more splits than blocks of indices, and more than a merge adds at a time"
    yield from suite.sparse(
        "splits: more than there are blocks", promise, tokens=2, heads=suite.split_heads, topk=2192, splits=1000
    )
    chosen: dict[str, Any] = {"each_wrapper": True, "tokens": 2, "topk": 1008, "multiprocessors": 10_000}
    yield from suite.sparse("splits: chosen", "few tokens on a large device", heads=suite.split_heads, **chosen)
    invariant: dict[str, Any] = {"heads": suite.split_heads, "batch_invariant": True}
    promise = "batch-invariant mode gives the reference's result"
    yield from suite.sparse("batch invariant: result", promise, each_wrapper=True, topk=1104, **invariant)
    invariant["check"] = "invariance"
    promise = "a row's bits are the same in a call of one split and in wider ones"
    name = "batch invariant: rows of few indices keep their bits"
    yield from suite.sparse(name, promise, tokens=3, topk=160, **invariant)
    promise = "a row's bits are the same alone, in a larger batch, in another order and beside other rows"
    for length, suffix in ((None, ""), ("random", ", with lengths")):
        name = f"batch invariant: rows keep their bits{suffix}"
        yield from suite.sparse(name, promise, tokens=4, topk=608, length=length, **invariant)


def _neighbours(suite: _Suite) -> Iterator[SparseFwdCase]:
    facts, big = suite.facts, suite.big
    if facts.shared_indices is None:
        return
    # Not a multiple of the tokens that load rows together; and few heads, so that many such tokens fit a tile.
    sizes: dict[str, Any] = {"tokens": 38 if big else 10, "heads": 13 if big else 5, "rows": 4 * suite.base.topk}
    for share in SHARES:
        promise = "tokens that name much the same rows have each its own result"
        yield from suite.sparse(
            f"neighbours: {share} % shared", promise, indices=f"neighbours, {share} % shared", **sizes
        )
    yield from suite.sparse(
        "neighbours: lengths and sinks",
        "a token's length and empty row are its own",
        indices="neighbours, 75 % shared",
        length="mixed",
        sink="mixed",
        **sizes,
    )
    for name, check, indices, promise in (
        ("repeats", "reference", "repeats", "an index that one token names twice counts twice, and for it alone"),
        ("same bits twice", "determinism", "repeats", "two calls give the same bits where indices repeat"),
        (
            "spoilt",
            "not finite",
            "75 % shared",
            "a row that is not finite reaches the tokens that name it, and no other",
        ),
        ("one by one", "one by one", "repeats", "flagged tokens are done one by one, and no others are written"),
    ):
        yield from suite.sparse(f"neighbours: {name}", promise, check=check, indices=f"neighbours, {indices}", **sizes)
    promise = "rows of several blocks of the list"
    yield from suite.sparse(
        "rows past a block: neighbours", promise, indices="neighbours, 75 % shared", **{**sizes, "rows": 20_000}
    )
    promise = "indices of several steps of the list's kernel"
    few: dict[str, Any] = {"tokens": 5, "heads": 2, "topk": UNION_STEP + 40, "rows": 6000, "only_sm90": True}
    yield from suite.sparse("indices past a step: neighbours", promise, indices="neighbours, 75 % shared", **few)
    if big:
        promise = "rows past what one bitmap holds"
        yield from suite.sparse(
            "neighbours: many rows", promise, indices="neighbours, 50 % shared", **{**sizes, "rows": MANY_ROWS}
        )
        yield from suite.sparse(
            "neighbours: a prefill",
            "a call of so many tokens shares rows unasked",
            each_wrapper=True,
            indices="neighbours, 75 % shared",
            **{**sizes, "tokens": 1030, "heads": 64 // facts.shared_indices},
        )


def _positions(suite: _Suite) -> Iterator[SparseFwdCase]:
    if not suite.facts.out_rope:
        return
    for pattern, (_, promise) in out_rope.PATTERNS.items():
        sizes: dict[str, Any] = {"positions": pattern, "tokens": 9, "heads": suite.split_heads}
        name, every = f"positions: {pattern}", pattern in ("any", "outside")
        yield from suite.sparse(name, promise, each_wrapper=True, every_target=every, **sizes)
        yield from suite.sparse(f"{name}, many heads", promise, every_target=every, **{**sizes, "heads": 70})
        split: dict[str, Any] = {**sizes, "tokens": 3, "topk": 304, "multiprocessors": 1000}
        yield from suite.sparse(f"{name}, split", promise, every_target=every, **split)
        yield from suite.sparse(f"{name}, empty rows", promise, indices="some rows none", **sizes)


def _contract(suite: _Suite) -> Iterator[SparseFwdCase]:
    facts, heads = suite.facts, suite.split_heads
    promise = "given buffers are filled wholly and returned"
    yield from suite.sparse("contract: buffers are used", promise, check="buffers", out="contiguous", each_wrapper=True)
    for splits in (1, 2):
        promise = "a caller that wants no LSE gets the same out"
        yield from suite.sparse(
            f"contract: out alone, splits {splits}", promise, check="out alone", heads=heads, splits=splits
        )
    promise = "a given workspace holds the splits, and a smaller one takes the tokens in pieces"
    yield from suite.sparse("workspace: forced splits", promise, check="workspace", heads=heads, topk=304, splits=3)
    yield from suite.sparse(
        "workspace: with sink and lengths",
        promise,
        check="workspace",
        heads=heads,
        topk=1104,
        sink=None if facts.sink == "none" else "mixed",
        length=None if facts.length == "none" else "mixed",
        batch_invariant=True,
    )
    promise = "two calls give the same bits"
    yield from suite.sparse("contract: same bits twice", promise, check="determinism")
    yield from suite.sparse(
        "contract: same bits twice, split", promise, check="determinism", heads=heads, splits=3, topk=304
    )
    promise = "torch's default dtype and device are neither read nor changed"
    yield from suite.sparse("contract: torch's defaults", promise, check="defaults", heads=heads, splits=2)
    if suite.big:
        yield from suite.sparse(
            "contract: current stream", "launches go to the current stream", check="stream", each_wrapper=True
        )
        yield from suite.sparse(
            "contract: graph", "a captured call replays on new inputs", check="graph", each_wrapper=True, tokens=2
        )


def _merged(suite: _Suite) -> Iterator[SparseFwdCase]:
    for name, changes in merges.chains(suite.facts.wrappers, suite.facts.sink):
        promise = merges.PROMISES[changes["check"]]
        sizes = {"heads": suite.split_heads, "indices": "some rows none"}
        yield from suite.sparse(name, promise, each_wrapper=True, **sizes, **changes)


def _variants(suite: _Suite) -> Iterator[SparseFwdCase]:
    facts = suite.facts
    lengths, sinks = (variants.choices(said, "random") for said in (facts.length, facts.sink))
    for length, sink in itertools.product(lengths, sinks):
        suffix = "".join([", lengths" if length else "", ", sink" if sink else ""])

        def case(
            name: str,
            check: str,
            topk: int,
            *,
            length: Any = length,
            sink: Any = sink,
            suffix: str = suffix,
            **own: Any,
        ) -> Iterator[SparseFwdCase]:
            sizes = {"tokens": 1, "heads": 1, "rows": 60, "in_full": True, **own}
            promise = variants.PROMISES.get(check, "flagged tokens are done one by one")
            named = f"variants: {name}{suffix}"
            return suite.sparse(named, promise, check=check, topk=topk, length=length, sink=sink, **sizes)

        # Enough for two steps of the widest tile; and no multiple of 16, which takes the small ones.
        yield from case("tiles", variants.TILES, 144)
        for layout in ("contiguous", "odd"):
            yield from case(f"small, {layout}", variants.SMALL, 33, kv=layout, out=layout)
            if length == lengths[0]:
                yield from case(f"combine, {layout}", variants.SPLITS, 511, kv=layout, out=layout)  # steps of 16
        for heads in (1, 17):
            yield from case(f"sm90, {heads} heads", variants.TILES, 144, heads=heads, only_sm90=True, every_target=True)
        if facts.shared_indices is not None:
            yield from case("one by one", "one by one", 33, tokens=10, rows=400, indices="neighbours, repeats")


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package; see mlagen.verify.families."""
    facts = Facts.of(spec)
    if not set(facts.wrappers) & set(WRAPPERS):
        return []
    suite = _Suite(facts, device)
    found: list[Case] = []
    for part in (
        _typical,
        _sizes,
        _indices,
        _sinks,
        _logits,
        _layouts,
        _pairs,
        _splits,
        _neighbours,
        _positions,
        _contract,
        _merged,
        _variants,
    ):
        found += part(suite)
    return [*found, *refused(facts)]
