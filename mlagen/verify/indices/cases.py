"""The cases of the index kernels: plain data, made from a spec and from where it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlagen.verify.call.case import Case
from mlagen.verify.indices.invalid import COMBINE, CONVERT, GLOBAL, SHORT, refused
from mlagen.verify.indices.reference import INT32_VALUES


@dataclass(frozen=True)
class MapCase(Case):
    """A call that maps a request's indices to slots of the cache.

    Attributes:
        wrapper: the wrapper called.
        tokens, topk: sizes of the indices.
        requests, columns: sizes of the block table.
        block_size: tokens a block.
        indices: pattern of the indices: "random", "none", "edges" (of blocks), "int32 range" or "last column".
        blocks: pattern of the block table: "random", "negative", "limit" (of int32) or "garbage" in unused columns.
        request: pattern of the tokens' requests: "random", "outside" or "longer" (than the tokens).
        mask: pattern of is_valid_token: "mixed", "all" or "none".
        counts: return_valid_counts.
        repeat: how often the tokens come, without memory of their own but for the results.
        layout, table: layout in memory of the indices and of the block table, a key of LAYOUTS in call.memory.
        compact: slots come first.
        newer: the request of each token goes by the name that newer versions of vLLM give it.
        block_rows: rows from a block to the next; None: not passed.
        ranks: number of ranks, this rank, and tokens that follow each other on one.
        out: layout in memory of the tensors that take the results; None: the wrapper allocates them.
    """

    wrapper: str
    tokens: int
    topk: int
    requests: int = 4
    columns: int = 9
    block_size: int = 64
    indices: str = "random"
    blocks: str = "random"
    request: str = "random"
    mask: str = "mixed"
    counts: bool = True
    repeat: int = 1
    layout: str = "contiguous"
    table: str = "slice"
    compact: bool = False
    newer: bool = False
    block_rows: int | None = None
    ranks: tuple[int, int, int] = (1, 0, 1)
    out: str | None = None


@dataclass(frozen=True)
class CombineCase(Case):
    """A call of combine_topk_swa_indices.

    Attributes:
        requests: (tokens of the query, of the sequence, gathered) of each request.
        topk, window, ratio: topk, window_size and compress_ratio.
        width: columns of topk_indices; None: topk.
        rows, window_row: M and N.
        start: first value of query_start_loc.
        spare: tokens past the last request.
        indices: pattern of the top-k indices: "random", "none", "edges" (of the compressed rows) or "int32 range".
        layout: layout in memory of topk_indices.
        compact: indices that name a row come first.
        visible: pattern of the image tokens that tokens see: "random" or "int32 range"; None: not passed.
        images: max_image_tokens.
        out: layout in memory of the tensors that take the results; None: the wrapper allocates them.
    """

    requests: tuple[tuple[int, int, int], ...]
    topk: int = 24
    window: int = 16
    ratio: int = 4
    width: int | None = None
    rows: int = 1000
    window_row: int = 600
    start: int = 0
    spare: int = 0
    indices: str = "random"
    layout: str = "slice"
    compact: bool = False
    visible: str | None = None
    images: int = 0
    out: str | None = None


def _map_cases(wrapper: str, big: bool) -> Iterator[MapCase]:
    tokens = 67 if big else 4
    base = MapCase("", "", wrapper, tokens, 100)

    def case(name: str, promise: str, **changes: Any) -> MapCase:
        return replace(base, name=f"{SHORT[wrapper]}: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's slots and counts", topk=512 if big else 100)
    for topk in (1, 17, 512, 516, 1024, 2047, 2048, 2176, 4100):
        yield case(f"topk: {topk}", "any number of indices a token", tokens=tokens if big else 2, topk=topk)
    yield case("topk: none", "no indices a token: nothing to name", topk=0)
    for size in (1, 2, 53, 69, 256, 2**30, 2**31 - 1):
        yield case(f"block size: {size}", "any block size", block_size=size, indices="edges")
    yield case("tokens: one", "a batch of one", tokens=1, topk=2048)
    yield case("tokens: none", "an empty batch gives empty results", tokens=0)
    for pattern, promise in {
        "none": "a batch whose indices are all -1 names nothing",
        "int32 range": "any negative index, and any past the block table's columns, names nothing",
        "edges": "the first and last token of a block, and of the block table's columns",
        "last column": "the one index that counts stands in the last column",
    }.items():
        yield case(f"indices: {pattern}", promise, indices=pattern)
    yield case("request: outside", "a request that is not in the block table names nothing", request="outside")
    yield case("request: longer", "requests past the last token are not looked at", request="longer")
    yield case("blocks: negative", "a negative block names nothing", blocks="negative", indices="edges")
    for size in (1, 2, 53):
        promise = "a block names something if and only if all its slots are int32"
        yield case(f"blocks: limit, size {size}", promise, blocks="limit", block_size=size, indices="edges")
    yield case("blocks: garbage", "unused entries of the block table do no harm", blocks="garbage")
    yield case("blocks: none", "a block table without columns names nothing", columns=0)
    yield case("requests: none", "a block table without rows names nothing", requests=0)
    for part in ("layout", "table"):
        for layout in ("slice", "odd", "far"):
            what = "indices" if part == "layout" else "block table"
            changes = {part: layout, "topk": 100 if part == "layout" else 99}
            if layout == "far":
                changes |= {"tokens": 3, "requests": 3}
            yield case(f"layout: {what} {layout}", f"rows of the {what} may lie apart, 2^31 elements too", **changes)
    yield from _compact_map_cases(case)
    if wrapper == GLOBAL:
        yield case("by its newer name", "either name of the requests is taken", newer=True)
        yield case("by its newer name, compact", "either name of the requests is taken", newer=True, compact=True)
        yield case("mask: none", "padding tokens count 0, their indices are mapped all the same", mask="none")
    else:
        yield case("without counts", "slots alone", counts=False)
        yield case("without counts, compact", "slots alone", counts=False, compact=True)
        yield from _convert_cases(case)
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")
    if big:
        yield from _large_map_cases(case)


def _compact_map_cases(case: Callable[..., MapCase]) -> Iterator[MapCase]:
    promise = "slots come first, in their order, -1 after them, and the length counts them, whatever the row's width"
    for topk in (0, 1, 17, 1024, 1025, 2049, 4100):
        yield case(f"compact: topk {topk}", promise, topk=topk, tokens=2, compact=True)
    for pattern in ("none", "int32 range", "edges", "last column"):
        yield case(f"compact: indices {pattern}", promise, indices=pattern, compact=True)
    yield case("compact: request outside", "a request that is not in the block table names nothing", **_OUTSIDE)
    yield case("compact: mask none", "padding tokens have length 0", mask="none", compact=True)
    for size in (1, 53, 2**31 - 1):
        yield case(
            f"compact: limit, size {size}", promise, blocks="limit", block_size=size, indices="edges", compact=True
        )
    yield case("compact: layout", "rows may lie apart", layout="odd", table="odd", compact=True)


_OUTSIDE: Mapping[str, Any] = {"request": "outside", "compact": True}


def _convert_cases(case: Callable[..., MapCase]) -> Iterator[MapCase]:
    for compact in (False, True):
        how = ", compact" if compact else ""
        for rows, size in ((64, 64), (65, 64), (4096, 64), (7, 2), (2**31 - 1, 1), (2**31 - 1, 2**30)):
            promise = "blocks may begin any number of rows apart; a block names something if all its slots are int32"
            changes = {
                "block_size": size,
                "block_rows": rows,
                "indices": "edges",
                "blocks": "apart",
                "compact": compact,
            }
            yield case(f"blocks: {size} of {rows} rows{how}", promise, **changes)
        for ranks in ((2, 0, 1), (2, 1, 1), (3, 1, 4), (4, 3, 64), (2, 1, 100), (5, 2, 2**31 - 1), (2**31 - 1, 3, 1)):
            promise = "a rank has the slots of its own tokens alone"
            name = f"ranks: {ranks[1]} of {ranks[0]} by {ranks[2]}{how}"
            yield case(name, promise, ranks=ranks, indices="edges", compact=compact)
        promise = "any negative index, and any past the rank's own columns, names nothing"
        yield case(f"ranks: int32 range{how}", promise, ranks=(3, 2, 2), indices="int32 range", compact=compact)
        everything = {"ranks": (2, 1, 3), "block_rows": 80, "topk": 2049, "tokens": 2}
        yield case(f"ranks: blocks apart{how}", "both at once", **everything, compact=compact)
        for layout in ("contiguous", "slice", "odd"):
            promise = "results go to the tensors that are passed, and nowhere else"
            yield case(f"out: {layout}{how}", promise, out=layout, topk=512, compact=compact)


def _large_map_cases(case: Callable[..., MapCase]) -> Iterator[MapCase]:
    for count, topk in ((1025, 512), (1025, 1024), (1030, 2048), (4099, 516), (1025, 2051)):
        yield case(f"many tokens: {count}x{topk}", "a large batch", tokens=count, topk=topk)
    yield case("contract: graph", "a captured call replays on new inputs", check="graph")
    yield case(
        "offsets: slots past 2^31 elements",
        "offsets of the slots are 64 bits wide",
        tokens=1,
        repeat=INT32_VALUES // 2048 + 9,
        topk=2048,
        mask="all",
        check="repeated",
    )


def _combine_cases(topk: int, window: int, big: bool) -> Iterator[CombineCase]:
    mixed = ((3, 3, 3), (1, 400, 17), (7, 90, 60), (2, 17, 17))
    base = CombineCase("", "", mixed)

    def case(name: str, promise: str, **changes: Any) -> CombineCase:
        return replace(base, name=f"combine: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's rows and lengths")
    yield case(
        "model's own sizes",
        "the model's own topk and window",
        requests=((40, 20000, 500), (30, 30, 30)) if big else ((2, 20000, 130),),
        topk=topk,
        window=window,
    )
    for ratio in (1, 2, 7, 128):
        yield case(f"ratio: {ratio}", "a compressed row holds ratio tokens", ratio=ratio, requests=((5, 258, 258),))
    for count, width in ((0, 24), (0, 0), (1, 1), (24, 7), (24, 16), (24, 40), (17, 17), (120, 100), (112, 112)):
        yield case(f"topk: {count} of {width}", "topk_indices may hold more or fewer columns", topk=count, width=width)
    for size in (0, 1, 104, 105, 300):
        yield case(f"window: {size}", "any window, and a row that is full", window=size)
    yield case("window: nothing at all", "neither top-k nor window", topk=0, window=0)
    longer = tuple((1 + number % 3, 20 + 7 * number, 20) for number in range(21))
    for name, requests in {
        "one": ((9, 30, 30),),
        "single tokens": ((1, 1, 1),) * 17,
        "many": longer,
        "empty ones": ((0, 5, 5), (0, 0, 0), (3, 9, 9), (0, 7, 7), (0, 4, 4), (2, 8, 8), (0, 3, 3)),
        "all empty": ((0, 5, 5), (0, 6, 6)),
        "from the first position": ((20, 20, 20),),
        "sequence shorter than its query": ((6, 4, 4), (3, 0, 0), (2, 2, 2), (9, 1, 1)),
        "gathered in part": ((3, 50, 18), (4, 70, 19)),
        "of a length of two": ((17, 17, 17), (16, 16, 16), (15, 15, 15)),
    }.items():
        yield case(f"requests: {name}", "a token is its own request's, whatever the others are", requests=requests)
    yield case("requests: none", "tokens without a request have nothing", requests=(), spare=3)
    yield case("tokens: none", "an empty batch gives empty results", requests=())
    yield case("tokens: past the last request", "they have nothing", spare=19)
    yield case("start", "query_start_loc counts from its first value", start=12345)
    for pattern, promise in {
        "none": "top-k indices of -1 stay -1",
        "int32 range": "an index that is no compressed row of the request is -1",
        "edges": "the first and the last compressed row are named, what is beside them is not",
    }.items():
        for how, compact in (("", False), (", compact", True)):
            changes = {"indices": pattern, "rows": 10**8, "requests": longer, "compact": compact}
            yield case(f"indices: {pattern}{how}", promise, **changes)
    yield from _bounded_cases(case)
    yield case("rows: 0 and 0", "M and N may be 0", rows=0, window_row=0)
    yield case("rows: to the end of int32", "the largest M", rows=INT32_VALUES // 4, window_row=INT32_VALUES // 8)
    for layout in ("contiguous", "odd", "far"):
        requests = ((2, 40, 40), (1, 50, 50)) if layout == "far" else mixed
        yield case(f"layout: {layout}", "rows may lie apart, 2^31 elements too", layout=layout, requests=requests)
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")
    if big:
        sizes = {"topk": topk, "window": window}
        yield case("many tokens: one request", "a long prefill", requests=((9000, 9000, 9000),), **sizes)
        many = tuple((n % 5, 300 + 31 * n, 200) for n in range(3000))
        yield case("many tokens: many requests", "thousands of requests", requests=many, rows=600_000, **sizes)
        yield case("contract: graph", "a captured call replays on new inputs", check="graph")


def _bounded_cases(case: Callable[..., CombineCase]) -> Iterator[CombineCase]:
    short = ((3, 50, 3), (4, 70, 9), (2, 40, 0), (2, 9, 40), (5, 5, 5))
    least, most = -INT32_VALUES, INT32_VALUES - 1
    odd = ((2, least, 5), (2, 9, least), (3, most, most), (2, most, 7), (1, 0, most), (3, -1, -1), (2, 30, most))
    for how, compact in (("", False), (", compact", True)):
        promise = "rows of the window that were not gathered are left out, and so are those past the request's last"
        yield case(f"window: gathered less{how}", promise, requests=short, rows=12, window_row=4, compact=compact)
        for rows, window_row in ((24, 16), (24, 24), (600, 599), (20, 0)):
            name = f"rows: {rows} and {window_row}{how}"
            yield case(
                name, promise, rows=rows, window_row=window_row, indices="edges", requests=short, compact=compact
            )
        yield case(
            f"requests: any int32{how}", "any lengths leave the request's rows alone", requests=odd, compact=compact
        )
        sizes = {"topk": 300, "window": 70, "requests": ((3, 2000, 90), (2, 700, 70)), "rows": 2000}
        yield case(f"topk: wide{how}", "any width", **sizes, compact=compact)
        changes = {"width": 7, "indices": "edges", "compact": compact}
        yield case(f"topk: 24 of 7, edges{how}", "missing columns name nothing", **changes)
        yield case(
            f"topk: 0 of a ratio of 0{how}", "layers of windows alone have no ratio", topk=0, ratio=0, compact=compact
        )
        yield case(
            f"tokens: past the last request{how} too", "they have nothing", spare=19, compact=compact, start=most - 90
        )
        for pattern in ("random", "int32 range"):
            promise = (
                "a token of an image sees of it what is before and behind, within its request and what was gathered"
            )
            changes = {"visible": pattern, "images": 12, "requests": ((20, 30, 30), (9, 60, 20), (6, 4, 4))}
            yield case(f"images: {pattern}{how}", promise, **changes, compact=compact)
        yield case(f"images: none{how}", "rows are as wide as images may need", images=100, compact=compact)
        for layout in ("contiguous", "apart"):
            promise = "results go to the tensors that are passed, and nowhere else"
            yield case(f"out: {layout}{how}", promise, out=layout, compact=compact)


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package's index kernels; see mlagen.verify.families."""
    wrappers, attention, big = spec["wrappers"], spec["attention"] or {}, device == "cuda"
    found: list[Case] = []
    for wrapper in (GLOBAL, CONVERT):
        if wrapper in wrappers:
            found += _map_cases(wrapper, big)
    if COMBINE in wrappers:
        found += _combine_cases(attention.get("topk") or 2048, attention.get("window") or 128, big)
    return [*found, *refused(wrappers)]
