"""Dense attention over a paged cache: its cases, their inputs, its reference and the code that runs them.

The reference follows the block table key by key, decodes those rows with mlagen.layout.codec, rounds them to the
model's dtype as kernels do, and attends to them. Every other byte of a cache is poison, and every entry of the block
table behind a request's keys, or before its window, names a page far past the cache.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mlagen.layout import CacheLayout, layouts_of
from mlagen.layout.codec import read, write
from mlagen.verify import tolerance
from mlagen.verify.cases import Case
from mlagen.verify.changes import Change, cache_changes, gives, tensor_changes, with_changed
from mlagen.verify.checks import NAN, CaseFailedError, Subject, poisoned_allocations
from mlagen.verify.facts import Facts
from mlagen.verify.inputs import FAR_STRIDE, GUARD, LAYOUTS, Placed, allocate, idle_strides, place
from mlagen.verify.reference import Attention, sparse_attention
from mlagen.verify.results import Figure
from mlagen.verify.schedule import share, splits_of
from mlagen.verify.sparse_decode import Results, check_bits, place_tokens

FLASH, DECODE = "flash_mla_with_kvcache", "decode_attention_fwd"
TENSOR_SCALE = 0.4375
GARBAGE = 2_147_480_000  # what engines leave in entries of a block table that nobody reads
TOO_LONG = 2**31 - 1
LONGEST = 4  # query tokens a request where bits are compared


@dataclass(frozen=True)
class DenseDecodeFacts:
    """What a package's spec says of its cache and its attention.

    Attributes:
        facts: what it says besides.
        layout: of the cache.
        window: keys that a query token sees; None: all.
    """

    facts: Facts
    layout: CacheLayout
    window: int | None

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> DenseDecodeFacts:
        """The facts of `SPEC["spec"]`."""
        layout = layouts_of(spec)[0]
        assert layout is not None
        return cls(Facts.of(spec), layout, spec["attention"]["window"])


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
        cache: layout in memory: "end to end", "page gap", "row gap", "head gap", "heads first", "odd", "idle" or "far".
        poison: byte of what must not matter.
        dtype: of a quantised cache's tensor.
        scale: softmax_scale as a multiple of d_qk ** -0.5; None: not passed.
        q, out: layout in memory, a key of mlagen.verify.inputs.LAYOUTS; `out` None: the wrapper allocates it.
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
        check: what is asked of the result, a key of CHECKS.
        multiprocessors: size of the device that the wrapper plans for; None: as it is.
        batch_invariant: enable_batch_invariant.
    """

    problem: DenseDecodeProblem
    wrapper: str = FLASH
    check: str = "reference"
    multiprocessors: int | None = None
    batch_invariant: bool = False

    @property
    def attends(self) -> bool:
        """True."""
        return True


@dataclass(frozen=True)
class DenseDecodeRefusalCase(Case):
    """A call that a wrapper must refuse with a ValueError or TypeError that names the argument.

    Attributes:
        wrapper: the wrapper called.
        argument: the argument that is off.
        text: what the error says besides.
        change: makes the arguments of a valid call wrong, in place.
    """

    wrapper: str
    argument: str
    text: str
    change: Callable[[dict[str, Any]], None]


KINDS = (DenseDecodeCase, DenseDecodeRefusalCase)


class _Suite:
    """Builds cases with the sizes that suit a device."""

    def __init__(self, known: DenseDecodeFacts, device: str) -> None:
        self.known, self.facts = known, known.facts
        self.big = device == "cuda"
        self.planar = known.layout.planar
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
        if wrapper in self.facts.wrappers and fits and not (self.planar and problem.kv_heads > 1):
            yield DenseDecodeCase(f"dense_decode: {name}", promise, problem, **options)

    def both(self, name: str, promise: str, **settings: Any) -> Iterator[DenseDecodeCase]:
        """A case of each wrapper."""
        for wrapper, suffix in ((FLASH, ""), (DECODE, ", decode")):
            yield from self.case(name + suffix, promise, wrapper=wrapper, **settings)


def _typical(suite: _Suite) -> Iterator[DenseDecodeCase]:
    big, facts = suite.big, suite.facts
    promise = "an ordinary call gives the reference's result"
    yield from suite.both("typical", promise, every_target=True)
    yield from suite.both("typical, shared", promise, every_target=True, multiprocessors=40)
    own = (8000, 33000) if big else (65,)
    yield from suite.both("model's own heads", "the model's own heads", lengths=own, heads=facts.num_heads)
    many = tuple(37 * number % 301 for number in range(515 if big else 20))
    yield from suite.both("many requests", "a large batch", lengths=many, heads=3)
    yield from suite.both("no requests", "an empty batch gives empty results", lengths=(), columns=1)
    yield from suite.case("no query tokens", "requests without query tokens give empty results", s_q=0)
    for number, heads in enumerate((1, 5, 6, 12, 16, 17, 20, 32, 64, 96, 128)):
        yield from suite.both(
            f"heads: {heads}",
            f"{heads} heads a rank, whatever the tile holds",
            every_target=heads in (17, 128),
            heads=heads,
            lengths=((70, 3), (33,), (1,), (65,))[number % 4],
        )
    for heads, kv_heads in ((10, 2), (6, 6)):
        yield from suite.both(
            f"heads: {heads} of {kv_heads} KV heads",
            "query heads share KV heads evenly",
            heads=heads,
            kv_heads=kv_heads,
            lengths=(70, 3),
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
    scale = 20 if suite.big else 1  # units of the requests of which no program has a whole number
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
    yield from suite.both(
        "offsets: cache past 2^31 bytes",
        "page offsets are 64 bits wide",
        cache="far",
        block_size=16,
        lengths=(40,),
        heads=3,
        columns=3,
    )
    promise = "offsets of q and out by request are 64 bits wide"
    yield from suite.case("offsets: tokens past 2^31 elements", promise, heads=3, q="far", out="far")


def _numbers(suite: _Suite) -> Iterator[DenseDecodeCase]:
    for name, scale, promise in (
        ("large", 40.0, "a softmax that saturates stays finite"),
        ("tiny", 1e-6, "a softmax that is all but uniform"),
        ("zero", 0.0, "softmax_scale 0: the mean of the keys"),
        ("negative", -1.0, "the maximum is that of the scaled logits"),
    ):
        yield from suite.case(f"logits: {name}", promise, scale=scale, heads=3)


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


def _shares(suite: _Suite) -> Iterator[DenseDecodeCase]:
    heads = suite.split_heads
    lengths = (300, 7, 0, 130, 64, 500) if not suite.big else (9000, 7, 0, 130, 64, 33_000)
    # Small tiles, which a CPU's cases have, put 16 programs on a multiprocessor: so many requests make them share.
    for multiprocessors, times in ((1, 1 if suite.big else 6), (4, 1), (7, 1), (20, 1), (1000, 1)):
        yield from suite.case(
            f"shares: {multiprocessors} multiprocessors",
            "wherever the batch is cut",
            check="shares",
            lengths=lengths * times,
            heads=heads,
            multiprocessors=multiprocessors,
            every_target=multiprocessors == 7,
        )
    scale = 30 if suite.big else 1
    alike = tuple(keys * scale for keys in (130, 125, 0, 128, 120, 131, 97))
    for multiprocessors in (1, 2, 7):
        yield from suite.case(
            f"shares: alike, {multiprocessors} multiprocessors",
            "requests of about one length go to programs whole",
            check="blocks",
            lengths=alike,
            heads=heads,
            multiprocessors=multiprocessors,
        )
    promise = "rows that see no key weigh nothing in a merge"
    yield from suite.case(
        "shares: causal", promise, s_q=4, causal=True, lengths=(129, 2, 65), heads=heads, multiprocessors=100
    )
    wide = (1100, 30, 2049) if not suite.big else (5000, 30, 2049, 1024, 1025, 0)
    yield from suite.case(
        "batch invariant: result",
        "batch-invariant mode gives the reference's result",
        lengths=wide,
        heads=heads,
        batch_invariant=True,
        check="shares",
    )
    yield from suite.both(
        "batch invariant: rows keep their bits",
        "a row's bits are the same alone, in a larger batch, in another order and in a request of several tokens",
        check="invariance",
        lengths=wide[:2] if not suite.big else wide,
        heads=heads,
        batch_invariant=True,
    )
    yield from suite.case(
        "batch invariant: one program", "a call of one split", lengths=(70,), heads=heads, batch_invariant=True
    )
    yield from suite.case(
        "batch invariant: tokens of a request keep their bits",
        "a row's bits are the same alone and beside further tokens, whose keys may begin another split",
        check="invariance",
        lengths=(1025, 513, 30),
        s_q=3,
        heads=heads,
        batch_invariant=True,
    )


def _manners(suite: _Suite) -> Iterator[DenseDecodeCase]:
    shared: dict[str, Any] = {"heads": suite.split_heads, "lengths": (300, 40), "multiprocessors": 100}
    promise = "a given out is filled wholly and returned"
    yield from suite.case("manners: out is used", promise, out="contiguous", s_q=2, heads=3)
    promise = "a workspace of the size told is enough, and nothing outside it is written"
    yield from suite.both("workspace", promise, check="workspace", **shared)
    invariant = {**shared, "lengths": (1100, 3), "batch_invariant": True}
    yield from suite.both("workspace: batch invariant", promise, check="workspace", **invariant)
    promise = "a batch that does not fit the workspace goes through it in pieces"
    yield from suite.both("workspace: in pieces", promise, check="pieces", **invariant)
    yield from suite.both("manners: same bits twice", "two calls give the same bits", check="determinism", **shared)
    promise = "torch's default dtype and device are neither read nor changed"
    yield from suite.both("manners: torch's defaults", promise, check="defaults", **shared)
    promise = "metadata serves calls of the sizes of its first one, and no others"
    yield from suite.case("manners: metadata", promise, wrapper=FLASH, check="metadata", heads=6)
    if suite.big:
        promise = "a captured call replays on other queries, lengths and pages"
        yield from suite.both("manners: graph", promise, check="graph", lengths=(3000, 40, 0, 700))


def _flash_changes(known: DenseDecodeFacts) -> Iterator[Change]:
    facts, layout = known.facts, known.layout
    yield "head_dim_v", "not the spec's", with_changed("head_dim_v", lambda d_v: d_v + 16), ""
    yield "is_fp8_kvcache", "not the layout's", with_changed("is_fp8_kvcache", lambda given: not given), layout.name
    yield "num_splits", "a tensor", gives("num_splits", lambda given: given["block_table"]), ""
    yield "tile_scheduler_metadata", "None", gives("tile_scheduler_metadata", lambda _: None), ""
    yield "softmax_scale", "a tensor", gives("softmax_scale", lambda given: given["q"].new_ones(())), ""
    for name in ("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length"):
        yield name, "given", gives(name, lambda given: given["block_table"]), "dense"
    out = getattr(torch, facts.dtype)
    yield "out", "dtype float32", gives("out", _zeros(2, 2, 4, facts.d_v)), ""
    yield "out", "too wide", gives("out", _zeros(2, 2, 4, facts.d_v + 8, dtype=out)), ""
    apart = _zeros(2, 3, 4, facts.d_v, dtype=out)
    yield "out", "requests apart", gives("out", lambda given: apart(given)[:, :2]), ""


def _decode_changes(known: DenseDecodeFacts) -> Iterator[Change]:
    yield "v_buffer", "of its own", with_changed("v_buffer", torch.clone), ""
    yield "v_buffer", "other lanes", gives("v_buffer", lambda given: given["k_buffer"][..., 1:]), ""
    yield "page_size", "not the buffer's", with_changed("page_size", lambda size: size + 1), ""
    yield "page_size", "0", with_changed("page_size", lambda _: 0), ""
    yield "logit_cap", "not 0", gives("logit_cap", lambda _: 30.0), ""
    yield "sm_scale", "None", gives("sm_scale", lambda _: None), ""
    yield "o", "dtype float32", with_changed("o", torch.Tensor.float), ""
    yield "o", "a request short", with_changed("o", lambda t: t[1:]), ""
    yield "lse", "dtype float64", with_changed("lse", torch.Tensor.double), ""
    yield "lse", "missing", gives("lse", lambda _: None), ""


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, Any]], torch.Tensor]:
    return lambda given: given["q"].new_zeros(shape, dtype=dtype)


def _changes(known: DenseDecodeFacts, wrapper: str) -> Iterator[Change]:
    flash, layout = wrapper == FLASH, known.layout
    other = torch.float16 if known.facts.dtype == "bfloat16" else torch.bfloat16
    yield from tensor_changes("q", other, first=True)
    yield "q", "wider than a row", with_changed("q", lambda t: t.new_zeros(*t.shape[:-1], t.shape[-1] + 8)), ""
    if not layout.planar:
        yield "q", "heads that do not fall to KV heads", with_changed("q", lambda t: t[..., :3, :]), ""
    if flash:
        yield from cache_changes("k_cache", layout)
    else:
        yield "k_buffer", "not a tensor", gives("k_buffer", lambda _: [1, 2]), ""
        yield "k_buffer", "two dimensions", with_changed("k_buffer", lambda t: t[0, 0]), ""
        if layout.tensor_scale:
            yield "k_scale", "a number", gives("k_scale", lambda _: 1.0), ""
    for name in ("block_table", "cache_seqlens") if flash else ("req_to_token", "b_seq_len"):
        yield from tensor_changes(name, torch.int64)
        yield name, "a request too many", with_changed(name, lambda t: torch.cat([t, t[:1]])), ""
        yield name, "missing", gives(name, lambda _: None), ""
    if known.window is not None:
        yield "window", "0", gives("window", lambda _: 0), ""
        yield "window", "a float", gives("window", lambda _: 5.0), ""
    yield "workspace", "too small", gives("workspace", _zeros(16)), ""
    yield "workspace", "dtype float16", gives("workspace", _zeros(1 << 20, dtype=torch.float16)), ""
    yield from _flash_changes(known) if flash else _decode_changes(known)


def _refusals(known: DenseDecodeFacts) -> Iterator[DenseDecodeRefusalCase]:
    for wrapper, short in ((FLASH, "dense_decode"), (DECODE, "decode")):
        if wrapper in known.facts.wrappers:
            for argument, name, change, text in _changes(known, wrapper):
                yield DenseDecodeRefusalCase(
                    f"refuses: {argument}, {name} ({short})",
                    f"{wrapper} names {argument} in a ValueError or TypeError",
                    wrapper,
                    argument,
                    text,
                    change,
                )


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package, none where it lacks the wrappers.

    Args:
        spec: `SPEC["spec"]` of the package. A case about something that it lacks is left out.
        device: "cpu" gives sizes that the interpreter bears, "cuda" the model's own.
    """
    if Facts.of(spec).kind != "dense" or not {FLASH, DECODE} & set(spec["wrappers"]):
        return []
    known = DenseDecodeFacts.of(spec)
    suite = _Suite(known, device)
    found: list[Case] = []
    for part in (_typical, _lengths, _windows, _caches, _numbers, _layouts, _shares, _manners):
        found += part(suite)
    return [*found, *_refusals(known)]


@dataclass
class Inputs:
    """The tensors of one call.

    Attributes:
        problem: what they are of.
        layout: the cache's.
        q: [requests, s_q, heads, d_qk].
        cache: [pages, block_size, kv_heads, row].
        block_table: i32 [requests, width].
        lengths: i32 [requests].
        keys: of each request.
        scale: softmax_scale; None: not passed.
        k_scale: f32 [1] where the layout has one scale a tensor.
        window: keys that a query token sees; None: all.
        out: of `out`, [requests, s_q, heads, d_v], or None.
        placed: every input's buffer by name.
    """

    problem: DenseDecodeProblem
    layout: CacheLayout
    q: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    keys: list[int]
    scale: float | None
    k_scale: torch.Tensor | None
    window: int | None
    out: Placed | None
    placed: dict[str, Placed]

    @property
    def sm_scale(self) -> float:
        """The factor of the logits that the call takes."""
        return float(self.q.shape[-1] ** -0.5) if self.scale is None else self.scale

    def arguments(self, wrapper: str) -> dict[str, Any]:
        """Arguments of a wrapper but for metadata and head_dim_v."""
        optional: dict[str, Any] = {"k_scale": self.k_scale}
        if self.problem.window != "spec":
            optional["window"] = self.window or 2**31 - 1
        optional = {name: value for name, value in optional.items() if value is not None}
        if self.problem.window is None:
            optional["window"] = None
        if wrapper == FLASH:
            found: dict[str, Any] = {
                "q": self.q,
                "k_cache": self.cache,
                "block_table": self.block_table,
                "cache_seqlens": self.lengths,
                "causal": self.problem.causal,
                "is_fp8_kvcache": self.layout.quantised,
            }
            optional |= {} if self.scale is None else {"softmax_scale": self.scale}
            return found | optional | ({} if self.out is None else {"out": self.out.view})
        requests, _, heads, _ = self.q.shape
        return optional | {
            "q": self.q[:, 0],
            "k_buffer": self.cache,
            "v_buffer": self.cache[..., : max(1, self.cache.shape[3] // 2)],
            "req_to_token": self.block_table,
            "b_seq_len": self.lengths,
            "attn_logits": None,
            "num_kv_splits": 4,
            "sm_scale": self.sm_scale,
            "page_size": self.problem.block_size,
            "lse": torch.full((requests, heads + 3), NAN, dtype=torch.float32, device=self.q.device)[:, :heads],
        }

    def untouched(self) -> None:
        """Raises CaseFailedError if an input has other bits than when it was placed."""
        changed = [name for name, tensor in self.placed.items() if tensor.changed()]
        if changed:
            raise CaseFailedError(f"wrote to its input {', '.join(changed)}")

    def first_key(self, request: int) -> int:
        """The first key that any query token of a request sees."""
        if self.window is None:
            return 0
        return max(self.keys[request] - self.problem.s_q - self.window + 1, 0)


def _empty_cache(
    problem: DenseDecodeProblem, pages: int, layout: CacheLayout, dtype: torch.dtype, device: str
) -> Placed:
    """A cache [pages, block_size, kv_heads, row] of poison: bytes, or lanes where it is not quantised."""
    size, heads, kind = problem.block_size, problem.kv_heads, problem.cache
    row = layout.row_bytes if layout.quantised else layout.lanes
    unit = 1 if layout.quantised else layout.data[0].itemsize
    least = max(one.itemsize for one in layout.fields) // unit  # elements at whose multiples rows may begin
    odd = least if kind == "odd" and not layout.planar else 0
    head_stride = row + {"head gap": 16 * least}.get(kind, odd)
    row_stride = heads * head_stride + {"row gap": 48}.get(kind, 0)
    if kind == "heads first":
        row_stride, head_stride = row, size * row
    page_stride = -(-layout.page_bytes(size) // unit) if layout.planar else size * row_stride
    if kind == "heads first":
        page_stride = heads * head_stride
    page_stride += {"page gap": 128, "odd": 3 * least}.get(kind, 0)
    offset = GUARD + (least if kind == "odd" else 0)
    far = kind == "far"
    page_bytes = page_stride
    if far:
        page_stride = FAR_STRIDE + 8
    elements = offset + max(pages - 1, 0) * page_stride + page_bytes + GUARD
    lazy = far and device == "cpu"
    buffer = allocate(elements * unit, torch.uint8, device, None if lazy else problem.poison)
    buffer = buffer if layout.quantised else buffer.view(dtype)
    shape, strides = (pages, size, heads, row), (page_stride, row_stride, head_stride, 1)
    view = buffer.as_strided(shape, idle_strides(shape, strides) if kind == "idle" else strides, offset)
    if lazy:
        view.view(torch.uint8).fill_(problem.poison)
    return Placed(view, buffer, None)


def build(problem: DenseDecodeProblem, known: DenseDecodeFacts, device: str, seed: int) -> Inputs:
    """The tensors of a problem, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = torch.Generator().manual_seed(seed)
    facts, layout, size = known.facts, known.layout, problem.block_size
    dtype = getattr(torch, facts.dtype)
    shape = (problem.requests * problem.s_q, problem.heads, facts.d_qk)
    values = torch.randn(*shape, generator=generator).to(dtype).to(device)
    q, placed_q = place_tokens(values, (problem.requests, problem.s_q), problem.q, NAN)
    window = known.window if problem.window == "spec" else problem.window
    assert window is None or isinstance(window, int)
    lengths = torch.tensor(problem.lengths, dtype=torch.int64).clamp(-(2**31), 2**31 - 1).int().to(device)
    inputs = Inputs(
        problem,
        layout,
        q,
        torch.empty(0),
        torch.empty(0),
        lengths,
        problem.keys,
        None if problem.scale is None else problem.scale * facts.d_qk**-0.5,
        torch.full((1,), TENSOR_SCALE, device=device) if layout.tensor_scale else None,
        window,
        None,
        {"q": placed_q, "lengths": Placed(lengths, lengths, lengths.clone())},
    )
    used = [
        (request, column)
        for request, keys in enumerate(inputs.keys)
        for column in range(inputs.first_key(request) // size, -(-keys // size))
    ]
    pages = len(used) + (3 if problem.cache not in ("far", "idle") else 0)
    order = torch.randperm(pages, generator=generator).tolist()
    table = torch.full((problem.requests, problem.width), GARBAGE, dtype=torch.int32)
    for (request, column), page in zip(used, order, strict=False):
        table[request, column] = page
    empty = _empty_cache(problem, pages, layout, dtype, device)
    for request, keys in enumerate(inputs.keys):
        positions = torch.arange(inputs.first_key(request), keys)
        slots = table[request][positions // size].long() * size + positions % size
        for head in range(problem.kv_heads):
            rows = torch.randn(keys - inputs.first_key(request), layout.lanes, generator=generator).to(dtype)
            head_pages = empty.view[:, :, head].view(torch.uint8)
            if len(slots):
                write(layout, head_pages, size, slots.to(device), rows.to(device), inputs.k_scale)
    if problem.cache != "far":
        inputs.placed["cache"] = replace(empty, before=empty.buffer.clone())
    inputs.cache = empty.view.view(problem.dtype) if layout.quantised else empty.view
    placed_table = place(table[:, None].to(device), LAYOUTS[problem.table], GARBAGE)
    inputs.block_table = placed_table.view[:, 0]
    inputs.placed["block_table"] = placed_table
    if problem.out is not None:
        nothing = torch.full((*shape[:2], facts.d_v), NAN, dtype=dtype, device=device)
        placed = place(nothing, LAYOUTS[problem.out], NAN)
        view = placed.view.unflatten(0, (problem.requests, problem.s_q))  # type: ignore[no-untyped-call]
        inputs.out = replace(placed, view=view)
    return inputs


def attend(inputs: Inputs, facts: Facts, empty_row_lse: str) -> Attention:
    """Attention of each token over the keys that it sees, by mlagen.verify.reference."""
    _, s_q, heads, d_qk = inputs.q.shape
    size, kv_heads = inputs.cache.shape[1:3]
    group = heads // kv_heads
    tokens: list[list[Attention]] = [[] for _ in range(kv_heads)]
    table = inputs.block_table.long()
    scale = d_qk**-0.5 if inputs.scale is None else inputs.scale
    device = inputs.q.device
    for request, keys in enumerate(inputs.keys):
        first = inputs.first_key(request)
        key = torch.arange(first, keys, device=device)
        slots = table[request][key // size] * size + key % size
        own = keys - s_q + torch.arange(s_q, device=device)[:, None]  # [s_q, 1]
        seen = torch.ones(s_q, len(key), dtype=torch.bool, device=device)
        if inputs.problem.causal:
            seen &= key <= own
        if inputs.window is not None:
            seen &= key > own - inputs.window
        indices = torch.where(seen, key - first, -1)
        for head in range(kv_heads):
            pages = inputs.cache[:, :, head].view(torch.uint8)
            rows = torch.zeros(1, d_qk, device=device)
            if len(key):
                rows = read(inputs.layout, pages, size, slots, inputs.k_scale)
            q = inputs.q[request, :, head * group : (head + 1) * group]
            rows = rows.to(q.dtype)[:, None]
            args = (indices, scale, facts.d_v, None, None, facts.lse_base, empty_row_lse)
            tokens[head].append(sparse_attention(q, rows, *args))
    empty = [
        Attention(*(torch.zeros(0, group, *end, device=device) for end in ((facts.d_v,), (), (), (facts.d_v,), ())))
    ]
    by_head = [Attention(*(torch.cat(parts) for parts in zip(*(own or empty), strict=True))) for own in tokens]
    return Attention(*(torch.cat(parts, 1) for parts in zip(*by_head, strict=True)))


@contextlib.contextmanager
def _planned(subject: Subject, case: DenseDecodeCase) -> Iterator[None]:
    """Has calls planned for the case's multiprocessors, and in a case of shares as if sharing requests cost nothing."""
    module = subject.package.dense_decode
    combine_units = module.COMBINE_UNITS
    with subject.planned_for(case.multiprocessors):
        module.COMBINE_UNITS = 0 if case.check in ("shares", "invariance") else combine_units
        module._schedule.cache_clear()
        try:
            yield
        finally:
            module.COMBINE_UNITS = combine_units
            module._schedule.cache_clear()


def _call(subject: Subject, case: DenseDecodeCase, inputs: Inputs, **given: Any) -> Results:
    """Calls the wrapper; `given` holds further arguments by name."""
    package, arguments = subject.package, inputs.arguments(case.wrapper)
    arguments["enable_batch_invariant"] = case.batch_invariant
    with _planned(subject, case), poisoned_allocations():
        if case.wrapper == FLASH:
            metadata = given.pop("tile_scheduler_metadata", None) or package.get_mla_metadata()[0]
            arguments |= {"head_dim_v": subject.facts.d_v, "tile_scheduler_metadata": metadata}
            return Results(*getattr(package, FLASH)(**arguments, **given))
        requests, s_q, heads, _ = inputs.q.shape
        shape = (requests, s_q, heads, subject.facts.d_v)
        out = torch.full(shape, NAN, dtype=inputs.q.dtype, device=subject.device)
        out = out if inputs.out is None else inputs.out.view
        getattr(package, DECODE)(**arguments, o=out[:, 0], **given)
        return Results(out, arguments["lse"][:, :, None])


def _compare(subject: Subject, case: DenseDecodeCase, inputs: Inputs, results: Results) -> list[Figure]:
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
    expected = attend(inputs, facts, facts.empty_row_lse if case.wrapper == FLASH else "-inf")
    figures = tolerance.out_errors(results.out.flatten(0, 1), expected, d_qk, partials=facts.partials)
    lse = results.lse.transpose(1, 2).reshape(requests * s_q, heads)
    most = max([1, *inputs.keys])
    return [*figures, tolerance.lse_error(lse, expected, d_qk, most, facts.lse_base)]


def _reference(subject: Subject, case: DenseDecodeCase, inputs: Inputs) -> list[Figure]:
    results = _call(subject, case, inputs)
    figures = _compare(subject, case, inputs, results)
    inputs.untouched()
    if inputs.out is not None:
        if results.out.data_ptr() != inputs.out.view.data_ptr():
            raise CaseFailedError("out was given, but another tensor was returned")
        if inputs.out.spilled():
            raise CaseFailedError("wrote outside out")
    return figures


def _determinism(subject: Subject, case: DenseDecodeCase, inputs: Inputs) -> list[Figure]:
    first = _call(subject, case, inputs).copy()
    check_bits("second call", first, _call(subject, case, inputs))
    return _compare(subject, case, inputs, first)


def _requests(inputs: Inputs, picked: Sequence[int]) -> Inputs:
    """The same call for some of its requests, in another order."""
    at = torch.tensor(picked, device=inputs.q.device)
    return replace(
        inputs,
        q=inputs.q[at].contiguous(),
        block_table=inputs.block_table[at].contiguous(),
        lengths=inputs.lengths[at].contiguous(),
        keys=[inputs.keys[request] for request in picked],
        out=None,
        placed={},
    )


def _last_tokens(inputs: Inputs, s_q: int) -> Inputs:
    """The same call for the last query tokens of each request, which then see what they saw, if the call is causal."""
    problem = replace(inputs.problem, s_q=s_q, causal=True)
    return replace(inputs, q=inputs.q[:, -s_q:].contiguous(), problem=problem, placed={})


def _invariance(subject: Subject, case: DenseDecodeCase, inputs: Inputs) -> list[Figure]:
    requests, longest = inputs.q.shape[:2]
    longer = inputs
    inputs = _last_tokens(longer, 1)
    whole = _call(subject, case, inputs).copy()

    def check(what: str, picked: Sequence[int], changed: Inputs | None = None) -> None:
        got = _call(subject, case, changed or _requests(inputs, picked))
        wanted = Results(*(tensor[torch.tensor(picked, device=tensor.device)] for tensor in whole))
        check_bits(what, wanted, Results(*(tensor[: len(picked)] for tensor in got)))

    every = list(range(requests))
    check("alone", [0])
    check("in another order", every[::-1])
    check("in a larger batch", [*([1] * (12 if subject.device == "cpu" else 300)), *every])
    wider = _requests(inputs, every)
    wider.block_table = torch.nn.functional.pad(wider.block_table, (0, 32), value=GARBAGE)
    check("with a wider block table", every, wider)
    if case.wrapper == FLASH:
        for s_q in (2, longest):
            got = _call(subject, case, _last_tokens(longer, s_q))
            last = Results(got.out[:, -1:], got.lse[:, :, -1:])
            check_bits(f"as the last of {s_q} query tokens", whole, last)
        if longest > 1:
            shorter = replace(inputs, q=longer.q[:, -2:-1].contiguous(), lengths=inputs.lengths - 1)
            alone = _call(subject, case, shorter).copy()
            got = _call(subject, case, _last_tokens(longer, 2))
            check_bits("as the first of 2 query tokens", alone, Results(got.out[:, :1], got.lse[:, :, :1]))
    return _compare(subject, case, inputs, whole)


def _unit_counts(subject: Subject, case: DenseDecodeCase, inputs: Inputs, schedule: Any) -> list[int]:
    """Units of each request, as the schedule cuts them."""
    unit = schedule.unit_keys
    return [max(1, -(-keys // unit) - inputs.first_key(index) // unit) for index, keys in enumerate(inputs.keys)]


def _schedule(subject: Subject, case: DenseDecodeCase, inputs: Inputs) -> Any:
    """How the package schedules a call whose rows are aligned."""
    module: Any = subject.package.dense_decode
    requests, s_q, heads, _ = inputs.q.shape
    size, kv_heads = inputs.cache.shape[1:3]
    window = [] if module.__dict__.get("WINDOW") is None else [inputs.window or module.MAX_KEYS]
    keys = inputs.block_table.shape[1] * size
    with _planned(subject, case):
        facts = subject.package._launch.device_facts(inputs.q.device)
        alignment = module._alignment(inputs.q, inputs.cache, inputs.q[:, 0, :, : subject.facts.d_v])
        sm90 = [module._can_sm90(facts, alignment, size, inputs.sm_scale)] if "SM90_CALLS" in vars(module) else []
        return module._schedule(
            facts, alignment, requests, s_q, heads, kv_heads, size, keys, *window, case.batch_invariant, *sm90
        )


def _shares_check(subject: Subject, case: DenseDecodeCase, inputs: Inputs) -> list[Figure]:
    schedule = _schedule(subject, case, inputs)
    workspace = torch.zeros(schedule.floats, device=subject.device)
    results = _call(subject, case, inputs, workspace=workspace)
    requests = inputs.q.shape[0]
    width = 2 if subject.package.dense_decode.__dict__.get("WINDOW") is None else 3
    told = workspace[-width * requests :].view(torch.int32).view(requests, width).tolist()
    units = _unit_counts(subject, case, inputs, schedule)
    parts = share(units, schedule.overhead, schedule.combine_units, schedule.programs)
    wanted = splits_of(parts, requests)
    if [tuple(row[:2]) for row in told] != wanted:
        raise CaseFailedError(f"requests have (first program, programs) {told}, and should have {wanted}")
    if case.check == "shares" and schedule.programs > 20 and max(count for _, count in wanted) < 2:
        raise CaseFailedError("no request is shared")
    return _compare(subject, case, inputs, results)


def _workspace(subject: Subject, case: DenseDecodeCase, inputs: Inputs) -> list[Figure]:
    requests, s_q, heads, _ = inputs.q.shape
    size, kv_heads = inputs.cache.shape[1:3]
    keys = inputs.block_table.shape[1] * size
    with _planned(subject, case):
        options = {"enable_batch_invariant": case.batch_invariant}
        sizes = (requests, s_q, heads, keys, kv_heads)
        floats = subject.package.dense_workspace_size(inputs.q.device, *sizes, **options)
    buffer = place(torch.full((1, 1, floats), NAN, device=subject.device), LAYOUTS["contiguous"], NAN)
    results = _call(subject, case, inputs, workspace=buffer.view.view(-1)).copy()
    if not bool((~buffer.view.isnan()).any()):
        raise CaseFailedError("a workspace is not used")
    if buffer.spilled():
        raise CaseFailedError("wrote outside a workspace")
    check_bits("without a workspace", results, _call(subject, case, inputs))
    return _compare(subject, case, inputs, results)


def _pieces(subject: Subject, case: DenseDecodeCase, inputs: Inputs) -> list[Figure]:
    whole = _call(subject, case, inputs).copy()
    module = subject.package.dense_decode
    before = module._splits.WORKSPACE_BYTES
    module._splits.WORKSPACE_BYTES = 4
    module._schedule.cache_clear()
    try:
        schedule = _schedule(subject, case, inputs)
        check_bits("in pieces", whole, _call(subject, case, inputs))
    finally:
        module._splits.WORKSPACE_BYTES = before
        module._schedule.cache_clear()
    if schedule.requests != 1:
        raise CaseFailedError(f"a piece has {schedule.requests} requests instead of 1")
    return _compare(subject, case, inputs, whole)


def _blocks(subject: Subject, case: DenseDecodeCase, inputs: Inputs) -> list[Figure]:
    module: Any = subject.package.dense_decode
    before = module.BLOCK_B
    module.BLOCK_B = min(before, 4 if subject.device == "cpu" else before)
    try:
        return _shares_check(subject, case, inputs)
    finally:
        module.BLOCK_B = before


def _defaults(subject: Subject, case: DenseDecodeCase, inputs: Inputs) -> list[Figure]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        results = _call(subject, case, inputs)
        if torch.get_default_dtype() != torch.float64:
            raise CaseFailedError("changed torch's default dtype")
    finally:
        torch.set_default_dtype(dtype)
    return _compare(subject, case, inputs, results)


def _metadata(subject: Subject, case: DenseDecodeCase, inputs: Inputs) -> list[Figure]:
    package = subject.package
    old_form = package.get_mla_metadata(inputs.lengths, inputs.q.shape[2], 1)
    metadata, nothing = old_form
    if nothing is not None or package.get_mla_metadata()[0] is metadata:
        raise CaseFailedError("get_mla_metadata gives something else than a fresh object and None")
    first = _call(subject, case, inputs, tile_scheduler_metadata=metadata).copy()
    check_bits("second call", first, _call(subject, case, inputs, tile_scheduler_metadata=metadata))
    others = {
        "h_q": replace(inputs, q=inputs.q[:, :, :-1], placed={}),
        "b": _requests(inputs, [0]),
        "s_q": replace(inputs, q=inputs.q.repeat(1, 2, 1, 1), placed={}),
        "causal": replace(inputs, problem=replace(inputs.problem, causal=True)),
    }
    for name, other in others.items():
        try:
            _call(subject, case, other, tile_scheduler_metadata=metadata)
        except ValueError as error:
            if not re.search(rf"tile_scheduler_metadata: .*\b{name} ", str(error)):
                raise CaseFailedError(f"the ValueError does not name {name}: {error}") from error
        else:
            raise CaseFailedError(f"took a call of another {name}")
    return _compare(subject, case, inputs, first)


def _graph(subject: Subject, case: DenseDecodeCase, inputs: Inputs) -> list[Figure]:
    _call(subject, case, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _call(subject, case, inputs)
    figures = []
    for picked in ([2, 0, 3, 1], [1, 3, 0, 2]):
        changed = _requests(inputs, picked)
        inputs.q.copy_(changed.q)
        inputs.block_table.copy_(changed.block_table)
        inputs.lengths.copy_(changed.lengths)
        inputs.keys = changed.keys
        results.out.fill_(NAN)
        results.lse.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        figures += _compare(subject, case, inputs, results)
    return figures


CHECKS: dict[str, Callable[[Subject, DenseDecodeCase, Inputs], list[Figure]]] = {
    "reference": _reference,
    "determinism": _determinism,
    "invariance": _invariance,
    "shares": _shares_check,
    "blocks": _blocks,
    "workspace": _workspace,
    "pieces": _pieces,
    "defaults": _defaults,
    "metadata": _metadata,
    "graph": _graph,
}


def _refusal(subject: Subject, case: DenseDecodeRefusalCase, known: DenseDecodeFacts) -> None:
    flash = case.wrapper == FLASH
    kv_heads = 1 if known.layout.planar else 2
    problem = DenseDecodeProblem((1100, 200), s_q=2 if flash else 1, heads=4, kv_heads=kv_heads)
    inputs = build(problem, known, subject.device, 0)
    arguments = inputs.arguments(case.wrapper) | {"enable_batch_invariant": True}
    if flash:
        arguments |= {"head_dim_v": known.facts.d_v}
        arguments["tile_scheduler_metadata"] = subject.package.get_mla_metadata()[0]
    else:
        dtype = getattr(torch, known.facts.dtype)
        arguments["o"] = torch.zeros(2, 4, known.facts.d_v, dtype=dtype, device=subject.device)
    case.change(arguments)
    with subject.planned_for(None):
        try:
            getattr(subject.package, case.wrapper)(**arguments)
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
    known = DenseDecodeFacts.of(subject.package.SPEC["spec"])
    match case:
        case DenseDecodeCase():
            # Bits are compared between calls of one query token a request and of several.
            problem = replace(case.problem, s_q=LONGEST) if case.check == "invariance" else case.problem
            inputs = build(problem, known, subject.device, seed)
            return CHECKS[case.check](subject, case, inputs)
        case DenseDecodeRefusalCase():
            _refusal(subject, case, known)
            return []
        case _:
            raise TypeError(f"unknown case {case!r}")
