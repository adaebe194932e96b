"""The cases of writers and gathers: plain data, made from a spec and from where it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlagen.layout import CacheLayout
from mlagen.verify.cache import fields
from mlagen.verify.cache.invalid import refused
from mlagen.verify.cache.sides import CONCAT, GATHERS, INSERT, REQUESTS, SHORT, WRITERS, sides_of
from mlagen.verify.call.case import Case
from mlagen.verify.paged.pages import PAGES, Pages
from mlagen.verify.paged.side import Side


@dataclass(frozen=True)
class CacheCase(Case):
    """A call of a wrapper that writes or gathers tokens.

    Attributes:
        wrapper: the wrapper.
        module: module of the wrapper: MAIN or EXTRA.
        pages: how the cache lies in memory.
    """

    wrapper: str
    module: str
    pages: Pages = PAGES


@dataclass(frozen=True)
class WriteCase(CacheCase):
    """A call of a writer.

    Attributes:
        tokens: rows of the source; None: as many as `values` needs.
        values: pattern of the rows, a key of mlagen.verify.paged.values.VALUES.
        slots: pattern of slot_mapping, as mlagen.verify.cache.inputs draws them.
        source: layout in memory of the rows, a key of mlagen.verify.call.memory.LAYOUTS.
        k_pe: form of k_pe: "2d", "3d", "none" or "empty".
        newer: with the arguments that newer versions of vLLM pass.
    """

    tokens: int | None = 20
    values: str = "random"
    slots: str = "shuffled"
    source: str = "contiguous"
    k_pe: str = "2d"
    newer: bool = False


@dataclass(frozen=True)
class GatherCase(CacheCase):
    """A call of a gather.

    Attributes:
        requests: (first position, tokens) that are gathered of each request.
        lens: of a gather by request: "given", or "none": from the first token on, all of them.
        starts: of a gather by token: "given", or "none": from the first token on.
        spare: rows of the output that are not written, and columns of the block table that no token needs.
        offset: where in the output a request's first token goes.
        table: pattern of the block table: "garbage", "short" or "outside", as mlagen.verify.cache.gather draws it.
        out, memory: layout in memory of the output and of the block table.
        odd: an oddity of the integers, see mlagen.verify.cache.gather; or nothing.
        expected: max_gather_len; None: not passed.
    """

    requests: tuple[tuple[int, int], ...] = ((0, 9), (70, 5), (128, 0), (61, 14))
    lens: str = "given"
    starts: str = "given"
    spare: int = 3
    offset: int = 0
    table: str = "garbage"
    out: str = "contiguous"
    memory: str = "slice"
    odd: str = ""
    expected: int | None = None


def _pages_cases() -> Iterator[tuple[str, str, Pages, str]]:
    """(name, promise, how the cache lies, which layouts: "any", "interleaved", "quantised")."""
    for size in (1, 2, 53, 64, 69, 256, 480, 9 * 64):
        yield f"block size {size}", "any page size", Pages(size), "any"
    yield "page stride", "pages may lie apart; the bytes between them stay", Pages(53, page_gap=160), "any"
    yield "row stride", "rows may lie apart; the bytes between them stay", Pages(53, row_gap=48), "interleaved"
    yield "odd cache", "a cache may begin off 16 bytes", Pages(53, page_gap=8, offset=1), "any"
    yield "int8 cache", "bytes may be given as int8", Pages(dtype="int8"), "quantised"
    yield "float8 cache", "bytes may be given as float8", Pages(dtype="float8"), "quantised"
    yield "pages end to end", "nothing behind a page's rows is touched", Pages(54, tight=True), "any"
    yield "one page", "the stride of a single page means nothing", Pages(53, single=True), "any"
    yield "far pages", "page offsets are 64 bits wide", Pages(far=True), "any"


def _fits(which: str, layout: CacheLayout) -> bool:
    return {"any": True, "interleaved": not layout.planar, "quantised": layout.quantised}[which]


def _write_cases(side: Side, wrapper: str, full: bool, big: bool) -> Iterator[WriteCase]:
    has_rope = side.facts.d_rope > 0
    base = WriteCase("", "", wrapper=wrapper, module=side.module, k_pe="2d" if has_rope else "none")
    base = replace(base, tokens=1000 if big else 20)

    def case(name: str, promise: str, **changes: Any) -> WriteCase:
        name = f"{side.prefix}writer: {name} ({SHORT[wrapper]})"
        return replace(base, name=name, promise=promise, **changes)

    yield case("typical", "an ordinary call writes the reference's bytes", every_target=True)
    yield case(
        "newer arguments", "what newer versions of vLLM pass is taken where it says what this layout is", newer=True
    )
    if full:
        yield case("every value", "every bit pattern of the model's dtype", values="bits", tokens=None)
    if wrapper == INSERT:
        for size in (2, 53, 64):
            pages = Pages(size, "pages", page_gap=32)
            yield case(f"pages of bytes, block size {size}", "a page is a run of bytes", pages=pages)
    if not full:
        return
    if side.layout.quantised:
        yield case("tiles", "scales at their floors and about powers of two", values="tiles", tokens=None)
        promise = "NaN, infinities and zeros of both signs"
        yield case("not finite", promise, values="not finite", tokens=None, every_target=True)
    for name, promise, pages, which in _pages_cases():
        if _fits(which, side.layout):
            tokens = 6 if pages.far else base.tokens
            yield case(name, promise, pages=pages, tokens=tokens)
    yield case("sources are slices", "rows may be slices of a wider projection", source="slice")
    yield case("sources odd", "rows that begin off 16 bytes", source="odd")
    yield case("negative slots", "a negative slot is skipped, INT64_MIN too", slots="negative")
    yield case("slots past the cache", "a slot past the last page is skipped, 2^32 and INT64_MAX too", slots="beyond")
    yield case("fewer slots than tokens", "slot_mapping's length counts", slots="shorter")
    yield case("no slots", "an empty slot_mapping writes nothing", slots="none")
    yield case("no tokens", "an empty batch writes nothing", tokens=0)
    yield case("single token", "a batch of one", tokens=1)
    yield case("odd number of tokens", "the last program is not full", tokens=7)
    if wrapper == CONCAT and has_rope:
        yield case("k_pe with a head dimension", "k_pe may be [tokens, 1, rope]", k_pe="3d")
    elif wrapper == CONCAT:
        yield case("k_pe without columns", "k_pe may be [tokens, 0]", k_pe="empty")
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph")


def _gather_cases(side: Side, wrapper: str, big: bool) -> Iterator[GatherCase]:
    base = GatherCase("", "", wrapper=wrapper, module=side.module)
    if big:
        base = replace(base, requests=((0, 700), (70, 5), (128, 0), (61, 1400)))

    def case(name: str, promise: str, **changes: Any) -> GatherCase:
        name = f"{side.prefix}gather: {name} ({SHORT[wrapper]})"
        return replace(base, name=name, promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's rows", every_target=True)
    for name, promise, pages, which in _pages_cases():
        if _fits(which, side.layout):
            yield case(name, promise, pages=pages)
    if wrapper == REQUESTS:
        for size in (2, 53, 64):
            pages = Pages(size, "pages", page_gap=32)
            yield case(f"pages of bytes, block size {size}", "a page is a run of bytes", pages=pages)
        yield case("without gather_lens", "without gather_lens all tokens are gathered", lens="none")
        for most in (0, 1, 14, 2**31 - 1):
            promise = "what is gathered does not depend on the number of tokens that was expected"
            yield case(f"max_gather_len {most}", promise, expected=most, requests=((0, 9), (70, 140), (128, 0)))
        yield case("offset", "a request's rows begin at the offset", offset=5)
        yield case("no room", "an offset at the end of out leaves no room", offset=5, spare=-14, requests=((0, 14),))
        yield case("less room than tokens", "tokens past the end of out are left out", offset=2, spare=-6)
        promise = "tokens past the end of out are left out"
        yield case("few programs, less room", promise, spare=-6, requests=((0, 71),), check="few programs")
        promise = "positions before the first token are left out"
        yield case("before the first token", promise, requests=((0, 9), (3, 6)), odd="gathers too many")
        yield case("negative gather_lens", "a negative length is none", odd="negative lengths")
        promise = "positions that the block table does not have are left out, whatever int32 says"
        yield case("ends of int32", promise, requests=((0, 9),) * 5, odd="ends of int32")
        yield case("fewer requests than rows", "seq_lens says how many requests there are", odd="fewer requests")
    else:
        yield case("without seq_starts", "without seq_starts requests begin at 0", starts="none")
        promise = "positions that the block table does not have are left out, whatever int32 says"
        yield case("ends of int32", promise, requests=((0, 9),) * 5, odd="ends of int32")
        yield case("tokens past the last request", "they are left out", odd="past the end")
        yield case("requests that are not there", "a token of no request is left out", odd="no request")
        yield case("fewer tokens than rows", "num_tokens counts", odd="fewer tokens")
        yield case("fewer requests than rows", "cu_seq_lens says how many requests there are", odd="fewer requests")
        yield case("many requests", "any number of requests", requests=tuple((number % 5, 1) for number in range(37)))
    promise = "with more tokens a program takes more blocks of them"
    yield case("few programs", promise, requests=((3, 9), (60, 1), (0, 71)), check="few programs")
    yield case("nothing", "no tokens at all", requests=((5, 0), (0, 0)))
    yield case("single token", "one token", requests=((63, 1),))
    yield case("pages outside the cache", "tokens of pages outside the cache are left out", table="outside")
    promise = "tokens past the block table's columns are left out"
    yield case("table too short", promise, table="short", memory="contiguous")
    for layout in ("slice", "odd"):
        yield case(f"out {layout}", "out may be a view of a wider buffer, whose rest stays", out=layout)
        yield case(f"table {layout}", "the block table may be a view of a wider buffer", memory=layout)
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph")


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package's writers and gathers; see mlagen.verify.families."""
    wrappers, big = tuple(spec["wrappers"]), device == "cuda"
    found: list[Case] = []
    for side in sides_of(spec):
        full = True  # both writers are one kernel, so one of them takes all cases
        for wrapper in WRITERS:
            if wrapper in wrappers:
                found += _write_cases(side, wrapper, full, big)
                full = False
        for wrapper in GATHERS:
            if wrapper in wrappers:
                found += _gather_cases(side, wrapper, big)
        for wrapper in (*WRITERS, *GATHERS):
            if wrapper in wrappers:
                found += refused(side, wrapper)
    return [*found, *fields.cases(spec)]
