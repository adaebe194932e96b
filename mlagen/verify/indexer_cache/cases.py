"""The cases of the kernels around the indexer's keys: plain data, made from a spec and from where it runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mlagen.verify.call.case import Case
from mlagen.verify.checks import variants
from mlagen.verify.indexer_cache.invalid import refused
from mlagen.verify.indexer_cache.side import (
    GATHER,
    KEYS_QUERY,
    NORMALISE,
    QUERY,
    SHORT,
    WRITE,
    IndexerSide,
    side_of,
    takes_ratio,
)
from mlagen.verify.paged.pages import PAGES, Pages

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class KeysCase(Case):
    """A call of a writer.

    Attributes:
        wrapper: WRITE or NORMALISE.
        pages: how the cache lies in memory.
        heads: the cache has a dimension of heads.
        tokens: rows of the source; None: as many as `values` needs.
        values: pattern of the rows, a key of mlagen.verify.paged.values.VALUES.
        slots: pattern of the slots, as mlagen.verify.cache.write draws them.
        source: layout in memory of the rows, a key of mlagen.verify.call.memory.LAYOUTS.
        tables: of NORMALISE, of the table of angles and of the norm's weight.
        positions: of NORMALISE: "random", "garbage" (among them), or "longer" (than the tokens).
        ratio: compress_ratio; None: not passed.
        wide: arguments that may be fp32 are fp32.
        named: optional arguments are passed.
    """

    wrapper: str
    pages: Pages = PAGES
    heads: bool = False
    tokens: int | None = 20
    values: str = "random"
    slots: str = "shuffled"
    source: str = "contiguous"
    tables: str = "contiguous"
    positions: str = "random"
    ratio: int | None = None
    wide: bool = False
    named: bool = False


@dataclass(frozen=True)
class QueryCase(Case):
    """A call of fused_indexer_q_rope_quant.

    Attributes:
        tokens: of the query; None: as many as `values` needs.
        heads: of it.
        values: pattern of its rows, a key of mlagen.verify.paged.values.VALUES.
        positions: "random", "zero", "garbage" (among them) or "longer" (than the tokens).
        q, weights, angles: layouts in memory of the query, of the weights and of the table, keys of
            mlagen.verify.call.memory.LAYOUTS.
        wide: arguments that may be fp32 are fp32; or only "angles" or "weights".
        named: optional arguments are passed.
    """

    tokens: int | None = 3
    heads: int = 4
    values: str = "random"
    positions: str = "random"
    q: str = "contiguous"
    weights: str = "contiguous"
    angles: str = "contiguous"
    wide: bool | str = False
    named: bool = False


@dataclass(frozen=True)
class KeysGatherCase(Case):
    """A call of cp_gather_indexer_k_quant_cache.

    Attributes:
        pages: how the cache lies in memory.
        heads: the cache has a dimension of heads.
        requests: tokens of each request.
        spare: rows of the output past the last request; negative: so many are missing.
        table: pattern of the block table: "garbage" (in unused entries), "short" or "outside" (the cache).
        memory: layout in memory of the block table.
        out: layout in memory of the outputs.
        form: dtypes of the outputs: "bytes", "floats" (scales fp32 where they are) or "float8" (values).
        rows: requests that the block table has more.
    """

    pages: Pages = PAGES
    heads: bool = False
    requests: tuple[int, ...] = (9, 70, 0, 14)
    spare: int = 3
    table: str = "garbage"
    memory: str = "slice"
    out: str = "contiguous"
    form: str = "bytes"
    rows: int = 0


@dataclass(frozen=True)
class KeysQueryCase(Case):
    """A call of indexer_qk_rope_quant_and_cache.

    Attributes:
        keys: how the keys, slots, positions, tables and the cache are drawn. Its ratio is passed where one is taken.
        heads: of the query.
        values: pattern of the query's rows, a key of mlagen.verify.paged.values.VALUES.
        layer: the norm has a bias: it is a LayerNorm.
        q, weights: layouts in memory, keys of mlagen.verify.call.memory.LAYOUTS.
        wide: arguments that are fp32, of "angles", "norm" and "weights".
        spread: the tables have a dimension of size 1 between theirs.
    """

    keys: KeysCase
    heads: int = 4
    values: str = "random"
    layer: bool = True
    q: str = "contiguous"
    weights: str = "contiguous"
    wide: tuple[str, ...] = ()
    spread: bool = False


def _pages_cases(layout_planar: bool) -> Iterator[tuple[str, str, Pages]]:
    """(name, promise, how the cache lies)."""
    for size in (1, 2, 53, 64, 69, 256):
        yield f"block size {size}", "any page size", Pages(size)
    for gap in (4, 8, 512):
        yield f"page stride, {gap} bytes more", "pages may lie apart; the bytes between stay", Pages(53, page_gap=gap)
    if not layout_planar:
        yield "row stride", "rows may lie apart; the bytes between them stay", Pages(53, row_gap=48)
    yield "odd cache", "a cache may begin off 16 bytes", Pages(53, page_gap=8, offset=1)
    yield "int8 cache", "bytes may be given as int8", Pages(dtype="int8")
    yield "one page", "the stride of a single page means nothing", Pages(53, single=True)
    yield "far pages", "page offsets are 64 bits wide", Pages(far=True)


def _keys_cases(side: IndexerSide, wrapper: str, big: bool) -> Iterator[KeysCase]:
    base = KeysCase("", "", wrapper=wrapper, tokens=1000 if big else 20)

    def case(name: str, promise: str, **changes: Any) -> KeysCase:
        return replace(base, name=f"{SHORT[wrapper]}: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call writes the reference's bytes", every_target=True)
    yield case("optional arguments", "what says what this layout is may be passed", named=True)
    for name, promise, pages in _pages_cases(side.layout.planar):
        yield case(name, promise, pages=pages, tokens=6 if pages.far else base.tokens)
    if not side.packed:
        yield case("float8 cache", "bytes may be given as float8", pages=Pages(dtype="float8"))
    yield case("a dimension of heads", "a cache may have a dimension of one head", heads=True)
    yield case("keys are slices", "keys may be slices of a wider projection", source="slice")
    yield case("keys odd", "keys that begin off 16 bytes", source="odd")
    yield case("negative slots", "a negative slot is skipped, INT64_MIN too", slots="negative")
    yield case("slots past the cache", "a slot past the last page is skipped, 2^32 and INT64_MAX too", slots="beyond")
    yield case("fewer slots than tokens", "slot_mapping's length counts", slots="shorter")
    yield case("no slots", "an empty slot_mapping writes nothing", slots="none")
    yield case("no tokens", "an empty batch writes nothing", tokens=0)
    yield case("single token", "a batch of one", tokens=1)
    yield case("odd number of tokens", "the last program is not full", tokens=7)
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph")
    if wrapper == WRITE:
        yield case("every value", "every bit pattern of the model's dtype", values="bits", tokens=None)
        yield case("tiles", "scales at their floors and about powers of two", values="tiles", tokens=None)
        promise = "NaN, infinities and zeros of both signs"
        yield case("not finite", promise, values="not finite", tokens=None, every_target=True)
        return
    for ratio in (1, 2, 3, 4, 128):
        promise = "the last token of a group writes its key, rotated to the first one's position"
        yield case(f"ratio {ratio}", promise, ratio=ratio, tokens=1000 if big else 40)
    yield case("fp32", "angles and the norm's weight may be fp32", wide=True)
    for layout in ("slice", "odd"):
        yield case(f"tables {layout}", "rows of the table may lie apart, and begin off 16 bytes", tables=layout)
    yield case("positions: garbage", "a position that has no angles is skipped", positions="garbage")
    yield case("positions: longer", "positions past the last token are not looked at", positions="longer")


def _query_cases(side: IndexerSide, big: bool) -> Iterator[QueryCase]:
    base = QueryCase("", "", tokens=40 if big else 3, heads=side.num_heads if big else 4)

    def case(name: str, promise: str, **changes: Any) -> QueryCase:
        return replace(base, name=f"query: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's bytes and weights", every_target=True)
    yield case("model's own heads", "the indexer's own number of heads", heads=side.num_heads, tokens=2)
    for heads in (1, 3, 16, 17, 64, 128):
        yield case(f"heads: {heads}", "any number of heads", heads=heads, tokens=2)
    yield case("heads: none", "no heads give nothing", heads=0)
    yield case("tokens: none", "an empty batch gives empty results", tokens=0)
    yield case("tokens: one", "a batch of one", tokens=1)
    yield case("fp32", "angles and weights may be fp32", wide=True)
    for wide, layout in itertools.product((False, True, "angles", "weights"), ("contiguous", "odd")):
        options = {"wide": wide, "q": layout, "tokens": 2, "check": variants.TARGETS, "in_full": True}
        name = f"variants: {layout}, fp32: {wide if isinstance(wide, str) else 'both' if wide else 'none'}"
        yield case(name, variants.PROMISES[variants.TARGETS], **options)
    yield case("optional arguments", "what says what this package is may be passed", named=True)
    yield case("every value", "every bit pattern of the model's dtype", values="bits", tokens=None)
    yield case("tiles", "scales at their floors and about powers of two", values="tiles", tokens=None, positions="zero")
    yield case("not finite", "NaN, infinities and zeros of both signs", values="not finite", tokens=None)
    for positions, promise in {
        "zero": "at position 0 nothing turns, and signs of zeros stay",
        "garbage": "a token of a position without angles is not rotated",
        "longer": "positions past the last token are not looked at",
    }.items():
        yield case(f"positions: {positions}", promise, positions=positions, tokens=20)
    for layout in ("slice", "odd", "transposed", "far"):
        changes: Mapping[str, Any] = {"tokens": 3, "heads": 2} if layout == "far" else {}
        yield case(f"layout: query {layout}", "heads and tokens of the query may lie apart", q=layout, **changes)
    for layout in ("slice", "odd"):
        yield case(f"layout: weights {layout}", "tokens of the weights may lie apart", weights=layout)
        yield case(f"layout: angles {layout}", "rows of the table may lie apart", angles=layout)
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")


def _gather_cases(side: IndexerSide, big: bool) -> Iterator[KeysGatherCase]:
    base = KeysGatherCase("", "", requests=(9, 700, 0, 1400) if big else (9, 70, 0, 14))

    def case(name: str, promise: str, **changes: Any) -> KeysGatherCase:
        return replace(base, name=f"gather: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the cache's bytes", every_target=True)
    for name, promise, pages in _pages_cases(side.layout.planar):
        yield case(name, promise, pages=pages, requests=(9, 14) if pages.single or pages.far else base.requests)
    yield case("a dimension of heads", "a cache may have a dimension of one head", heads=True)
    if side.scales.dtype == "fp32":
        yield case("floats", "scales may be taken as floats", form="floats")
    if not side.packed:
        yield case("float8", "values may be taken as float8", form="float8")
    yield case("pages outside the cache", "tokens of pages outside the cache become 0", table="outside")
    promise = "tokens past the block table's columns become 0"
    yield case("table too short", promise, table="short", memory="contiguous")
    for name, requests in {
        "one": (100,),
        "many": tuple(number % 5 for number in range(67)),
        "of a power of two": (3, 0, 5, 1),
        "empty ones": (0, 0, 5, 0, 0, 7, 0),
        "all empty": (0, 0),
        "none": (),
    }.items():
        yield case(f"requests: {name}", "a token is its own request's, whatever the others are", requests=requests)
    yield case("more rows than requests", "cu_seq_lens says how many requests there are", rows=2)
    yield case("nothing", "an output without rows takes nothing", requests=(), spare=0)
    yield case("spare rows", "rows past the last request stay", spare=40)
    yield case("fewer rows than tokens", "dst_k says how many tokens are gathered", spare=-6)
    yield case("single token", "one token", requests=(1,), spare=0)
    for layout in ("slice", "odd"):
        yield case(f"out {layout}", "outputs may be views of wider buffers, whose rest stays", out=layout)
        yield case(f"table {layout}", "the block table may be a view of a wider buffer", memory=layout)
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph")


def _keys_query_cases(side: IndexerSide, wrappers: tuple[str, ...], big: bool) -> Iterator[KeysQueryCase]:
    keys = KeysCase("", "", wrapper=NORMALISE, tokens=300 if big else 11)
    base = KeysQueryCase("", "", keys, heads=side.num_heads if big else 4)

    def case(name: str, promise: str, of_keys: Mapping[str, Any] = NOTHING, **changes: Any) -> KeysQueryCase:
        return replace(base, name=f"keys, query: {name}", promise=promise, keys=replace(keys, **of_keys), **changes)

    yield case("typical", "an ordinary call gives the reference's bytes and weights", every_target=True)
    yield case("RMSNorm", "without a bias the norm is an RMSNorm", layer=False, every_target=True)
    if {QUERY, NORMALISE} & {*wrappers}:
        promise = "the bytes and weights are those of the separate functions"
        for name, values in (("beside", "random"), ("beside, not finite", "not finite")):
            yield case(name, promise, layer=False, values=values, check="beside", every_target=True)
    for name, promise, pages in _pages_cases(side.layout.planar):
        yield case(name, promise, {"pages": pages, "tokens": 6 if pages.far else keys.tokens})
    yield case("a dimension of heads", "a cache may have a dimension of one head", {"heads": True})
    for heads in (0, 1, 3, 16, 17, 64):
        yield case(f"heads: {heads}", "any number of heads", {"tokens": 3}, heads=heads)
    for tokens in (0, 1, 7, 9):
        yield case(f"tokens: {tokens}", "any number of tokens", {"tokens": tokens})
    for slots, promise in {
        "negative": "a negative slot is skipped, and its query is not",
        "beyond": "a slot past the last page is skipped, 2^32 and INT64_MAX too",
        "shorter": "slot_mapping's length counts, and queries of all tokens are written",
        "none": "an empty slot_mapping writes no key",
    }.items():
        yield case(f"slots: {slots}", promise, {"slots": slots})
    for positions, promise in {
        "garbage": "a position without angles has no key, and its query is not rotated",
        "longer": "positions past the last token are not looked at",
    }.items():
        yield case(f"positions: {positions}", promise, {"positions": positions})
    for values in ("tiles", "not finite"):
        yield case(f"query: {values}", "scales at their floors, NaN and infinities", values=values)
    for layer in (True, False):
        promise = "keys of values at the edges of scales"
        yield case(
            f"keys: tiles{'' if layer else ', RMSNorm'}", promise, {"values": "tiles", "tokens": None}, layer=layer
        )
    for layout in ("slice", "odd"):
        yield case(f"keys {layout}", "keys may be slices of a wider projection", {"source": layout})
        yield case(f"tables {layout}", "rows of tables may lie apart", {"tables": layout})
        yield case(f"weights {layout}", "tokens of the weights may lie apart", weights=layout)
    for layout in ("slice", "odd", "transposed"):
        yield case(f"query {layout}", "heads and tokens of the query may lie apart", q=layout)
    yield case("tables spread", "tables may have a dimension of size 1 between theirs", spread=True)
    names = ("angles", "norm", "weights")
    for count, layout in itertools.product(range(len(names) + 1), ("contiguous", "odd")):
        for wide in itertools.combinations(names, count):
            options = {"wide": wide, "q": layout, "check": variants.TARGETS, "in_full": True}
            name = f"variants: {layout}, fp32: {' and '.join(wide) or 'none'}"
            yield case(name, variants.PROMISES[variants.TARGETS], {"tokens": 2}, **options)
    if takes_ratio(side, wrappers):
        for ratio in (1, 2, 4):
            yield case(f"ratio {ratio}", "the last token of a group writes its key", {"ratio": ratio, "tokens": 30})
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package; see mlagen.verify.families."""
    side, wrappers, big = side_of(spec), tuple(spec["wrappers"]), device == "cuda"
    if side is None:
        return []
    made: dict[str, Callable[[], Iterator[Case]]] = {
        WRITE: lambda: _keys_cases(side, WRITE, big),
        NORMALISE: lambda: _keys_cases(side, NORMALISE, big),
        QUERY: lambda: _query_cases(side, big),
        GATHER: lambda: _gather_cases(side, big),
        KEYS_QUERY: lambda: _keys_query_cases(side, wrappers, big),
    }
    found: list[Case] = []
    for wrapper in [name for name in SHORT if name in wrappers]:
        found += [*made[wrapper](), *refused(side, wrapper, wrappers)]
    return found
