"""The cases of dense attention over a paged cache: plain data, made from a spec and from where it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from mlagen.verify.call.case import Q_HALVES, ROWS_32, SM90, SWAP_AB, Case
from mlagen.verify.call.facts import Facts
from mlagen.verify.checks import merges, pairs, variants
from mlagen.verify.checks.decode import FLASH
from mlagen.verify.dense_decode.facts import DenseDecodeFacts
from mlagen.verify.dense_decode.invalid import DECODE, refused

TOO_LONG = 2**31 - 1
TENSOR_SCALE = 0.4375


@dataclass(frozen=True)
class DenseDecodeProblem:
    """Inputs of one call.

    Attributes:
        lengths: keys of each request as the caller says them; more than the block table names means all of those.
        columns: of the block table; None: two more than the longest request takes.
        s_q, heads, kv_heads: sizes of q and of the cache.
        block_size: tokens a page.
        causal: a query token sees no key behind its own.
        window: "spec": the spec's; else given to the wrapper, None meaning all keys.
        cache: layout in memory, of mlagen.verify.call.memory.empty_pages.
        poison: byte of irrelevant data.
        dtype: of a quantised cache's tensor.
        scale: softmax_scale as a multiple of d_qk ** -0.5; None: not passed.
        q_scale: of a q of e4m3; None: it is of the model's dtype.
        k_scale: of a cache of one scale a tensor.
        q_factor: factor of q.
        q, out: layout in memory, a key of mlagen.verify.call.memory.LAYOUTS; `out` None: the wrapper allocates it.
        table: the same of the block table.
    """

    lengths: tuple[int, ...] = (70, 3, 129)
    columns: int | None = None
    s_q: int = 1
    heads: int = 10
    kv_heads: int = 1
    block_size: int = 64
    causal: bool = False
    window: int | str | None = "spec"
    cache: str = "end to end"
    poison: int = 0xFF
    dtype: torch.dtype = torch.uint8
    scale: float | None = None
    q_scale: float | None = None
    k_scale: float = TENSOR_SCALE
    q_factor: float = 1.0
    q: str = "contiguous"
    out: str | None = None
    table: str = "slice"

    @property
    def requests(self) -> int:
        """How many."""
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Columns of the block table."""
        longest = max((length for length in self.lengths if length != TOO_LONG), default=0)
        return -(-longest // self.block_size) + 2 if self.columns is None else self.columns

    @property
    def keys(self) -> list[int]:
        """Keys of each request."""
        return [min(max(length, 0), self.width * self.block_size) for length in self.lengths]


@dataclass(frozen=True)
class DenseDecodeCase(Case):
    """A call against the reference.

    Attributes:
        problem: its inputs.
        wrapper: the wrapper called.
        multiprocessors: size of the device that the wrapper plans for; None: as it is.
        batch_invariant: enable_batch_invariant.
        sink: pattern of the sink that a merge adds; None: none.
        tensor_scale: the cache's values have a scale per tensor.
    """

    problem: DenseDecodeProblem
    wrapper: str = FLASH
    multiprocessors: int | None = None
    batch_invariant: bool = False
    sink: str | None = None
    tensor_scale: bool = False
    attends: ClassVar[bool] = True

    @property
    def kernels(self) -> tuple[str, ...]:
        """The sm90 kernels for its q and cache."""
        if not self.tensor_scale:
            return (SM90, SWAP_AB)
        return (Q_HALVES if self.problem.q_scale is None else SM90, ROWS_32)


class _Suite:
    """Builds cases with the sizes that suit a device."""

    def __init__(self, known: DenseDecodeFacts, device: str) -> None:
        self.known, self.facts = known, known.facts
        self.big = device == "cuda"
        self.planar, self.takes_heads = known.layout.planar, known.layout.takes_heads
        self.base = DenseDecodeProblem()
        # A merge runs a program a row: fewer where a call is split.
        self.split_heads = self.facts.num_heads if self.big else 3
        if self.big:
            lengths = (4097, 63, 1, 0, 2048, 700, 9000, 64, 65, 3, 1111)
            self.base = DenseDecodeProblem(lengths, heads=self.facts.num_heads)

    def case(self, name: str, promise: str, **settings: Any) -> Iterator[DenseDecodeCase]:
        """One case of each wrapper that can take it, or of `wrapper`."""
        options = {key: settings.pop(key) for key in DenseDecodeCase.__dataclass_fields__.keys() & settings.keys()}
        if not self.big:
            options.setdefault("multiprocessors", 1)
        problem = replace(self.base, **settings)
        wrapper = options.setdefault("wrapper", FLASH if FLASH in self.facts.wrappers else DECODE)
        fits = wrapper == FLASH or problem.s_q == 1
        if wrapper in self.facts.wrappers and fits and (self.takes_heads or problem.kv_heads == 1):
            tensor_scale = self.known.layout.tensor_scale
            yield DenseDecodeCase(f"dense_decode: {name}", promise, problem, tensor_scale=tensor_scale, **options)

    def both(self, name: str, promise: str, **settings: Any) -> Iterator[DenseDecodeCase]:
        """A case of each wrapper."""
        for wrapper, suffix in ((FLASH, ""), (DECODE, ", decode")):
            yield from self.case(name + suffix, promise, wrapper=wrapper, **settings)


def _typical(suite: _Suite) -> Iterator[DenseDecodeCase]:
    big, facts = suite.big, suite.facts
    promise = "an ordinary call gives the reference's result"
    yield from suite.both("typical", promise, every_target=True)
    yield from suite.both("typical, shared", promise, every_target=True, multiprocessors=40)
    promise = "every stage of shared memory is used again, by a program's next request too"
    yield from suite.case("long", promise, lengths=(900, 3, 700), multiprocessors=1, only_sm90=True, every_target=True)
    own = (8000, 33000) if big else (65,)
    yield from suite.both("model's own heads", "the model's own heads", lengths=own, heads=facts.num_heads)
    many = tuple(37 * number % 301 for number in range(515 if big else 20))
    yield from suite.both("many requests", "a large batch", lengths=many, heads=3)
    yield from suite.both("no requests", "an empty batch gives empty results", lengths=(), columns=1)
    yield from suite.case("no query tokens", "requests without query tokens give empty results", s_q=0)
    for number, heads in enumerate((1, 5, 6, 8, 12, 16, 17, 20, 32, 64, 96, 128)):
        yield from suite.both(
            f"heads: {heads}",
            f"{heads} heads a rank, whatever the tile holds",
            every_target=heads in (17, 128),
            heads=heads,
            lengths=((70, 3), (33,), (1,), (65,))[number % 4],
        )
    for heads, kv_heads in ((10, 2), (6, 6)):
        promise = "query heads share KV heads evenly"
        yield from suite.both(
            f"heads: {heads} of {kv_heads} KV heads",
            promise,
            heads=heads,
            kv_heads=kv_heads,
            lengths=(70, 3),
            every_target=kv_heads == 2,
        )
    for s_q in (1, 2, 4):
        for causal in (False, True):
            yield from suite.case(
                f"s_q: {s_q}{', causal' if causal else ''}",
                "a query token sees all keys, or those up to its own place at the end of its request",
                s_q=s_q,
                causal=causal,
                heads=5,
                lengths=(70, 2, 0, 64, 1, 67),
                every_target=s_q == 4,
            )
    lengths = (4100, 64, 127, 0, 1, 700) if big else (129, 64, 0, 1)
    for heads, s_q in ((1, 1), (5, 1), (4, 2), (8, 2), (17, 1), (16, 2), (11, 3)):
        yield from suite.case(
            f"rows: {heads} heads of {s_q}",
            "rows that fill the columns of a product, and one more, over several blocks of keys",
            heads=heads,
            s_q=s_q,
            causal=s_q > 1,
            lengths=lengths,
        )
    promise = "query tokens of a request take several tiles"
    yield from suite.case("s_q: 9 of many heads", promise, s_q=9, causal=True, heads=20, lengths=(75, 5))


def _lengths(suite: _Suite) -> Iterator[DenseDecodeCase]:
    promise = "any length in pages of any size, whatever the unused entries of the block table hold"
    for size in (1, 2, 16, 53, 64, 480):
        lengths = (0, 1, size - 1, size, size + 1, 3 * size + 2 if size < 100 else 0, 130)
        yield from suite.both(
            f"page size: {size}", promise, block_size=size, lengths=lengths, heads=3, every_target=size in (16, 53)
        )
    promise = "a length past what the block table names ends there"
    yield from suite.both("length: too long", promise, lengths=(TOO_LONG, 100_000, 5), columns=2, heads=3)
    yield from suite.both("length: negative", "a negative length is none", lengths=(-1, -(2**31), 5), heads=3)
    promise = "requests without a key give 0 and the empty row's LSE"
    yield from suite.both("length: none at all", promise, lengths=(0, 0, 0))
    promise = "a block table without columns names no key"
    yield from suite.both("length: no columns", promise, columns=0, heads=3)
    yield from suite.both("length: no columns, batch invariant", promise, columns=0, heads=3, batch_invariant=True)
    yield from suite.both("length: one page", "a cache of one page", lengths=(53,), block_size=53, columns=1)
    promise = "one long request beside short ones"
    long = (20_000, 1, 2, 3, 0, 5, 6) if suite.big else (700, 1, 0, 3)
    yield from suite.both("length: one long", promise, lengths=long, heads=3, multiprocessors=6)
    promise = "more requests than lengths are read at a time"
    scale = 20 if suite.big else 1  # units, so that some programs have no whole number of a request's
    counts = tuple(number * 37 % 101 * scale for number in range(600 if suite.big else 11))
    yield from suite.case("length: in blocks", promise, lengths=counts, heads=1, check="blocks", multiprocessors=20)


def _windows(suite: _Suite) -> Iterator[DenseDecodeCase]:
    if suite.known.window is None:
        return
    for window in (1, 5, 64, 100, None):
        for s_q, causal in ((1, False), (3, True), (3, False)):
            yield from suite.case(
                f"window: {window or 'all'}, s_q {s_q}{', causal' if causal else ''}",
                "a query token sees the last keys up to its own; pages before the window may be gone",
                window=window,
                s_q=s_q,
                causal=causal,
                lengths=(200, 3, 64, 0, 131),
                heads=5,
                block_size=53 if window == 5 else 16,
                every_target=window == 100,
            )
    decode: dict[str, Any] = {"wrapper": DECODE, "lengths": (200, 3, 64), "heads": 3}
    yield from suite.case("window: 5, decode", "the same of vLLM's interface", window=5, **decode)
    length = suite.known.window + 97
    promise = "the spec's own window"
    yield from suite.both("window: the spec's", promise, lengths=(length, 7), heads=3, multiprocessors=4)
    promise = "windows of requests that several programs share"
    yield from suite.case(
        "window: shared", promise, window=150, s_q=2, causal=True, lengths=(700, 40, 300), heads=3, multiprocessors=20
    )


def _caches(suite: _Suite) -> Iterator[DenseDecodeCase]:
    kinds = {
        "page gap": "pages may lie apart; the bytes between them are not read",
        "odd": "pages and rows may begin at any multiple of a stored value",
    }
    if not suite.planar:
        kinds |= {
            "row gap": "rows may lie apart; the bytes between them are not read",
            "head gap": "heads may lie apart",
            "heads first": "a page may hold its heads one behind the other",
        }
    for kind, promise in kinds.items():
        heads = 2 if "head" in kind else 1
        yield from suite.both(f"cache: {kind}", promise, cache=kind, block_size=53, heads=6, kv_heads=heads)
    if suite.known.layout.tensors:
        promise = "each tensor of the cache may begin at any multiple of its values"
        yield from suite.both("cache: odd beside", promise, cache="odd beside", block_size=53, heads=6)
    promise = "the stride of a dimension of one place leads nowhere, so any will do"
    for what, size in (("page", 64), ("key a page", 1)):
        name = f"cache: one {what}, odd stride"
        yield from suite.both(name, promise, cache="idle", block_size=size, lengths=(40,), heads=3)
    promise = "bytes that belong to no key do not matter"
    yield from suite.both("cache: poison 0x7f", promise, poison=0x7F, heads=3)
    if suite.known.layout.quantised:
        for dtype in (torch.int8, torch.float8_e4m3fn):
            name = f"cache: {str(dtype).removeprefix('torch.')}"
            promise = "a quantised cache may be a tensor of any 8-bit dtype"
            yield from suite.both(name, promise, dtype=dtype, heads=3, lengths=(70,))
    promise = "page offsets are 64 bits wide"
    yield from suite.both(
        "offsets: cache past 2^31 bytes", promise, cache="far", block_size=16, lengths=(40,), heads=3, columns=3
    )
    promise = "offsets of q and out by request are 64 bits wide"
    yield from suite.case("offsets: tokens past 2^31 elements", promise, heads=3, q="far", out="far")


def _numbers(suite: _Suite) -> Iterator[DenseDecodeCase]:
    for name, scale, promise in (
        ("large", 40.0, "a softmax that saturates stays finite"),
        ("tiny", 1e-6, "a softmax that is all but uniform"),
        ("none", 2.0**-120, "a softmax that is uniform: the mean of the keys"),
    ):
        yield from suite.case(f"logits: {name}", promise, scale=scale, heads=3)


def _e4m3(suite: _Suite) -> Iterator[DenseDecodeCase]:
    if not suite.known.layout.tensor_scale:
        return
    promise = "a scale of the cache may be any power of two"
    for exponent in (-20, -6, 10):
        name = f"e4m3: scale of the cache 2^{exponent}"
        yield from suite.both(name, promise, k_scale=2.0**exponent, q_factor=2.0**-exponent, heads=3)
    promise = "values of q may be of any magnitude"
    for exponent in (-40, 30):
        name = f"e4m3: q times 2^{exponent}"
        yield from suite.case(name, promise, q_factor=2.0**exponent, scale=2.0**-exponent, heads=3)
    promise = "q may be of e4m3, with its scale"
    e4m3: dict[str, Any] = {"wrapper": FLASH, "q_scale": 0.5}
    for heads, s_q in ((3, 1), (16, 1), (40, 2), (128, 1)):
        name = f"e4m3: q, {heads} heads, s_q {s_q}"
        yield from suite.case(name, promise, heads=heads, s_q=s_q, causal=s_q > 1, every_target=heads == 16, **e4m3)
    wide: dict[str, Any] = {"heads": 64, "lengths": (130, 3), "block_size": 64, "columns": 4200, "every_target": True}
    wide["promise"] = "a block table of many keys may take a kernel of more rows"
    yield from suite.case("e4m3: wide", **wide)
    yield from suite.case("e4m3: wide, q of e4m3", **wide, **e4m3)
    apart = wide | {"lengths": (900, 40), "multiprocessors": 4, "promise": "such kernels also share requests"}
    yield from suite.case("e4m3: wide, shared", **apart)
    yield from suite.case("e4m3: wide, shared, q of e4m3", **apart, **e4m3)
    yield from suite.case("e4m3: q, page size 53", promise, heads=6, block_size=53, **e4m3)
    for layout in ("slice", "odd"):
        yield from suite.case(f"e4m3: q {layout}", promise, heads=6, q=layout, **e4m3)
    shared: dict[str, Any] = {"heads": suite.split_heads, "lengths": (300, 40), "multiprocessors": 100}
    yield from suite.case("e4m3: q, shared", promise, **shared, **e4m3)
    promise = "batch-invariant mode takes q of e4m3 too, and its choice of a kernel does not look at the batch"
    settings = {"lengths": (1100, 30), "heads": suite.split_heads, "batch_invariant": True, "check": "invariance"}
    yield from suite.case("e4m3: q, batch invariant", promise, **settings, **e4m3)


def _layouts(suite: _Suite) -> Iterator[DenseDecodeCase]:
    promise = "a tensor may be a view of a wider buffer, whose other bytes are neither read nor written"
    for part, layouts in {
        "q": ("slice", "transposed", "odd", "by position"),
        "out": ("contiguous", "slice", "transposed", "odd"),
        "table": ("contiguous", "odd"),
    }.items():
        for layout in layouts:
            settings: dict[str, Any] = {part: layout, "every_target": (part, layout) == ("q", "odd")}
            yield from suite.case(f"layout: {part} {layout}", promise, s_q=2, heads=5, **settings)
            if layout != "by position":
                settings["wrapper"] = DECODE
                yield from suite.case(f"layout: {part} {layout}, decode", promise, heads=5, **settings)
    promise = "the merge too takes any strides"
    shared: dict[str, Any] = {"heads": suite.split_heads, "lengths": (300, 40), "multiprocessors": 1000}
    yield from suite.both("layout: out odd, shared", promise, out="odd", **shared)


def _pairs(suite: _Suite) -> Iterator[DenseDecodeCase]:
    lengths = (2000, 129, 3) if suite.big else (75, 5, 1)  # of three requests, the last offset is past 2^31
    for name, promise, check in pairs.cases(suite.facts):
        settings: dict[str, Any] = {"check": check, "lengths": lengths, "heads": 20 if suite.big else 3}
        yield from suite.both(name, promise, every_target=check == "pair", **settings)
        yield from suite.both(f"{name}, shared", promise, multiprocessors=40, **settings)
        if check != "pair, far":
            yield from suite.case(f"{name}, s_q 3", promise, s_q=3, causal=True, **settings)
        if suite.known.layout.tensor_scale:
            yield from suite.case(f"{name}, e4m3", promise, s_q=2, q_scale=0.25, wrapper=FLASH, **settings)


def _shares(suite: _Suite) -> Iterator[DenseDecodeCase]:
    heads = suite.split_heads
    lengths = (300, 7, 0, 130, 64, 500) if not suite.big else (9000, 7, 0, 130, 64, 33_000)
    # Small tiles, which a CPU's cases have, put 16 programs on a multiprocessor: so many requests make them share.
    promise = "wherever the batch is cut"
    for count, times in ((1, 1 if suite.big else 6), (4, 1), (7, 1), (20, 1), (1000, 1)):
        options: dict[str, Any] = {"check": "shares", "multiprocessors": count, "every_target": count == 7}
        yield from suite.case(
            f"shares: {count} multiprocessors", promise, lengths=lengths * times, heads=heads, **options
        )
    scale = 30 if suite.big else 1
    alike = tuple(keys * scale for keys in (130, 125, 0, 128, 120, 131, 97))
    promise = "requests of about one length go to programs whole"
    for count in (1, 2, 7):
        name = f"shares: alike, {count} multiprocessors"
        yield from suite.case(name, promise, check="blocks", lengths=alike, heads=heads, multiprocessors=count)
    promise = "shares of several blocks of heads"
    yield from suite.case("shares: blocks of heads", promise, lengths=(300, 64), heads=70, multiprocessors=100)
    promise = "rows that see no key weigh nothing in a merge"
    yield from suite.case(
        "shares: causal", promise, s_q=4, causal=True, lengths=(129, 2, 65), heads=heads, multiprocessors=100
    )


def _batch_invariant(suite: _Suite) -> Iterator[DenseDecodeCase]:
    invariant: dict[str, Any] = {"heads": suite.split_heads, "batch_invariant": True}
    kept = {**invariant, "check": "invariance"}
    wide = (1100, 30, 2049) if not suite.big else (5000, 30, 2049, 1024, 1025, 0)
    promise = "batch-invariant mode gives the reference's result"
    yield from suite.case("batch invariant: result", promise, lengths=wide, check="shares", **invariant)
    promise = "a row's bits are the same alone, in a larger batch, in another order and in a request of several tokens"
    lengths = wide if suite.big else wide[:2]
    yield from suite.both("batch invariant: rows keep their bits", promise, lengths=lengths, **kept)
    yield from suite.case("batch invariant: one program", "a call of one split", lengths=(70,), **invariant)
    promise = "a row's bits are the same alone and beside further tokens, whose keys may begin another split"
    name = "batch invariant: tokens of a request keep their bits"
    yield from suite.case(name, promise, lengths=(1025, 513, 30), s_q=3, **kept)


def _contract(suite: _Suite) -> Iterator[DenseDecodeCase]:
    shared: dict[str, Any] = {"heads": suite.split_heads, "lengths": (300, 40), "multiprocessors": 100}
    promise = "a given out is filled wholly and returned"
    yield from suite.case("contract: out is used", promise, out="contiguous", s_q=2, heads=3)
    promise = "a workspace of the size named is enough, and nothing outside it is written"
    yield from suite.both("workspace", promise, check="workspace", **shared)
    invariant = {**shared, "lengths": (1100, 3), "batch_invariant": True}
    yield from suite.both("workspace: batch invariant", promise, check="workspace", **invariant)
    promise = "a batch that does not fit the workspace goes through it in pieces"
    yield from suite.both("workspace: in pieces", promise, check="pieces", **invariant)
    yield from suite.both("contract: same bits twice", "two calls give the same bits", check="determinism", **shared)
    promise = "torch's default dtype and device are neither read nor changed"
    yield from suite.both("contract: torch's defaults", promise, check="defaults", **shared)
    promise = "metadata serves calls of the sizes of its first one, and no others"
    yield from suite.case("contract: metadata", promise, wrapper=FLASH, check="metadata", heads=6)
    if suite.big:
        promise = "a captured call replays on other queries, lengths and pages"
        yield from suite.both("contract: graph", promise, check="graph", lengths=(3000, 40, 0, 700))


def _merged(suite: _Suite) -> Iterator[DenseDecodeCase]:
    lengths = (2000, 129, 0, 3, 700) if suite.big else (300, 129, 0, 3)
    sizes: dict[str, Any] = {"lengths": lengths, "heads": suite.split_heads, "block_size": 16}
    sizes |= {} if suite.known.window is None else {"window": None}  # parts see all of their keys
    for name, changes in merges.chains(suite.facts.wrappers, "optional"):
        options = {"check": changes["check"], "sink": changes["sink"], **sizes}
        yield from suite.both(name, merges.PROMISES[changes["check"]], **options)


def _variants(suite: _Suite) -> Iterator[DenseDecodeCase]:
    few: dict[str, Any] = {"lengths": (200,), "heads": 1, "in_full": True}
    promise = variants.PROMISES[variants.TILES]
    yield from suite.case("variants: tiles", promise, check=variants.TILES, block_size=128, **few)
    promise = variants.PROMISES[variants.SMALL]
    yield from suite.case("variants: small", promise, check=variants.SMALL, block_size=53, **few)
    yield from suite.case("variants: small, odd", promise, check=variants.SMALL, cache="odd", **few)
    promise = "a request in so many parts that another combine kernel merges them"
    for count in (1, 2, 4, 8):
        options = {**few, "lengths": (900,), "multiprocessors": count}
        yield from suite.case(f"variants: combine, odd, {count}", promise, cache="odd", out="odd", **options)


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package, none where it lacks the wrappers; see mlagen.verify.families."""
    if Facts.of(spec).kind != "dense" or not {FLASH, DECODE} & set(spec["wrappers"]):
        return []
    known = DenseDecodeFacts.of(spec)
    suite = _Suite(known, device)
    found: list[Case] = []
    for part in (
        _typical,
        _lengths,
        _windows,
        _caches,
        _numbers,
        _e4m3,
        _layouts,
        _pairs,
        _shares,
        _batch_invariant,
        _contract,
        _merged,
        _variants,
    ):
        found += part(suite)
    return [*found, *refused(known)]
