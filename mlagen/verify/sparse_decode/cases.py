"""The cases of sparse attention over a paged cache: plain data, made from a spec and from where it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from mlagen.verify.call.case import E4M3, SM90, Case
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.patterns import INDEX_PROMISES, LENGTH_PROMISES, SINK_PROMISES
from mlagen.verify.checks import merges, pairs
from mlagen.verify.checks.decode import FLASH
from mlagen.verify.sparse_decode import e4m3
from mlagen.verify.sparse_decode.facts import CacheFacts
from mlagen.verify.sparse_decode.invalid import refused
from mlagen.verify.sparse_decode.variants import position_cases, quantised_cases, variant_cases


@dataclass(frozen=True)
class Listing:
    """One list of indices and the cache that it is about.

    Attributes:
        topk: indices a token.
        rows: tokens of the cache, rounded up to whole pages.
        block_size: tokens a page.
        indices: pattern of the indices, a key of mlagen.verify.call.patterns.INDEX_PATTERNS.
        length: pattern of the lengths; None: not passed.
        cache: layout in memory, of mlagen.verify.call.memory.empty_pages.
        contents: "encoded": normal rows as writers encode them; "any": any code and any scale; "wide": rows of any code
                and of scales that no fp16 tile holds together.
        poison: byte of irrelevant data.
        dtype: of a quantised cache's tensor.
    """

    topk: int = 112
    rows: int = 211
    block_size: int = 64
    indices: str = "random"
    length: str | None = None
    cache: str = "end to end"
    contents: str = "encoded"
    poison: int = 0xFF
    dtype: torch.dtype = torch.uint8


@dataclass(frozen=True)
class CacheProblem:
    """Inputs of one call.

    Attributes:
        requests, s_q, heads: sizes of q.
        main, extra: the lists of indices; `extra` None: no second cache is passed.
        sink: pattern of attn_sink; None: not passed.
        scale: softmax_scale as a multiple of d_qk ** -0.5; None: not passed.
        q_scale: of a q of e4m3; None: it is of the model's dtype.
        wide_q: heads of q are larger and smaller than fp16 holds.
        q, out, index_layout: layout in memory, a key of LAYOUTS in call.memory, or, for inputs, "by position",
            where requests are innermost; `out` None: the wrapper allocates it.
        positions: pattern of positions, a key of mlagen.verify.checks.out_rope.PATTERNS; for specs that rotate out.
    """

    requests: int = 3
    s_q: int = 1
    heads: int = 10
    main: Listing = field(default_factory=Listing)
    extra: Listing | None = None
    sink: str | None = None
    scale: float | None = None
    q_scale: float | None = None
    wide_q: bool = False
    q: str = "contiguous"
    out: str | None = None
    index_layout: str = "slice"
    positions: str = "any"

    @property
    def tokens(self) -> int:
        """Query tokens of all requests."""
        return self.requests * self.s_q

    @property
    def listings(self) -> list[Listing]:
        """The lists that are there."""
        return [self.main] if self.extra is None else [self.main, self.extra]


@dataclass(frozen=True)
class SparseDecodeCase(Case):
    """A call against the reference.

    Attributes:
        problem: its inputs.
        multiprocessors: size of the device that the wrapper plans for; None: as it is.
        batch_invariant: enable_batch_invariant.
    """

    problem: CacheProblem
    multiprocessors: int | None = None
    batch_invariant: bool = False
    attends: ClassVar[bool] = True

    @property
    def kernels(self) -> tuple[str, ...]:
        """The sm90 kernel for its q."""
        return (SM90,) if self.problem.q_scale is None else (E4M3,)


class _Suite:
    """Builds cases with the sizes that suit a device and the arguments that a spec requires."""

    def __init__(self, known: CacheFacts, device: str) -> None:
        self.known, self.facts = known, known.facts
        self.big = device == "cuda"
        self.has_extra = len(known.layouts) > 1
        self.planar = [layout.planar for layout in known.layouts]
        self.base = CacheProblem(main=Listing(), extra=Listing(80, 97, 7) if self.has_extra else None)
        # A merge runs a program a head: fewer where a call is split.
        self.split_heads = self.facts.num_heads if self.big else 3
        if self.big:
            main, *extra = (Listing(topk, 2 * topk + 1001) for topk in known.topks)
            extra_listing = replace(extra[0], block_size=2) if extra else None
            self.base = CacheProblem(17, 1, self.facts.num_heads, main, extra_listing)

    def case(
        self,
        name: str,
        promise: str,
        *,
        main: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        absent: bool = False,
        **settings: Any,
    ) -> Iterator[SparseDecodeCase]:
        """One case; none if the spec lacks a feature of it. `main` and `extra` are changes of the lists."""
        options = {key: settings.pop(key) for key in SparseDecodeCase.__dataclass_fields__.keys() & settings.keys()}
        if extra is not None and not self.has_extra:
            return
        if not self.big:  # in one pass, unless a case is about splits: merges take the interpreter long
            options.setdefault("multiprocessors", 1)
        problem = replace(self.base, main=replace(self.base.main, **(main or {})), **settings)
        problem = replace(problem, heads=self.facts.whole_groups(problem.heads))
        if problem.extra is not None:
            problem = replace(problem, extra=None if absent else replace(problem.extra, **(extra or {})))
        if self.facts.sink == "required" and problem.sink is None:
            problem = replace(problem, sink="random")
        if self.facts.length == "required":
            problem = replace(problem, main=replace(problem.main, length=problem.main.length or "full"))
            if problem.extra is not None:
                problem = replace(problem, extra=replace(problem.extra, length=problem.extra.length or "full"))
        given = any(listing.length for listing in problem.listings)
        if (problem.sink and self.facts.sink == "none") or (given and self.facts.length == "none"):
            return
        yield SparseDecodeCase(f"sparse_decode: {name}", promise, problem, **options)

    def each_list(
        self, name: str, promise: str, changes: Mapping[str, Any], **settings: Any
    ) -> Iterator[SparseDecodeCase]:
        """A case about the first list, and one about the second if there is one."""
        yield from self.case(name, promise, main=changes, **settings)
        yield from self.case(f"{name}, second cache", promise, extra=changes, **settings)


def _typical(suite: _Suite) -> Iterator[SparseDecodeCase]:
    big, facts, topks = suite.big, suite.facts, suite.known.topks
    promise = "an ordinary call gives the reference's result"
    yield from suite.case("typical", promise, every_target=True)
    promise = "every stage of shared memory is used again, by a program's next tile too"
    yield from suite.case("long", promise, main={"topk": 720}, only_sm90=True, every_target=True)
    promise = "an ordinary call in splits gives the reference's result"
    yield from suite.case("typical, in splits", promise, every_target=True, multiprocessors=None)
    own: dict[str, Any] = {"extra": {"topk": topks[1], "rows": 4 * topks[1], "indices": "full"}} if topks[1:] else {}
    yield from suite.case(
        "model's own sizes",
        "the model's own heads and indices",
        requests=8 if big else 1,
        heads=facts.num_heads,
        main={"topk": topks[0], "rows": 4 * topks[0], "indices": "full"},
        **own,
    )
    yield from suite.case("single request", "a batch of one", requests=1)
    yield from suite.case("many requests", "a large batch", requests=515 if big else 25, heads=5, main={"topk": 32})
    yield from suite.case("no requests", "an empty batch gives empty results", requests=0)
    yield from suite.case("no query tokens", "requests without query tokens give empty results", s_q=0)
    for s_q in (2, 4):
        yield from suite.case(
            f"s_q: {s_q}",
            "query tokens of a request share its lengths and have their own indices",
            requests=2,
            s_q=s_q,
            heads=5,
            main={"topk": 48, "length": "mixed"} if facts.length != "none" else {"topk": 48},
        )
    for number, heads in enumerate((1, 5, 6, 12, 16, 17, 20, 32, 33, 64, 96, 128)):
        yield from suite.case(
            f"heads: {heads}",
            f"{heads} heads a rank, whatever the tile holds",
            every_target=heads in (17, 128),
            heads=heads,
            requests=5 if big else 1,
            main={"topk": (48, 1, 17, 64)[number % 4]},
        )
    for topk in (1, 17, 64, 2047 if big else 301):
        yield from suite.each_list(
            f"topk: {topk}", f"{topk} indices a token", {"topk": topk, "rows": 999}, requests=2, heads=5
        )


def _caches(suite: _Suite) -> Iterator[SparseDecodeCase]:
    for size in (1, 2, 53, 64, 69):
        yield from suite.each_list(
            f"page size: {size}", "any page size", {"block_size": size}, requests=2, every_target=size == 53
        )
    for layout, promise in {
        "page gap": "pages may lie apart; the bytes between them are not read",
        "odd": "pages and rows may begin at any multiple of a stored value",
    }.items():
        yield from suite.each_list(f"cache: {layout}", promise, {"cache": layout, "block_size": 53}, requests=2)
    if suite.known.layouts[0].tensors:
        promise = "each tensor of the cache may begin at any multiple of its values"
        yield from suite.case("cache: odd beside", promise, main={"cache": "odd beside", "block_size": 53}, requests=2)
    promise = "pages may follow without the bytes that round them up"
    yield from suite.each_list("cache: tight", promise, {"cache": "tight", "block_size": 54}, requests=2)
    promise = "rows may lie apart; the bytes between them are not read"
    changes = {"cache": "row gap", "block_size": 5}
    if not suite.planar[0]:
        yield from suite.case("cache: row gap", promise, main=changes, requests=2)
    if suite.has_extra and not suite.planar[1]:
        yield from suite.case("cache: row gap, second cache", promise, extra=changes, requests=2)


def _contents(suite: _Suite) -> Iterator[SparseDecodeCase]:
    promise = "a row is its codes times its scales, whatever they are"
    yield from suite.each_list(
        "cache: any codes and scales", promise, {"contents": "any", "indices": "full"}, requests=2, every_target=True
    )
    if suite.facts.dtype == "bfloat16":
        promise = "rows of scales that the sm90 kernel's tiles do not hold are as good as others"
        yield from suite.each_list(
            "cache: scales far apart", promise, {"contents": "wide", "indices": "full"}, requests=2, every_target=True
        )
        yield from suite.each_list(
            "cache: scales far apart, in splits",
            "splits of rows whose values are far apart are as good as others, logits all alike",
            {"contents": "wide", "indices": "full"},
            scale=2.0**-60,
            requests=2,
            multiprocessors=None,
        )
    yield from suite.each_list(
        "cache: poison 0x7f", "bytes that no index names do not matter", {"poison": 0x7F}, requests=2
    )
    one_page = {"rows": 1, "indices": "last row"}
    yield from suite.each_list("cache: one page", "a cache of one page", one_page, requests=1)
    promise = "the stride of a dimension of one place leads nowhere, so any will do"
    for what, size in (("page", 64), ("row a page", 1)):
        changes = {"cache": "idle", "rows": 60, "block_size": size}
        yield from suite.each_list(f"cache: one {what}, odd stride", promise, changes, requests=1)
    yield from suite.each_list(
        "cache: no pages", "every index is out of range", {"rows": 0, "indices": "int32 range"}, requests=1
    )
    for dtype in (torch.int8, torch.float8_e4m3fn):
        changes = {"dtype": dtype}
        name = f"cache: {str(dtype).removeprefix('torch.')}"
        promise = "a quantised cache may be a tensor of any 8-bit dtype"
        if suite.known.layouts[0].quantised:
            yield from suite.case(name, promise, main=changes, requests=1, heads=5)
        if suite.has_extra and suite.known.layouts[1].quantised:
            yield from suite.case(f"{name}, second cache", promise, extra=changes, requests=1, heads=5)
    yield from suite.each_list(
        "offsets: cache past 2^31 bytes",
        "page offsets are 64 bits wide",
        {"cache": "far", "block_size": 16, "rows": 48, "topk": 32, "indices": "full"},
        requests=1,
        heads=5,
    )
    yield from suite.case(
        "offsets: tokens past 2^31 elements",
        "offsets of q, indices and out by token are 64 bits wide",
        heads=5,
        q="far",
        out="far",
        index_layout="far",
        main={"topk": 48},
    )


def _lists(suite: _Suite) -> Iterator[SparseDecodeCase]:
    for pattern, promise in INDEX_PROMISES.items():
        yield from suite.each_list(
            f"indices: {pattern}", promise, {"indices": pattern}, requests=2, every_target=pattern == "int32 range"
        )
    for pattern, promise in LENGTH_PROMISES.items():
        requests = 7 if pattern == "mixed" else 2
        yield from suite.each_list(f"length: {pattern}", promise, {"length": pattern}, requests=requests, heads=5)
    both = {"length": "mixed", "topk": 64}
    yield from suite.case("length: both lists", "each list has its own", requests=7, main=both, extra=both)
    yield from suite.case("lists: no second cache", "the second cache may be left out", absent=True, every_target=True)
    yield from suite.case("lists: first empty", "topk may be 0", main={"topk": 0}, requests=2)
    yield from suite.case("lists: second empty", "extra_topk may be 0", extra={"topk": 0}, requests=2)
    yield from suite.case(
        "lists: both empty", "a token without any index is an empty row", main={"topk": 0}, extra={"topk": 0}
    )
    empty = {"indices": "none"}
    promise = "tokens without a valid index give 0 and the empty row's LSE"
    yield from suite.case("lists: nothing valid", promise, main=empty, extra=empty if suite.has_extra else None)
    yield from suite.case(
        "lists: only the second", "tokens with valid indices in the second list alone", main=empty, extra={}
    )


def _numbers(suite: _Suite) -> Iterator[SparseDecodeCase]:
    for pattern, promise in SINK_PROMISES.items():
        yield from suite.case(f"sink: {pattern}", promise, sink=pattern, requests=2)
    none = {"indices": "some rows none"}
    promise = "an empty row stays 0 under any sink"
    yield from suite.case(
        "sink: on empty rows", promise, sink="mixed", main=none, extra=none if suite.has_extra else None
    )
    for name, scale, promise in (
        ("large", 40.0, "a softmax that saturates stays finite"),
        ("tiny", 1e-6, "a softmax that is all but uniform"),
        ("none", 2.0**-120, "a softmax that is uniform: the mean of the valid rows"),
    ):
        yield from suite.case(f"logits: {name}", promise, scale=scale, requests=2)
    if suite.facts.dtype == "bfloat16":
        promise = "heads of q that the sm90 kernel's tiles do not hold are as good as others"
        yield from suite.case("logits: heads far apart", promise, wide_q=True, requests=2)
        yield from suite.case(
            "logits: heads far apart, in splits", promise, wide_q=True, requests=2, multiprocessors=None
        )
    promise = "a head of q with NaN in it gives NaN, unless no index counts, and no other head's bits change"
    yield from suite.case("logits: NaN", promise, check="nan", s_q=2)
    yield from suite.case("logits: NaN, in splits", promise, check="nan", multiprocessors=None)


def _layouts(suite: _Suite) -> Iterator[SparseDecodeCase]:
    promise = "a tensor may be a view of a wider buffer, whose other bytes are neither read nor written"
    for part, layouts in {
        "q": ("slice", "transposed", "odd", "by position"),
        "index_layout": ("contiguous", "odd", "by position"),
        "out": ("contiguous", "slice", "transposed", "odd"),
    }.items():
        for layout in layouts:
            settings: dict[str, Any] = {part: layout, "every_target": (part, layout) == ("q", "odd")}
            name = f"layout: {part.removesuffix('_layout')} {layout}"
            yield from suite.case(name, promise, requests=2, s_q=2, heads=5, main={"topk": 48}, **settings)
    promise = "the merge too takes any strides"
    yield from suite.case(
        "layout: out odd, split", promise, heads=suite.split_heads, out="odd", main={"topk": 304}, multiprocessors=1000
    )


def _pairs(suite: _Suite) -> Iterator[SparseDecodeCase]:
    for name, promise, check in pairs.cases(suite.facts):
        far = check == "pair, far"  # only entries of the first dimension: requests of one token
        sizes = {"requests": 3, "s_q": 1} if far else {"requests": 2, "s_q": 2}
        settings: dict[str, Any] = {"check": check, "heads": suite.split_heads, **sizes}
        yield from suite.case(name, promise, every_target=check == "pair", main={"topk": 112}, **settings)
        yield from suite.case(f"{name}, split", promise, main={"topk": 304}, multiprocessors=1000, **settings)


def _splits(suite: _Suite) -> Iterator[SparseDecodeCase]:
    many = {"topk": 304, "rows": 999}
    two: dict[str, Any] = {"requests": 2, "heads": suite.split_heads}
    promise = "wherever a list or the space between the lists is cut"
    for count in (4, 7, 20, 1000):
        name = f"splits: {count} multiprocessors"
        yield from suite.case(name, promise, main=many, multiprocessors=count, every_target=count == 7, **two)
    yield from suite.case(
        "splits: with lengths and sink",
        "what a split begins with does not wrap a length round",
        requests=7,
        heads=3,
        main={**many, "length": "mixed"},
        extra={"length": "mixed"} if suite.has_extra else None,
        sink=None if suite.facts.sink == "none" else "mixed",
        multiprocessors=10_000,
    )
    promise = "the splits of several blocks of heads"
    yield from suite.case("splits: blocks of heads", promise, main=many, requests=2, heads=70, multiprocessors=20)
    two["multiprocessors"] = 1000
    promise = "a length of INT32_MIN is an empty list in every split"
    negative = {**many, "length": "negative"}
    yield from suite.each_list("splits: negative lengths", promise, negative, **{**two, "heads": 3})
    promise = "splits without a valid index weigh nothing"
    for pattern in ("late", "none"):
        yield from suite.case(f"splits: indices {pattern}", promise, main={**many, "indices": pattern}, **two)
    promise = "splits of the first list alone"
    yield from suite.case("splits: no second cache", promise, main=many, absent=True, **two)


def _batch_invariant(suite: _Suite) -> Iterator[SparseDecodeCase]:
    wide = {"topk": 608, "rows": 999}
    invariant: dict[str, Any] = {"heads": suite.split_heads, "batch_invariant": True}
    promise = "batch-invariant mode gives the reference's result"
    yield from suite.case("batch invariant: result", promise, requests=2, main=wide, **invariant)
    invariant["check"] = "invariance"
    promise = "a row's bits are the same in a call of one split and in wider ones"
    name = "batch invariant: rows of few indices keep their bits"
    yield from suite.case(name, promise, requests=3, main={"topk": 160, "rows": 999}, **invariant)
    promise = "a row's bits are the same alone, in a larger batch, in another order and in a request of several tokens"
    for lists, suffix in (({}, ""), ({"length": "random"}, ", with lengths")):
        name = f"batch invariant: rows keep their bits{suffix}"
        extra = lists if suite.has_extra else None
        yield from suite.case(name, promise, requests=4, main={**wide, **lists}, extra=extra, **invariant)


def _contract(suite: _Suite) -> Iterator[SparseDecodeCase]:
    heads = suite.split_heads
    split: dict[str, Any] = {"heads": heads, "main": {"topk": 304}, "multiprocessors": 1000}
    promise = "a given out is filled wholly and returned"
    yield from suite.case("contract: out is used", promise, check="buffers", out="contiguous", requests=2, s_q=2)
    promise = "a given workspace holds the splits, and a smaller one takes the tokens in pieces"
    invariant: dict[str, Any] = {"check": "workspace", "heads": heads, "batch_invariant": True}
    yield from suite.case("workspace: in pieces", promise, requests=2, s_q=2, main={"topk": 608}, **invariant)
    yield from suite.case(
        "workspace: with sink and lengths",
        promise,
        requests=3,
        main={"topk": 608} if suite.facts.length == "none" else {"topk": 608, "length": "mixed"},
        sink=None if suite.facts.sink == "none" else "mixed",
        **invariant,
    )
    promise = "two calls give the same bits"
    yield from suite.case("contract: same bits twice", promise, check="determinism")
    yield from suite.case("contract: same bits twice, split", promise, check="determinism", **split)
    promise = "torch's default dtype and device are neither read nor changed"
    yield from suite.case("contract: torch's defaults", promise, check="defaults", **split)
    promise = "metadata serves calls of the sizes of its first one, and no others"
    yield from suite.case("contract: metadata", promise, check="metadata", requests=2, heads=5, main={"topk": 32})
    promise = "what a wrapper knows of a call does not let one pass of which an argument alone is wrong"
    yield from suite.case("contract: refusals after a call", promise, check="refusals", requests=1)
    if suite.big:
        yield from suite.case("contract: current stream", "launches go to the current stream", check="stream")
        yield from suite.case("contract: graph", "a captured call replays on new inputs", check="graph", requests=2)


def _e4m3(suite: _Suite) -> Iterator[SparseDecodeCase]:
    changes: dict[str, Any]
    if suite.known.e4m3:
        for name, promise, settings in e4m3.settings(suite.known, suite.split_heads, big=suite.big):
            changes = {"q_scale": 0.5, **settings}
            yield from suite.case(f"e4m3: {name}", promise, **changes)
        for name, promise, check in pairs.cases(suite.facts):
            if check != "pair, far":
                changes = {"check": check, "heads": suite.split_heads, "requests": 2, "s_q": 2, "q_scale": 0.5}
                yield from suite.case(f"{name}, e4m3", promise, **changes)


def _merged(suite: _Suite) -> Iterator[SparseDecodeCase]:
    for name, changes in merges.chains(suite.facts.wrappers, suite.facts.sink):
        lists = {
            "main": {"indices": "some rows none"},
            "extra": {"indices": "some rows none"} if suite.has_extra else None,
        }
        sizes: dict[str, Any] = {"requests": 2, "s_q": 2, "heads": suite.split_heads, **lists}
        yield from suite.case(name, merges.PROMISES[changes["check"]], **sizes, **changes)


PARTS = (
    _typical,
    _caches,
    _contents,
    _lists,
    _numbers,
    _layouts,
    _pairs,
    _splits,
    _batch_invariant,
    position_cases,
    quantised_cases,
    _contract,
    _e4m3,
    _merged,
    variant_cases,
)


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package, none where it lacks the wrapper; see mlagen.verify.families."""
    if FLASH not in spec["wrappers"] or Facts.of(spec).kind != "sparse":
        return []
    known = CacheFacts.of(spec)
    suite = _Suite(known, device)
    found: list[Case] = []
    for part in PARTS:
        found += part(suite)
    return [*found, *refused(known)]
