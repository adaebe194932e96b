"""Attention over a paged cache: its cases, their inputs, its reference and the code that runs them.

The reference decodes each row that an index names with mlagen.layout.codec, rounds it to the model's dtype as kernels
do, and attends to those rows. Every other byte of a cache is poison, 0xff or 0x7f: NaN, infinity or the largest value,
whatever it is read as.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from mlagen.layout import CacheLayout, DataField, ScalesField, layouts_of
from mlagen.layout.codec import planes_of, read, write
from mlagen.verify import tolerance
from mlagen.verify.cases import Case, Problem
from mlagen.verify.changes import Change, cache_changes, gives, tensor_changes, with_changed
from mlagen.verify.checks import NAN, CaseFailedError, Subject, poisoned_allocations, sm90_modules
from mlagen.verify.facts import Facts
from mlagen.verify.inputs import (
    FAR_STRIDE,
    GUARD,
    INDEX_PATTERNS,
    LAYOUTS,
    Placed,
    allocate,
    bits,
    idle_strides,
    is_wholly_used,
    lengths,
    named_rows,
    place,
    place_workspace,
    sinks,
)
from mlagen.verify.reference import Attention, sparse_attention
from mlagen.verify.results import Figure

WRAPPER = "flash_mla_with_kvcache"
TENSOR_SCALES = (0.4375, 0.0117)  # of the cache and of the second one
NAN_CODES = {"e4m3": (0x7F, 0xFF), "e4m3fnuz": (0x80,)}
INT32_BYTES = 2**31  # bytes that an int32 offset reaches


@dataclass(frozen=True)
class CacheFacts:
    """What a package's spec says of its caches.

    Attributes:
        facts: what it says besides.
        layouts: of the cache, and of the second one if there is one.
        topks: indices a token of each.
    """

    facts: Facts
    layouts: tuple[CacheLayout, ...]
    topks: tuple[int, ...]

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> CacheFacts:
        """The facts of `SPEC["spec"]`."""
        main, extra = layouts_of(spec)
        assert main is not None
        topk, window = spec["attention"]["topk"], spec["attention"].get("window")
        if extra is None:
            return cls(Facts.of(spec), (main,), (topk + (window or 0),))
        return cls(Facts.of(spec), (main, extra), (window or topk, topk))


@dataclass(frozen=True)
class Listing:
    """One list of indices and the cache that it is about.

    Attributes:
        topk: indices a token.
        rows: tokens of the cache, rounded up to whole pages.
        block_size: tokens a page.
        indices: pattern of the indices, a key of mlagen.verify.inputs.INDEX_PATTERNS.
        length: pattern of the lengths; None: not passed.
        cache: layout in memory: "end to end", "page gap", "row gap", "odd" (as little aligned as may be), "idle" (odd
            strides of dimensions of one place) or "far".
        contents: "encoded": normal rows as writers encode them; "any": any code and any scale; "wide": rows of any code
            and of scales that no fp16 tile holds beside each other.
        poison: byte of what must not matter.
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
        wide_q: heads of q are larger and smaller than fp16 holds.
        q, out, index_layout: layout in memory, a key of mlagen.verify.inputs.LAYOUTS, or, for inputs, "by position",
            where requests are innermost; `out` None: the wrapper allocates it.
    """

    requests: int = 3
    s_q: int = 1
    heads: int = 10
    main: Listing = field(default_factory=Listing)
    extra: Listing | None = None
    sink: str | None = None
    scale: float | None = None
    wide_q: bool = False
    q: str = "contiguous"
    out: str | None = None
    index_layout: str = "slice"

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
        check: what is asked of the result, a key of CHECKS.
        multiprocessors: size of the device that the wrapper plans for; None: as it is.
        batch_invariant: enable_batch_invariant.
    """

    problem: CacheProblem
    check: str = "reference"
    multiprocessors: int | None = None
    batch_invariant: bool = False

    @property
    def attends(self) -> bool:
        """True."""
        return True


@dataclass(frozen=True)
class SparseDecodeRefusalCase(Case):
    """A call that the wrapper must refuse with a ValueError or TypeError that names the argument.

    Attributes:
        argument: the argument that is off.
        text: what the error says besides.
        change: makes the arguments of a valid call wrong, in place.
    """

    argument: str
    text: str
    change: Callable[[dict[str, Any]], None]


KINDS = (SparseDecodeCase, SparseDecodeRefusalCase)


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
        """One case; none if the spec lacks what it needs. `main` and `extra` are changes of the lists."""
        options = {key: settings.pop(key) for key in SparseDecodeCase.__dataclass_fields__.keys() & settings.keys()}
        if extra is not None and not self.has_extra:
            return
        if not self.big:  # in one pass, unless a case is about splits: merges take the interpreter long
            options.setdefault("multiprocessors", 1)
        problem = replace(self.base, main=replace(self.base.main, **(main or {})), **settings)
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
    promise = "rows may lie apart; the bytes between them are not read"
    changes = {"cache": "row gap", "block_size": 5}
    if not suite.planar[0]:
        yield from suite.case("cache: row gap", promise, main=changes, requests=2)
    if suite.has_extra and not suite.planar[1]:
        yield from suite.case("cache: row gap, second cache", promise, extra=changes, requests=2)
    yield from suite.each_list(
        "cache: any codes and scales",
        "a row is its codes times its scales, whatever they are",
        {"contents": "any", "indices": "full"},
        requests=2,
        every_target=True,
    )
    if suite.facts.dtype == "bfloat16":
        yield from suite.each_list(
            "cache: scales far apart",
            "rows of scales that the sm90 kernel's tiles do not hold are as good as others",
            {"contents": "wide", "indices": "full"},
            requests=2,
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
    for pattern, promise in {
        "none": "a list whose indices are all -1 adds nothing",
        "some rows none": "rows without a valid index stand between ordinary ones",
        "int32 range": "any int32 outside the cache is skipped, INT32_MIN and INT32_MAX among them",
        "last lane": "the one valid index stands in the last lane",
        "first lane": "the one valid index stands in the first lane",
        "late": "leading tiles without a valid index do not spoil later ones",
        "duplicates": "an index that occurs n times counts n times",
        "last row": "the last row of the cache is reached, the one past it is not",
        "row zero": "row 0 is read where an index names it",
    }.items():
        yield from suite.each_list(
            f"indices: {pattern}", promise, {"indices": pattern}, requests=2, every_target=pattern == "int32 range"
        )
    for pattern, promise in {
        "zero": "a length of 0 is an empty list",
        "too long": "a length past the indices means all",
        "negative": "a negative length is an empty list",
        "mixed": "lengths 0, 1, all, past all and negative",
    }.items():
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
    yield from suite.case(
        "lists: nothing valid",
        "tokens without a valid index give 0 and the empty row's LSE",
        main=empty,
        extra=empty if suite.has_extra else None,
    )
    yield from suite.case(
        "lists: only the second", "tokens with valid indices in the second list alone", main=empty, extra={}
    )


def _numbers(suite: _Suite) -> Iterator[SparseDecodeCase]:
    for pattern, promise in {
        "random": "the sink scales out and leaves lse alone",
        "+inf": "a sink of +inf leaves out 0 and lse as it is",
        "-inf": "a sink of -inf changes nothing",
        "extreme": "a sink far above or below the logits neither overflows nor loses the row",
    }.items():
        yield from suite.case(f"sink: {pattern}", promise, sink=pattern, requests=2)
    none = {"indices": "some rows none"}
    yield from suite.case(
        "sink: on empty rows",
        "an empty row stays 0 under any sink",
        sink="mixed",
        main=none,
        extra=none if suite.has_extra else None,
    )
    for name, scale, promise in (
        ("large", 40.0, "a softmax that saturates stays finite"),
        ("tiny", 1e-6, "a softmax that is all but uniform"),
        ("zero", 0.0, "softmax_scale 0: the mean of the valid rows"),
        ("negative", -1.0, "the maximum is that of the scaled logits"),
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
    yield from suite.case(
        "layout: out odd, split",
        "the merge too takes any strides",
        heads=suite.split_heads,
        out="odd",
        main={"topk": 304},
        multiprocessors=1000,
    )


def _splits(suite: _Suite) -> Iterator[SparseDecodeCase]:
    heads = suite.split_heads
    many = {"topk": 304, "rows": 999}
    for multiprocessors in (4, 7, 20, 1000):
        yield from suite.case(
            f"splits: {multiprocessors} multiprocessors",
            "wherever a list or the space between the lists is cut",
            requests=2,
            heads=heads,
            main=many,
            multiprocessors=multiprocessors,
            every_target=multiprocessors == 7,
        )
    mixed = {**many, "length": "mixed"}
    yield from suite.case(
        "splits: with lengths and sink",
        "what a split begins with does not wrap a length round",
        requests=7,
        heads=3,
        main=mixed,
        extra={"length": "mixed"} if suite.has_extra else None,
        sink=None if suite.facts.sink == "none" else "mixed",
        multiprocessors=10_000,
    )
    yield from suite.each_list(
        "splits: negative lengths",
        "a length of INT32_MIN is an empty list in every split",
        {**many, "length": "negative"},
        requests=2,
        heads=3,
        multiprocessors=1000,
    )
    for pattern in ("late", "none"):
        yield from suite.case(
            f"splits: indices {pattern}",
            "splits without a valid index weigh nothing",
            requests=2,
            heads=heads,
            main={**many, "indices": pattern},
            multiprocessors=1000,
        )
    yield from suite.case(
        "splits: no second cache",
        "splits of the first list alone",
        requests=2,
        heads=heads,
        main=many,
        absent=True,
        multiprocessors=1000,
    )
    wide = {"topk": 608, "rows": 999}
    yield from suite.case(
        "batch invariant: result",
        "batch-invariant mode gives the reference's result",
        requests=2,
        heads=heads,
        main=wide,
        batch_invariant=True,
    )
    yield from suite.case(
        "batch invariant: rows of few indices keep their bits",
        "a row's bits are the same in a call of one split and in wider ones",
        check="invariance",
        requests=3,
        heads=heads,
        main={"topk": 160, "rows": 999},
        batch_invariant=True,
    )
    for length in (None, "random"):
        lists = {"length": length} if length else {}
        yield from suite.case(
            "batch invariant: rows keep their bits" + (", with lengths" if length else ""),
            "a row's bits are the same alone, in a larger batch, in another order and in a request of several tokens",
            check="invariance",
            requests=4,
            heads=heads,
            main={**wide, **lists},
            extra=lists if suite.has_extra else None,
            batch_invariant=True,
        )


def _manners(suite: _Suite) -> Iterator[SparseDecodeCase]:
    heads = suite.split_heads
    split: dict[str, Any] = {"heads": heads, "main": {"topk": 304}, "multiprocessors": 1000}
    promise = "a given out is filled wholly and returned"
    yield from suite.case("manners: out is used", promise, check="buffers", out="contiguous", requests=2, s_q=2)
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
    yield from suite.case("manners: same bits twice", promise, check="determinism")
    yield from suite.case("manners: same bits twice, split", promise, check="determinism", **split)
    yield from suite.case(
        "manners: torch's defaults",
        "torch's default dtype and device are neither read nor changed",
        check="defaults",
        **split,
    )
    yield from suite.case(
        "manners: metadata",
        "metadata serves calls of the sizes of its first one, and no others",
        check="metadata",
        requests=2,
        heads=5,
        main={"topk": 32},
    )
    yield from suite.case(
        "manners: refusals after a call",
        "what a wrapper knows of a call does not let one pass of which an argument alone is wrong",
        check="refusals",
        requests=1,
    )
    if suite.big:
        yield from suite.case("manners: current stream", "launches go to the current stream", check="stream")
        yield from suite.case("manners: graph", "a captured call replays on new inputs", check="graph", requests=2)


def _argument_changes(known: CacheFacts) -> Iterator[Change]:
    facts, layout = known.facts, known.layouts[0]
    other = torch.float16 if facts.dtype == "bfloat16" else torch.bfloat16
    yield from tensor_changes("q", other, first=True)
    yield "q", "wider than a row", with_changed("q", lambda t: t.new_zeros(*t.shape[:-1], t.shape[-1] + 8)), ""
    yield from cache_changes("k_cache", layout)
    yield "k_cache", "two heads", with_changed("k_cache", lambda t: t.repeat(1, 1, 2, 1)), ""
    yield "indices", "missing", gives("indices", lambda _: None), "dense"
    yield from tensor_changes("indices", torch.int64)
    yield "indices", "a request too many", with_changed("indices", lambda t: torch.cat([t, t[:1]])), ""
    yield "indices", "more requests than q", with_changed("q", lambda t: t[:1]), ""
    yield "head_dim_v", "not the spec's", with_changed("head_dim_v", lambda d_v: d_v + 16), ""
    yield "is_fp8_kvcache", "not the layout's", with_changed("is_fp8_kvcache", lambda given: not given), layout.name
    yield "causal", "True", gives("causal", lambda _: True), ""
    yield "num_splits", "a tensor", gives("num_splits", lambda given: given["indices"]), ""
    yield "tile_scheduler_metadata", "None", gives("tile_scheduler_metadata", lambda _: None), ""
    yield "softmax_scale", "a tensor", gives("softmax_scale", lambda given: given["q"].new_ones(())), ""

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, Any]], torch.Tensor]:
        return lambda given: given["q"].new_zeros(shape, dtype=dtype)

    if facts.sink == "none":
        yield "attn_sink", "given to a spec without", gives("attn_sink", floats(4)), ""
    else:
        yield "attn_sink", "a head too many", gives("attn_sink", floats(5)), ""
        yield "attn_sink", "dtype float64", gives("attn_sink", floats(4, dtype=torch.float64)), ""
    if facts.sink == "required":
        yield "attn_sink", "missing", gives("attn_sink", lambda _: None), ""
    for prefix in ("", "extra_") if len(known.layouts) > 1 else ("",):
        name = f"{prefix}topk_length"
        if facts.length == "none":
            yield name, "given to a spec without", gives(name, floats(2, dtype=torch.int32)), ""
            continue
        yield name, "a request too many", gives(name, floats(3, dtype=torch.int32)), ""
        yield name, "dtype int64", gives(name, floats(2, dtype=torch.int64)), ""
        if facts.length == "required":
            yield name, "missing", gives(name, lambda _: None), ""
    out = torch.float32, getattr(torch, facts.dtype)
    yield "out", "dtype float32", gives("out", floats(2, 2, 4, facts.d_v, dtype=out[0])), ""
    yield "out", "too wide", gives("out", floats(2, 2, 4, facts.d_v + 8, dtype=out[1])), ""
    apart = floats(2, 3, 4, facts.d_v, dtype=out[1])
    yield "out", "requests apart", gives("out", lambda given: apart(given)[:, :2]), ""
    yield "workspace", "too small", gives("workspace", floats(16)), ""
    yield "workspace", "no tensor", gives("workspace", lambda _: [0.0]), ""
    yield "workspace", "dtype float16", gives("workspace", floats(1 << 20, dtype=torch.float16)), ""
    if len(known.layouts) > 1:
        yield from cache_changes("extra_k_cache", known.layouts[1])
        yield "extra_k_cache", "two heads", with_changed("extra_k_cache", lambda t: t.repeat(1, 1, 2, 1)), ""
        yield from tensor_changes("extra_indices_in_kvcache", torch.int64)
        yield "extra_k_cache", "missing", gives("extra_k_cache", lambda _: None), ""
        missing = gives("extra_indices_in_kvcache", lambda _: None)
        yield "extra_indices_in_kvcache", "missing", missing, ""
    else:
        for name in ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"):
            yield name, "given to a spec without", gives(name, lambda given: given["indices"]), ""


def _refusals(known: CacheFacts) -> Iterator[SparseDecodeRefusalCase]:
    for argument, name, change, text in _argument_changes(known):
        yield SparseDecodeRefusalCase(
            f"refuses: {argument}, {name} (sparse_decode)",
            f"{WRAPPER} names {argument} in a ValueError or TypeError",
            argument,
            text,
            change,
        )


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package, none where it lacks the wrapper.

    Args:
        spec: `SPEC["spec"]` of the package. A case about something that it lacks is left out.
        device: "cpu" gives sizes that the interpreter bears, "cuda" the model's own.
    """
    if WRAPPER not in spec["wrappers"] or Facts.of(spec).kind != "sparse":
        return []
    known = CacheFacts.of(spec)
    suite = _Suite(known, device)
    found: list[Case] = []
    for part in (_typical, _caches, _lists, _numbers, _layouts, _splits, _manners):
        found += part(suite)
    return [*found, *_refusals(known)]


@dataclass
class ListInputs:
    """The tensors of one list of indices and its cache.

    Attributes:
        layout: the cache's.
        cache: [pages, block_size, 1, row].
        indices: i32 [requests, s_q, topk].
        length: i32 [requests] or None.
        scale: f32 [1] where the layout has one scale a tensor.
        placed: every buffer by name.
        any_scales: its scales are no powers of two.
    """

    layout: CacheLayout
    cache: torch.Tensor
    indices: torch.Tensor
    length: torch.Tensor | None
    scale: torch.Tensor | None
    placed: dict[str, Placed]
    any_scales: bool = False

    @property
    def slots(self) -> int:
        """Tokens that the cache can hold."""
        return self.cache.shape[0] * self.cache.shape[1]

    def rows(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows [n, d_qk] of slots i64 [n], as attention multiplies them."""
        block_size = self.cache.shape[1]
        return read(self.layout, self.cache[:, :, 0].view(torch.uint8), block_size, slots, self.scale).to(dtype)


@dataclass
class Inputs:
    """The tensors of one call.

    Attributes:
        q: [requests, s_q, heads, d_qk].
        lists: of the cache, and of the second one if it is passed.
        scale: softmax_scale; None: not passed.
        sink: f32 [heads] or None.
        out: of `out`, [requests, s_q, heads, d_v], or None.
        placed: every other input's buffer by name.
    """

    q: torch.Tensor
    lists: list[ListInputs]
    scale: float | None
    sink: torch.Tensor | None
    out: Placed | None
    placed: dict[str, Placed]

    def arguments(self) -> dict[str, Any]:
        """Arguments of the wrapper but for metadata."""
        main, *extra = self.lists
        found: dict[str, Any] = {
            "q": self.q,
            "k_cache": main.cache,
            "block_table": None,
            "cache_seqlens": None,
            "is_fp8_kvcache": main.layout.quantised,
            "indices": main.indices,
        }
        optional = {"softmax_scale": self.scale, "attn_sink": self.sink, "topk_length": main.length}
        optional |= {"k_scale": main.scale, "out": None if self.out is None else self.out.view}
        for one in extra:
            found |= {"extra_k_cache": one.cache, "extra_indices_in_kvcache": one.indices}
            optional |= {"extra_topk_length": one.length, "extra_k_scale": one.scale}
        return found | {name: value for name, value in optional.items() if value is not None}

    def untouched(self) -> None:
        """Raises CaseFailedError if an input has other bits than when it was placed."""
        named = {**self.placed, **{name: one for listed in self.lists for name, one in listed.placed.items()}}
        changed = [name for name, tensor in named.items() if tensor.changed()]
        if changed:
            raise CaseFailedError(f"wrote to its input {', '.join(changed)}")


def place_tokens(
    values: torch.Tensor, shape: tuple[int, int], layout: str, fill: float | int
) -> tuple[torch.Tensor, Placed]:
    """A tensor by token [tokens, ...] laid out, and its view by request [requests, s_q, ...]."""
    if layout == "by position":
        by_position = values.unflatten(0, shape).transpose(0, 1).flatten(0, 1)  # type: ignore[no-untyped-call]
        placed = place(by_position, LAYOUTS["slice"], fill)
        return placed.view.unflatten(0, shape[::-1]).transpose(0, 1), placed  # type: ignore[no-untyped-call]
    placed = place(values, LAYOUTS[layout], fill)
    return placed.view.unflatten(0, shape), placed  # type: ignore[no-untyped-call]


def _empty_cache(listing: Listing, layout: CacheLayout, dtype: torch.dtype, device: str) -> Placed:
    """A cache [pages, block_size, 1, row] of poison: bytes, or lanes of the model's dtype where it is not quantised."""
    size, pages = listing.block_size, -(-listing.rows // listing.block_size)
    row = layout.row_bytes if layout.quantised else layout.lanes
    unit = 1 if layout.quantised else layout.data[0].itemsize
    least = max(one.itemsize for one in layout.fields) // unit  # elements at whose multiples rows may begin
    row_stride = row + {"row gap": 48, "odd": 0 if layout.planar else least}.get(listing.cache, 0)
    page_stride = -(-layout.page_bytes(size) // unit) if layout.planar else size * row_stride
    page_stride += {"page gap": 128, "odd": 3 * least}.get(listing.cache, 0)
    offset = GUARD + (least if listing.cache == "odd" else 0)
    far = listing.cache == "far"
    if far:
        page_stride = FAR_STRIDE + 8
    elements = offset + max(pages - 1, 0) * page_stride + max(page_stride if not far else size * row_stride, 0) + GUARD
    lazy = far and device == "cpu"
    buffer = allocate(elements * unit, torch.uint8, device, None if lazy else listing.poison)
    buffer = buffer if layout.quantised else buffer.view(dtype)
    shape, strides = (pages, size, 1, row), (page_stride, row_stride, row, 1)
    view = buffer.as_strided(shape, idle_strides(shape, strides) if listing.cache == "idle" else strides, offset)
    if lazy:
        view.view(torch.uint8).fill_(listing.poison)
    return Placed(view, buffer, None)


def _code(
    field: DataField | ScalesField, shape: tuple[int, ...], scaled: bool, wide: bool, generator: torch.Generator
) -> torch.Tensor:
    """Any bytes of a field, uint8 [rows, bytes], but NaN, and, unless `wide`, without values that drown all others."""
    if isinstance(field, ScalesField):
        exponent = torch.randint(-12, -4, shape, generator=generator)
        if wide:
            exponent += 14 * torch.randint(-1, 2, (shape[0], 1), generator=generator)
        if field.dtype == "ue8m0":
            return (exponent + 127).to(torch.uint8)
        if field.dtype == "e4m3":
            return torch.randint(0, 0x40, shape, generator=generator).to(torch.uint8) | (exponent % 2 << 7).to(
                torch.uint8
            )
        return ((1 + torch.rand(shape, generator=generator)) * torch.exp2(exponent.float())).view(torch.uint8)
    if field.dtype == "e2m1":
        return torch.randint(0, 256, (shape[0], shape[1] // 2), generator=generator).to(torch.uint8)
    if not field.quantised:
        dtype = torch.bfloat16 if field.dtype == "bf16" else torch.float16
        return torch.randn(shape, generator=generator).to(dtype).view(torch.uint8)
    codes = torch.randint(0, 256, shape, generator=generator)
    if not scaled:  # up to 8 in magnitude
        codes = codes % 0x50 | codes & 0x80
    for nan in NAN_CODES[field.dtype]:
        codes[codes == nan] = 0x38
    return codes.to(torch.uint8)


def _fill(
    one: ListInputs, listing: Listing, named: torch.Tensor, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Writes rows to the `named` slots of a cache."""
    layout, size = one.layout, listing.block_size
    pages = one.cache[:, :, 0].view(torch.uint8)
    named = named.to(pages.device)
    values = torch.randn(len(named), layout.lanes, generator=generator).to(dtype).to(pages.device)
    write(layout, pages, size, named, values, one.scale)
    if listing.contents != "encoded":
        for part in layout.fields:
            if isinstance(part, DataField | ScalesField):
                scaled = isinstance(part, DataField) and layout.scales_of(part) is not None
                view = planes_of(layout, pages, size)[part.plane]
                codes = _code(part, (len(named), part.count), scaled, listing.contents == "wide", generator)
                codes = codes.to(pages.device)
                view[named // size, named % size, part.offset : part.offset + part.nbytes] = codes


def _rounds(layout: CacheLayout) -> bool:
    """Whether writers leave scales that are no powers of two."""
    return any(isinstance(part, ScalesField) and part.rule.rounding == "nearest" for part in layout.fields)


def _build_list(
    known: CacheFacts, problem: CacheProblem, number: int, device: str, generator: torch.Generator
) -> ListInputs:
    listing, layout = problem.listings[number], known.layouts[number]
    dtype = getattr(torch, known.facts.dtype)
    empty = _empty_cache(listing, layout, dtype, device)
    slots = empty.view.shape[0] * listing.block_size
    flat = Problem(problem.tokens, problem.heads, listing.topk, slots, listing.indices)
    named = named_rows(flat, known.facts, generator)
    scale = torch.full((1,), TENSOR_SCALES[number], device=device) if layout.tensor_scale else None
    one = ListInputs(
        layout, empty.view, torch.empty(0), None, scale, {}, listing.contents != "encoded" or _rounds(layout)
    )
    if len(named):
        _fill(one, listing, named, dtype, generator)
    if listing.cache != "far":
        one.placed[f"cache {number}"] = replace(empty, before=empty.buffer.clone())
    if layout.quantised:
        one.cache = one.cache.view(listing.dtype)
    indices = INDEX_PATTERNS[listing.indices](flat, named, generator)
    poison = 0 if listing.indices != "row zero" else -1  # a lane that does not count names a poisoned row
    if listing.length is not None:
        length = lengths(listing.length, problem.requests, listing.topk, generator)
        beyond = torch.arange(listing.topk)[None, :] >= length.repeat_interleave(problem.s_q)[:, None]
        indices[beyond] = poison
        one.length = length.to(device)
        one.placed[f"length {number}"] = Placed(one.length, one.length, one.length.clone())
    one.indices, placed = place_tokens(
        indices.int().to(device), (problem.requests, problem.s_q), problem.index_layout, poison
    )
    one.placed[f"indices {number}"] = placed
    return one


def build(problem: CacheProblem, known: CacheFacts, device: str, seed: int) -> Inputs:
    """The tensors of a problem, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = torch.Generator().manual_seed(seed)
    facts = known.facts
    dtype = getattr(torch, facts.dtype)
    values = torch.randn(problem.tokens, problem.heads, facts.d_qk, generator=generator)
    if problem.wide_q:
        values *= torch.exp2(16.0 * torch.randint(-1, 2, (problem.tokens, problem.heads, 1), generator=generator))
    values = values.to(dtype).to(device)
    q, placed = place_tokens(values, (problem.requests, problem.s_q), problem.q, NAN)
    lists = [_build_list(known, problem, number, device, generator) for number in range(len(problem.listings))]
    sink = None
    buffers = {"q": placed}
    if problem.sink is not None:
        topk = max(1, sum(listing.topk for listing in problem.listings))
        sink = sinks(problem.sink, problem.heads, topk, generator).to(device)
        buffers["attn_sink"] = Placed(sink, sink, sink.clone())
    out = None
    if problem.out is not None:
        empty = torch.full((problem.tokens, problem.heads, facts.d_v), NAN, dtype=dtype, device=device)
        placed = place(empty, LAYOUTS[problem.out], NAN)
        out = replace(placed, view=placed.view.unflatten(0, (problem.requests, problem.s_q)))  # type: ignore[no-untyped-call]
    scale = None if problem.scale is None else problem.scale * facts.d_qk**-0.5
    return Inputs(q, lists, scale, sink, out, buffers)


def attend(inputs: Inputs, facts: Facts) -> Attention:
    """Attention of each token over the rows that its lists name, by mlagen.verify.reference."""
    requests, s_q, _, d_qk = inputs.q.shape
    tables, columns, first = [], [], 0
    for one in inputs.lists:
        indices = one.indices.long().flatten(0, 1)  # [tokens, topk]
        valid = (indices >= 0) & (indices < one.slots)
        if one.length is not None:
            lanes = torch.arange(indices.shape[1], device=indices.device)
            valid &= lanes < one.length.long().repeat_interleave(s_q)[:, None]
        slots, row = torch.unique(indices[valid], return_inverse=True)
        found = torch.full_like(indices, -1)
        found[valid] = row + first
        tables.append(one.rows(slots, inputs.q.dtype))
        columns.append(found)
        first += len(slots)
    kv = torch.cat(tables)[:, None]
    scale = d_qk**-0.5 if inputs.scale is None else inputs.scale
    q = inputs.q.reshape(requests * s_q, *inputs.q.shape[2:])
    indices = torch.cat(columns, 1)
    return sparse_attention(q, kv, indices, scale, facts.d_v, inputs.sink, None, facts.lse_base, facts.empty_row_lse)


class Results(NamedTuple):
    """What the wrapper gave: out [requests, s_q, heads, d_v] and lse [requests, heads, s_q]."""

    out: torch.Tensor
    lse: torch.Tensor

    def copy(self) -> Results:
        """The same in memory of its own."""
        return Results(self.out.clone(), self.lse.clone())


def _call(subject: Subject, case: SparseDecodeCase, inputs: Inputs, **given: Any) -> Results:
    """Calls the wrapper; `given` holds further arguments by name."""
    package, arguments = subject.package, inputs.arguments()
    arguments |= {"head_dim_v": subject.facts.d_v, "enable_batch_invariant": case.batch_invariant}
    with subject.planned_for(case.multiprocessors), poisoned_allocations():
        metadata = given.pop("tile_scheduler_metadata", None) or package.get_mla_metadata()[0]
        return Results(*getattr(package, WRAPPER)(**arguments, tile_scheduler_metadata=metadata, **given))


def _compare(subject: Subject, inputs: Inputs, results: Results) -> list[Figure]:
    """Figures of the results against the reference.

    Raises:
        CaseFailedError: a result has another dtype or shape than it should.
    """
    facts = subject.facts
    requests, s_q, heads, d_qk = inputs.q.shape
    shapes = {"out": (requests, s_q, heads, facts.d_v), "lse": (requests, heads, s_q)}
    dtypes = {"out": getattr(torch, facts.dtype), "lse": torch.float32}
    for name, tensor in results._asdict().items():
        if tensor.shape != shapes[name] or tensor.dtype != dtypes[name]:
            found = f"{name} is {tensor.dtype} {list(tensor.shape)}"
            raise CaseFailedError(f"{found} instead of {dtypes[name]} {list(shapes[name])}")
    expected = attend(inputs, facts)
    # The sm90 kernel rounds scaled lanes to fp16, where the reference rounds them to bf16.
    may_round = subject.device == "cuda" and subject.package.sparse_decode in sm90_modules(subject.package)
    k_error = 0.0
    if may_round and any(one.any_scales for one in inputs.lists):
        k_error = 2 * tolerance.UNIT_ROUNDOFF[results.out.dtype]
    figures = tolerance.out_errors(results.out.flatten(0, 1), expected, d_qk, k_error, facts.partials)
    lse = results.lse.transpose(1, 2).reshape(requests * s_q, heads)
    topk = sum(one.indices.shape[2] for one in inputs.lists)
    return [*figures, tolerance.lse_error(lse, expected, d_qk, topk, facts.lse_base, k_error)]


def check_bits(what: str, one: Results, other: Results) -> None:
    """Raises CaseFailedError unless both hold the same bits."""
    for name, left, right in zip(Results._fields, one, other, strict=True):
        if not torch.equal(bits(left), bits(right)):
            count = int((bits(left) != bits(right)).sum())
            raise CaseFailedError(f"{what}: {count} of {left.numel()} elements of {name} have other bits")


def _reference(subject: Subject, case: SparseDecodeCase, inputs: Inputs) -> list[Figure]:
    results = _call(subject, case, inputs)
    figures = _compare(subject, inputs, results)
    inputs.untouched()
    if inputs.out is not None:
        if results.out.data_ptr() != inputs.out.view.data_ptr():
            raise CaseFailedError("out was given, but another tensor was returned")
        if inputs.out.spilled():
            raise CaseFailedError("wrote outside out")
    return figures


def _determinism(subject: Subject, case: SparseDecodeCase, inputs: Inputs) -> list[Figure]:
    first = _call(subject, case, inputs).copy()
    check_bits("second call", first, _call(subject, case, inputs))
    return _compare(subject, inputs, first)


def _nan(subject: Subject, case: SparseDecodeCase, inputs: Inputs) -> list[Figure]:
    first = _call(subject, case, inputs).copy()
    figures = _compare(subject, inputs, first)
    inputs.q[0, 0, 1, 5] = NAN
    inputs.q[-1, -1] = NAN
    results = _call(subject, case, inputs)
    spoilt = inputs.q.isnan().any(3) & ~first.lse.transpose(1, 2).isinf()  # [requests, s_q, heads]
    lse_spoilt = spoilt.transpose(1, 2)
    for name, rows in (("out", results.out[spoilt]), ("lse", results.lse[lse_spoilt])):
        if not bool(rows.isnan().all()):
            raise CaseFailedError(f"{name}: {int((~rows.isnan()).sum())} elements of heads with NaN in q are numbers")
    out = torch.where(spoilt[..., None], first.out, results.out)
    check_bits("beside NaN", first, Results(out, torch.where(lse_spoilt, first.lse, results.lse)))
    return figures


def _requests(inputs: Inputs, picked: list[int]) -> Inputs:
    """The same call for some of its requests, in another order."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[torch.tensor(picked, device=tensor.device)].contiguous()

    lists = [
        replace(one, indices=take(one.indices), length=None if one.length is None else take(one.length), placed={})
        for one in inputs.lists
    ]
    return replace(inputs, q=take(inputs.q), lists=lists, out=None, placed={})


def _invariance(subject: Subject, case: SparseDecodeCase, inputs: Inputs) -> list[Figure]:
    requests = inputs.q.shape[0]
    whole = _call(subject, case, inputs).copy()

    def check(what: str, picked: list[int], changed: Inputs | None = None) -> None:
        got = _call(subject, case, changed or _requests(inputs, picked))
        wanted = Results(*(tensor[torch.tensor(picked, device=tensor.device)] for tensor in whole))
        check_bits(what, wanted, Results(*(tensor[: len(picked)] for tensor in got)))

    every = list(range(requests))
    check("alone", [requests - 1])
    check("in another order", every[::-1])
    check("in a larger batch", [0] * (1 if subject.device == "cpu" else 300) + every * 2)
    # The first request stays; the others get other queries and indices.
    others = _requests(inputs, every)
    others.q[1:] = others.q[1:].flip(3)
    for one in others.lists:
        one.indices[1:, :, ::2] = -1
    check("beside other rows", [0], others)
    # A multiple of 16 more columns, so that the indices stay aligned as they were.
    wider = _requests(inputs, every)
    last = wider.lists[-1]
    last.indices = torch.nn.functional.pad(last.indices, (0, 800), value=-1)
    check("in a wider call", every, wider)
    if all(one.length is None for one in inputs.lists):
        lists = [replace(one, indices=one.indices.transpose(0, 1).contiguous(), placed={}) for one in inputs.lists]
        as_one = replace(inputs, q=inputs.q.transpose(0, 1).contiguous(), lists=lists, out=None, placed={})
        got = _call(subject, case, as_one)
        joined = Results(got.out.transpose(0, 1), got.lse.permute(2, 1, 0))
        check_bits("as tokens of one request", whole, joined)
    return _compare(subject, inputs, whole)


def _workspace(subject: Subject, case: SparseDecodeCase, inputs: Inputs) -> list[Figure]:
    requests, s_q, heads, _ = inputs.q.shape
    topks = [one.indices.shape[2] for one in inputs.lists]

    def size(count: int) -> int:
        with subject.planned_for(case.multiprocessors):
            options = {"enable_batch_invariant": case.batch_invariant}
            return int(subject.package.kvcache_workspace_size(inputs.q.device, 1, count, heads, *topks, **options))

    figures: list[Figure] = []
    first: Results | None = None
    for what, count in (("for all tokens", requests * s_q), ("for two tokens", 2), ("for one token", 1)):
        floats = size(count)
        if floats == 0:
            raise CaseFailedError("kvcache_workspace_size is 0 for a call in splits")
        buffer = place_workspace(floats, subject.device)
        results = _call(subject, case, inputs, workspace=buffer.view.view(-1)).copy()
        figures += _compare(subject, inputs, results)
        if not is_wholly_used(buffer.view.view(-1), subject.facts):
            raise CaseFailedError(f"a workspace {what} is not wholly used")
        if buffer.spilled():
            raise CaseFailedError(f"wrote outside a workspace {what}")
        if first is not None:
            check_bits(f"workspace {what}", first, results)
        first = first or results
    with contextlib.suppress(ValueError):
        _call(subject, case, inputs, workspace=torch.empty(size(1) - 4, device=subject.device))
        raise CaseFailedError("took a workspace too small for one token")
    return figures


def _defaults(subject: Subject, case: SparseDecodeCase, inputs: Inputs) -> list[Figure]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        results = _call(subject, case, inputs)
        if torch.get_default_dtype() != torch.float64 or torch.get_default_device().type != "meta":
            raise CaseFailedError("changed torch's default dtype or device")
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
    return _compare(subject, inputs, results)


def _metadata(subject: Subject, case: SparseDecodeCase, inputs: Inputs) -> list[Figure]:
    package = subject.package
    old_form = package.get_mla_metadata(torch.ones(2, dtype=torch.int32), 8, 1, 4, is_fp8_kvcache=True, topk=64)
    metadata, nothing = old_form
    if nothing is not None or package.get_mla_metadata(cache_seqlens=None)[0] is metadata:
        raise CaseFailedError("get_mla_metadata gives something else than a fresh object and None")
    first = _call(subject, case, inputs, tile_scheduler_metadata=metadata).copy()
    check_bits("second call", first, _call(subject, case, inputs, tile_scheduler_metadata=metadata))
    fewer = replace(inputs, q=inputs.q[:, :, :-1], sink=None if inputs.sink is None else inputs.sink[:-1])
    narrower = _requests(inputs, list(range(inputs.q.shape[0])))
    narrower.lists[-1].indices = narrower.lists[-1].indices[:, :, :-1]
    others = {"h_q": fewer, "b": _requests(inputs, [0]), "topk": narrower}
    for name, other in others.items():
        try:
            _call(subject, case, other, tile_scheduler_metadata=metadata)
        except ValueError as error:
            if not re.search(rf"tile_scheduler_metadata: .*\b(extra_)?{name} ", str(error)):
                raise CaseFailedError(f"the ValueError does not name {name}: {error}") from error
        else:
            raise CaseFailedError(f"took a call of another {name}")
    return _compare(subject, inputs, first)


def _refusals_after(subject: Subject, case: SparseDecodeCase, inputs: Inputs) -> list[Figure]:
    known = CacheFacts.of(subject.package.SPEC["spec"])
    good = _good_arguments(subject, known)
    with subject.planned_for(None):
        getattr(subject.package, WRAPPER)(**good, tile_scheduler_metadata=subject.package.get_mla_metadata()[0])
    for refusal in _refusals(known):
        _refusal(subject, refusal, dict(good))
    return []


def _stream(subject: Subject, case: SparseDecodeCase, inputs: Inputs) -> list[Figure]:
    _reference(subject, case, inputs)  # compiles, so that the launch below is not late
    wanted = inputs.q.clone()
    inputs.q.fill_(NAN)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        # A launch on another stream would read q too early.
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        inputs.q.copy_(wanted)
        results = _call(subject, case, inputs)
    stream.synchronize()
    return _compare(subject, inputs, results)


def _graph(subject: Subject, case: SparseDecodeCase, inputs: Inputs) -> list[Figure]:
    _call(subject, case, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _call(subject, case, inputs)
    inputs.q.copy_(inputs.q.flip(0))
    for one in inputs.lists:
        one.indices.copy_(one.indices.flip(0))
    for tensor in results:
        tensor.fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    return _compare(subject, inputs, results)


CHECKS: dict[str, Callable[[Subject, SparseDecodeCase, Inputs], list[Figure]]] = {
    "reference": _reference,
    "buffers": _reference,
    "determinism": _determinism,
    "nan": _nan,
    "invariance": _invariance,
    "workspace": _workspace,
    "defaults": _defaults,
    "metadata": _metadata,
    "refusals": _refusals_after,
    "stream": _stream,
    "graph": _graph,
}


def _good_arguments(subject: Subject, known: CacheFacts) -> dict[str, Any]:
    # So wide a call runs in splits in this mode, and so needs a workspace.
    extra = Listing(32, 60, 7) if len(known.layouts) > 1 else None
    problem = CacheProblem(2, 2, 4, Listing(1100, 200), extra)
    if known.facts.sink == "required":
        problem = replace(problem, sink="random")
    if known.facts.length == "required":
        problem = replace(problem, main=replace(problem.main, length="full"))
        problem = replace(problem, extra=extra and replace(extra, length="full"))
    arguments = build(problem, known, subject.device, 0).arguments()
    return arguments | {"head_dim_v": known.facts.d_v, "enable_batch_invariant": True}


def _refusal(subject: Subject, case: SparseDecodeRefusalCase, arguments: dict[str, Any]) -> None:
    arguments["tile_scheduler_metadata"] = subject.package.get_mla_metadata()[0]
    case.change(arguments)
    with subject.planned_for(None):
        try:
            getattr(subject.package, WRAPPER)(**arguments)
        except (ValueError, TypeError) as error:
            if not re.search(rf"\b{case.argument}\b", str(error)) or case.text not in str(error):
                wanted = " and ".join(filter(None, (case.argument, case.text)))
                raise CaseFailedError(f"the {type(error).__name__} does not name {wanted}: {error}") from error
            metadata = arguments.get("tile_scheduler_metadata")
            if metadata is not None and metadata.config is not None:
                raise CaseFailedError("a refused call recorded its sizes") from error
            return
    raise CaseFailedError(f"took a wrong {case.argument}")


def run(subject: Subject, case: Case, seed: int = 0) -> list[Figure]:
    """Runs a case; returns its figures, none where it compares bits.

    Raises:
        CaseFailedError: the case does not hold; other exceptions of the package pass through.
        CaseSkippedError: the case cannot run here.
    """
    known = CacheFacts.of(subject.package.SPEC["spec"])
    match case:
        case SparseDecodeCase():
            inputs = build(case.problem, known, subject.device, seed)
            return CHECKS[case.check](subject, case, inputs)
        case SparseDecodeRefusalCase():
            _refusal(subject, case, _good_arguments(subject, known))
        case _:
            raise TypeError(f"unknown case {case!r}")
    return []
