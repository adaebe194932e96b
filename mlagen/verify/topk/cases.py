"""The cases of the top-k kernels: plain data, made from a spec and from where it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlagen.verify.call.case import COLLECT, SM90, Case
from mlagen.verify.topk.invalid import DECODE, MERGE, PAGES, PERSISTENT, PREFILL, SHORT, refused

SCORE_PROMISES = {
    "normal": "an ordinary row",
    "equal": "of equal scores those of the smallest indices are picked, however many there are",
    "ties": "scores at the threshold are equal by the dozen",
    "10 bits": "scores differ in their ten lowest bits alone",
    "ascending": "each score is larger than all before it",
    "descending": "each score is smaller than all before it",
    "special": "NaN and -inf are never picked, +inf is",
    "zeros": "+0 and -0 are equal, denormals are not",
    "wide": "scores of any exponent and sign",
    "negative": "all scores are below 0",
    "none": "a row without a score that counts",
    "few": "a row with fewer scores that count than are asked for",
    "signs": "most scores are equal, and 0 is the threshold",
    "half": "half of the scores do not count",
    "17 orders": "scores over 17 orders of magnitude",
    "misleading": "a sample of the row says nothing of it",
}
# Those of long rows that a build runs on the sm90 kernel in numpy as well as "normal".
SIMULATED_SCORES = ("equal", "ties", "ascending", "special", "wide", "negative", "few", "signs")
LEAST, MOST = -(2**31), 2**31 - 1
_STARTS = (LEAST, LEAST, MOST, MOST, 0, MOST - 1, 7, LEAST + 1, 499)  # of ranges at the ends of int32
_ENDS = (MOST, LEAST, MOST, LEAST, MOST - 63, MOST, LEAST + 1, 40, MOST)
NEGATIVE, LONG = -7, 10**6  # lengths that are none, and past the columns
Tile = tuple[int, int, bool]
Sm90Tile = tuple[int, int, int, None, int]


@dataclass(frozen=True)
class SelectCase(Case):
    """A call that selects from rows of scores.

    Attributes:
        wrapper: the wrapper called.
        rows, columns, k: sizes.
        scores: pattern of the scores, a key of SCORE_PROMISES.
        lens: the rows' lengths in turn; None: all columns.
        starts: the rows' first columns in turn; None: 0, or not passed where a wrapper can do without.
        next_n: query tokens a request.
        by_token: lengths are given a query token.
        layout, out: layout in memory of the scores and of the results, a key of mlagen.verify.call.memory.LAYOUTS.
        dtype: of the scores.
        gives: results besides indices that are asked for: "scores", "raw".
        page_size, pages: slots a page, and columns of the page table.
        batches: pattern of row_to_batch: "own" (not passed), "mapped" or "outside".
        page_starts: the rows' first entries of the page table in turn; None: not passed.
        blocks: pattern of the page table: "random" or "limit" (of int32).
        most: max_seq_len; None: all columns.
        tile: (reps, spans, is_long) that the call is forced to; None: as the package has it.
        sm90_tile: (warps, halves, capacity, registers, parts) that the sm90 kernel is forced to, where it runs.
    """

    wrapper: str
    rows: int
    columns: int
    k: int
    scores: str = "normal"
    lens: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    next_n: int = 1
    by_token: bool = False
    layout: str = "contiguous"
    out: str = "contiguous"
    dtype: str = "float32"
    gives: tuple[str, ...] = ("scores",)
    page_size: int = 1
    pages: int = 0
    batches: str = "own"
    page_starts: tuple[int, ...] | None = None
    blocks: str = "random"
    most: int | None = None
    tile: Tile | None = None
    sm90_tile: Sm90Tile | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        """The sm90 kernel: the collecting one if a tile has several parts and the row is too long for one program."""
        if self.sm90_tile is None:
            return (SM90,)
        *_, capacity, _, parts = self.sm90_tile
        return (COLLECT if parts > 1 and self.columns > capacity else SM90,)


@dataclass(frozen=True)
class MergeCase(Case):
    """A call of topk_merge on the picks of ranks from one row.

    Attributes:
        rows, columns, k: sizes of the whole rows.
        ranks, interleave: ranks that share a row's columns, and how many follow each other on one.
        scores: pattern of the scores, a key of SCORE_PROMISES.
        spread: ids stand in any order.
        layout, out: layout in memory of the candidates and of the results.
        given: tensors for both results are passed.
        tile: (reps, spans, block_k) that the call is forced to; None: as the package has it.
    """

    rows: int
    columns: int
    k: int
    ranks: int
    interleave: int = 1
    scores: str = "normal"
    spread: bool = False
    layout: str = "contiguous"
    out: str = "contiguous"
    given: bool = True
    tile: tuple[int, int, int] | None = None


def _prefill_cases(big: bool) -> Iterator[SelectCase]:
    short: Tile | None = None if big else (2, 2, False)
    small: Tile = (2, 2, True)  # 512 columns; columns of a long row are read 256 at a time
    base = SelectCase("", "", PREFILL, 2, 500, 100, tile=short)

    def case(name: str, promise: str, **changes: Any) -> SelectCase:
        return replace(base, name=f"{SHORT[PREFILL]}: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's columns", rows=3)
    for pattern, promise in SCORE_PROMISES.items():
        yield case(f"scores: {pattern}", promise, scores=pattern)
        yield case(
            f"long rows: {pattern}", f"{promise}, in rows longer than a tile", **_LONG, scores=pattern, tile=small
        )
    promise = "a score just above those that a cut kept is picked, though it comes later"
    yield case("long rows: cuts", promise, **_LONG, scores="misleading", rows=32, tile=small)
    for k in (1, 99, 499, 500, 501, 512, 1000, 2048, 4096):
        yield case(f"k: {k}", "any number of picks, more than the row has too", k=k)
    for k in (1, 255, 256):
        yield case(f"long rows: k {k}", "any number of picks up to half a tile", **{**_LONG, "k": k}, tile=small)
    lens = (0, 1, 98, 99, 100, 101, 500, 501, LONG, NEGATIVE)
    yield case("ends", "ends are clamped; short rows have -1 behind them", rows=len(lens), lens=lens)
    yield case(
        "ranges",
        "indices count from the start; ranges may be empty, turned round, or reach out of the columns",
        rows=9,
        starts=(0, 3, 250, 401, 499, 500, 501, NEGATIVE, 300),
        lens=(100, 104, 500, 500, LONG, LONG, 500, 99, 200),
    )
    promise = "starts and ends are clamped, whatever int32 says"
    for columns in (500, 1501):
        ends = {"rows": 9, "starts": _STARTS, "lens": _ENDS, "tile": small}
        yield case(f"ranges: int32 of {columns}", promise, columns=columns, **ends)
    yield case(
        "long rows: ranges",
        "indices count from the start in rows longer than a tile too",
        **{**_LONG, "rows": 4},
        starts=(1, 700, 1001, NEGATIVE),
        lens=(1499, 1300, LONG, 1203),
        tile=small,
    )
    yield case("without scores", "columns alone", gives=())
    for dtype in ("bfloat16",):
        for scores in ("normal", "special", "ties"):
            yield case(f"{dtype}: {scores}", "scores may have two bytes", dtype=dtype, scores=scores, tile=small)
        yield case(f"{dtype}: long rows", "scores may have two bytes", **_LONG, dtype=dtype, tile=small)
    for layout in ("slice", "odd", "far"):
        yield case(f"layout: {layout}", "rows may lie apart, 2^30 elements too", layout=layout, tile=small)
        yield case(f"layout: long rows {layout}", "rows may lie apart", **_LONG, layout=layout, tile=small)
    for layout in ("slice", "odd"):
        yield case(f"out: {layout}", "results go to the tensors that are passed, and nowhere else", out=layout, k=77)
    yield case("rows: none", "no rows, no results", rows=0)
    yield case("columns: none", "rows without columns pick nothing", columns=0)
    yield case("again", "two calls give the same bits", check="determinism", **_TIED, tile=small)
    yield case("batch", "a row's bits do not depend on the others or their order", check="batch", **_TIED, tile=small)
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")
    yield from _sm90_cases(replace(base, rows=3 if big else 1, tile=None), big)
    if big:
        yield case("contract: graph", "a captured call replays on other scores and lengths", check="graph")
        yield from _tile_cases(case)


def _tile_cases(case: Callable[..., SelectCase]) -> Iterator[SelectCase]:
    """Calls of the sizes that take a tile each."""
    promise = "exact in as many rows as take another tile"
    for rows, columns in ((20, 70000), (140, 6000), (140, 70000), (300, 6000), (300, 20000)):
        for scores in ("normal", "ties", "equal"):
            yield case(f"{rows} rows: {scores}: {columns}", promise, rows=rows, columns=columns, k=2048, scores=scores)
    yield case("300 rows: k 4096", promise, rows=300, columns=20000, k=4096)
    for columns, k in ((4097, 2048), (32768, 512), (32768, 2048), (131072, 2048), (65537, 4096), (1 << 20, 2048)):
        for scores in ("normal", "ties", "equal", "10 bits", "ascending"):
            promise = "exact in rows of any length"
            yield case(f"{scores}: {columns}, k {k}", promise, columns=columns, k=k, scores=scores)
    promise = "exact in many rows"
    yield case("many rows", promise, rows=2050, columns=20000, k=2048, starts=tuple(range(0, 4000, 7)))


def _sm90_cases(base: SelectCase, big: bool) -> Iterator[SelectCase]:
    """Rows that are too long for the sm90 kernel's capacity, of few warps and of as many as there are."""
    base = replace(base, only_sm90=True)
    tiles = ((8, 1, 1024, None, 1), (32, 1, 4096, None, 1), (8, 1, 1024, None, 4))
    for tile in tiles if big else ((4, 1, 1024, None, 1), (4, 2, 1024, None, 3)):
        capacity = tile[2]
        for columns in (capacity - 1, capacity + 1, 5 * capacity + 77):
            changes: dict[str, Any] = {
                "columns": columns,
                "sm90_tile": tile,
                "k": capacity // 5 if big else capacity * 2 // 5,
            }
            name = f"{SHORT[PREFILL]}: {tile[0]} warps of {tile[-1]} hold {capacity} of {columns}"
            for pattern, promise in SCORE_PROMISES.items():
                many = columns > 2 * capacity and pattern in SIMULATED_SCORES
                changes |= {"scores": pattern, "every_target": many}
                yield replace(base, name=f"{name}: {pattern}", promise=promise, **changes)
            changes |= {"scores": base.scores, "every_target": False}
            for k in (1, capacity // 2, 4096):
                yield replace(base, name=f"{name}: k {k}", promise="any number of picks", **{**changes, "k": k})
            promise = "indices count from the start"
            yield replace(
                base, name=f"{name}: ranges", promise=promise, **changes, starts=(1, 700, NEGATIVE), lens=(LONG, 900, 9)
            )
    # Candidates are counted and do not decide a row, which is then searched in memory.
    rare = ((16, 2, 8192, None, 8), (16, 2, 8192, None, 1)) if big else ((4, 2, 1024, None, 3), (4, 2, 1024, None, 1))
    for tile in rare:
        name, capacity = f"{SHORT[PREFILL]}: {tile[0]} warps of {tile[-1]}", tile[2]
        searched: dict[str, Any] = {"promise": "a row that its candidates do not decide", "rows": 1, "sm90_tile": tile}
        few: dict[str, Any] = {"columns": capacity * 6 // 5, "k": capacity // 2, "scores": "signs"}
        yield replace(base, name=f"{name}: three values", **few, **searched)
        long: dict[str, Any] = {"columns": capacity * 20, "k": 5, "scores": "descending"}
        yield replace(base, name=f"{name}: descending", **long, **searched)


_LONG: Mapping[str, Any] = {"columns": 1501, "k": 200}
_TIED: Mapping[str, Any] = {"columns": 1501, "k": 200, "scores": "ties", "rows": 3}


def _decode_cases(big: bool) -> Iterator[SelectCase]:
    base = SelectCase("", "", DECODE, 2, 300, 40, tile=None if big else (2, 2, False))

    def case(name: str, promise: str, **changes: Any) -> SelectCase:
        return replace(base, name=f"{SHORT[DECODE]}: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's columns")
    lens = (300, 17, 41, 2)
    for next_n in (1, 2, 3, 4, 8):
        promise = "a query token does not see the keys of those behind it"
        changes = {"rows": 3 * next_n, "next_n": next_n}
        yield case(f"next_n: {next_n}", promise, lens=lens, **changes)
        promise = "each query token has a length of its own"
        yield case(f"next_n: {next_n}, by token", promise, lens=(*lens, 300, 0, 40), by_token=True, **changes)
    promise = "a length of 0 is padding; none is below 0 or past the columns"
    for next_n in (1, 2):
        edges = (0, 1, 2, NEGATIVE, LONG, -(2**31), 2**31 - 1)
        yield case(f"lengths, next_n {next_n}", promise, rows=7 * next_n, next_n=next_n, lens=edges)
    yield case("without scores", "columns alone", gives=())


def _persistent_cases(big: bool) -> Iterator[SelectCase]:
    base = SelectCase("", "", PERSISTENT, 3, 300, 40, lens=(300, 50, 0), tile=None if big else (2, 2, False))

    def case(name: str, promise: str, **changes: Any) -> SelectCase:
        return replace(base, name=f"{SHORT[PERSISTENT]}: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's columns")
    yield case("2-D lengths", "lengths may be given a query token", next_n=3, by_token=True, lens=(200, 201, 300))
    yield case("lengths: int32", "lengths are clamped, whatever int32 says", lens=(MOST, LEAST, MOST - 63))
    yield case("max_seq_len", "columns from max_seq_len on are not looked at", most=100)


def _page_cases(big: bool) -> Iterator[SelectCase]:
    base = SelectCase("", "", PAGES, 4, 300, 40, pages=301, gives=("raw",), tile=None if big else (2, 2, False))

    def case(name: str, promise: str, **changes: Any) -> SelectCase:
        return replace(base, name=f"{SHORT[PAGES]}: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's slots")
    for size in (1, 2, 53, 64, 100, 2**31 - 1):
        yield case(f"page size: {size}", "any page size", page_size=size, lens=(300, 20, 0, 299))
        yield case(
            f"blocks: limit, size {size}", "a page is named if all its slots are int32", page_size=size, blocks="limit"
        )
    yield case("pages: few", "an index past the page table's row has no slot", pages=3, page_size=53)
    yield case("pages: none", "a page table without columns names nothing", pages=0)
    for batches in ("mapped", "outside"):
        yield case(f"batches: {batches}", "a row of a batch that is not there names nothing", batches=batches)
    promise = "a row's page table begins at the given column, else at the row's first"
    yield case("row starts", promise, starts=(0, 7, 100, 299), lens=(300, 60, 250, 5))
    yield case("page starts", promise, page_starts=(0, 3, 280, NEGATIVE))
    yield case(
        "both starts", promise, starts=(0, 7, 100, 299), page_starts=(5, 0, 2, 300), lens=(300,), batches="mapped"
    )
    promise = "lengths and starts are clamped, whatever int32 says"
    for page_starts in (None, (0, MOST, LEAST, 3, MOST - 40)):
        ends = {"starts": _STARTS, "lens": _ENDS, "page_starts": page_starts, "pages": 301, "page_size": 7}
        yield case(f"starts: int32{', of pages too' if page_starts else ''}", promise, **ends, rows=9)
    yield case("all results", "slots, indices and scores", gives=("raw", "scores"), lens=(300, 20))
    yield case("slots alone", "a tensor of the wrapper's own", gives=(), out="")
    small: Tile = (2, 2, True)
    yield case(
        "long rows", "of rows longer than a tile too", columns=1300, starts=(3, 0, 100, 9), page_size=7, tile=small
    )


def _merge_cases(big: bool) -> Iterator[MergeCase]:
    small = None if big else (2, 2, 512)
    base = MergeCase("", "", 3, 700, 100, 2, tile=small)

    def case(name: str, promise: str, **changes: Any) -> MergeCase:
        return replace(base, name=f"{SHORT[MERGE]}: {name}", promise=promise, **changes)

    whole = "what ranks pick, merged, is what the whole row's top-k is"
    yield case("typical", whole)
    for pattern in SCORE_PROMISES:
        yield case(f"scores: {pattern}", whole, scores=pattern, ranks=4, interleave=16)
    for ranks, interleave in ((1, 1), (2, 64), (3, 1), (8, 3)):
        yield case(f"ranks: {ranks} by {interleave}", whole, ranks=ranks, interleave=interleave, scores="ties", k=60)
    for k in (1, 255) + ((1024, 2048, 4096) if big else ()):
        yield case(f"k: {k}", whole, k=k, scores="ties")
    # A tile holds the picks of two groups at least, or a further level has no fewer candidates.
    yield case("k: 512", whole, k=512, scores="ties", tile=None if big else (2, 4, 512))
    yield case("any order", "candidates may stand in any order", spread=True, scores="ties")
    yield case(
        "levels", "candidates may be more than a tile holds", ranks=8, columns=2000, tile=(2, 2, 128), scores="ties"
    )
    for layout in ("slice", "odd", "far"):
        yield case(f"layout: {layout}", "rows may lie apart", layout=layout)
    for layout in ("slice", "odd"):
        yield case(f"out: {layout}", "results go to the tensors that are passed, and nowhere else", out=layout, k=77)
    yield case("own results", "tensors of the wrapper's own", given=False)
    yield case("rows: none", "no rows, no results", rows=0)
    yield case("again", "two calls give the same bits", check="determinism", scores="ties")
    if big:
        yield case("large", whole, columns=1 << 17, k=2048, ranks=8, scores="ties")


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of the family; see mlagen.verify.families."""
    wrappers, big = spec["wrappers"], device == "cuda"
    makers = {
        PREFILL: _prefill_cases,
        DECODE: _decode_cases,
        PERSISTENT: _persistent_cases,
        PAGES: _page_cases,
        MERGE: _merge_cases,
    }
    found: list[Case] = [case for wrapper, make in makers.items() if wrapper in wrappers for case in make(big)]
    return [*found, *refused(wrappers)]
