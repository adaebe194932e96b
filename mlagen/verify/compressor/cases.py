"""The cases of the compressor: plain data, made from a spec and from where it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlagen.verify.call.case import Case
from mlagen.verify.compressor.invalid import refused
from mlagen.verify.compressor.side import COMPRESS, SAVE, CompressorSide, sides_of
from mlagen.verify.paged.pages import Pages, page_cases

CHAIN = "chain"
PAGES = Pages()


@dataclass(frozen=True)
class SaveCase(Case):
    """A call that saves states.

    Attributes:
        columns: of kv, as a multiple of the attention row's: 1 or 2; 0: of fewer, an odd number.
        without: how many of them are missing at the end.
        ratio: tokens a row.
        tokens: of the call.
        block: states a page.
        wide: kv and score are fp32.
        rows, states: layouts in memory of kv, score and ape, and of the states; keys of mlagen.verify.memory.LAYOUTS.
        further: columns of a half of a state after those of kv.
        slots: pattern of the slots, as mlagen.verify.cache.write draws them.
        positions: "random", "zero", "garbage" (among them) or "longer" (than the slots).
    """

    columns: int = 2
    without: int = 0
    ratio: int = 4
    tokens: int = 20
    block: int = 4
    wide: bool = True
    rows: str = "contiguous"
    states: str = "contiguous"
    further: int = 0
    slots: str = "shuffled"
    positions: str = "random"

    @property
    def pages(self) -> Pages:
        """Where the states are not: far."""
        return Pages(self.block)


@dataclass(frozen=True)
class CompressCase(Case):
    """A call that compresses.

    Attributes:
        short: the cache, `CompressorSide.short`.
        chunks: of each request, the position of its first token and its number of tokens.
        ratio, overlap: of the windows.
        block: states a page.
        pages: how the cache of rows lies in memory.
        states, tables: layouts in memory of the states, and of block table and angles.
        further: columns of a half of a state that no row needs.
        slots: pattern of the rows' slots, as mlagen.verify.cache.write draws them.
        state_slots: "own", "skipped" (some of them) or "shorter".
        positions: "own", "garbage" (among them), "longer" or "past" (the table of angles).
        requests: "own" or "garbage" (among them).
        table: "whole", "holes" (pages that are none), "narrow" (fewer columns) or "garbage" (pages beyond the states).
        scores: "random", "equal", "large" or "infinite".
        wide: the table of angles is fp32.
        in_metadata: slots are passed in an object.
        steps: how CHAIN cuts a request: "chunks", "single" tokens, or with "drafts" that are replaced.
    """

    short: str
    chunks: tuple[tuple[int, int], ...] = ((0, 13), (5, 9), (0, 3))
    ratio: int = 4
    overlap: bool = True
    block: int = 4
    pages: Pages = PAGES
    states: str = "contiguous"
    tables: str = "contiguous"
    further: int = 0
    slots: str = "shuffled"
    state_slots: str = "own"
    positions: str = "own"
    requests: str = "own"
    table: str = "whole"
    scores: str = "random"
    wide: bool = True
    in_metadata: bool = False
    steps: str = "chunks"


def _states_cases(big: bool) -> Iterator[SaveCase]:
    base = SaveCase("", "", tokens=1000 if big else 20)

    def case(name: str, promise: str, **changes: Any) -> SaveCase:
        return replace(base, name=f"compressor: {name} (save)", promise=promise, **changes)

    yield case("typical", "an ordinary call writes kv, and scores plus ape", every_target=True)
    yield case("model's dtype", "kv and score may be in the model's dtype", wide=False, every_target=True)
    for columns, ratio, block in ((1, 128, 8), (0, 1, 1), (1, 2, 53)):
        promise = "any columns, ratio and block size"
        yield case(f"columns {columns}, ratio {ratio}", promise, columns=columns, ratio=ratio, block=block, tokens=7)
    yield case("4 columns short", "any columns, where all rows begin at 16 bytes", without=4)
    yield case("many tokens", "calls of many tokens run a tile of their own", columns=0, tokens=2100)
    for layout in ("slice", "odd"):
        yield case(f"rows {layout}", "kv, score and ape may be slices", rows=layout)
        yield case(f"states {layout}", "states may lie apart; the bytes between them stay", states=layout, wide=False)
    yield case("states far", "page offsets are 64 bits wide", states="far", block=16, tokens=6)
    yield case("further columns", "a state's halves may be wider than kv", further=24)
    for slots, promise in {
        "negative": "a negative slot is skipped, INT64_MIN too",
        "beyond": "a slot past the last page is skipped, 2^32 and INT64_MAX too",
        "shorter": "tokens past the end of slot_mapping are skipped",
        "none": "an empty slot_mapping writes nothing",
    }.items():
        yield case(f"slots: {slots}", promise, slots=slots)
    for positions, promise in {
        "zero": "position 0 has the first row of ape",
        "garbage": "a token before position 0 or past 2^31 is skipped",
        "longer": "positions past the last token are not looked at",
    }.items():
        yield case(f"positions: {positions}", promise, positions=positions)
    yield case("no tokens", "an empty batch writes nothing", tokens=0)
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")


Make = Callable[..., CompressCase]


def _make(side: CompressorSide) -> Make:
    """The function that makes a case of a name and a promise, with changes to an ordinary one."""
    base = CompressCase("", "", short=side.short)

    def case(name: str, promise: str, **changes: Any) -> CompressCase:
        return replace(base, name=f"compressor: {name} ({side.short})", promise=promise, **changes)

    return case


def _compress_cases(side: CompressorSide, case: Make) -> Iterator[CompressCase]:
    """Cases of windows, of memory and of scores."""
    base = CompressCase("", "", short=side.short)
    yield case("typical", "an ordinary call writes the reference's rows", every_target=True)
    long = ((0, 140), (250, 9))
    yield case(
        "typical of 128", "windows of 128 tokens", chunks=long, ratio=128, overlap=False, block=8, every_target=True
    )
    for ratio, overlap in ((1, False), (2, False), (2, True), (3, True), (128, True)):
        name, given = f"ratio {ratio}{', overlap' if overlap else ''}", long if ratio == 128 else base.chunks
        yield case(name, "any ratio, with overlap or without", ratio=ratio, overlap=overlap, chunks=given)
    many = "calls of many tokens run a tile of their own"
    chunks = ((3, 40), (1000, 2030))
    yield case("many tokens", many, chunks=chunks)
    yield case("many tokens, scores: infinite", "a score of -inf has no weight", scores="infinite", chunks=chunks)
    ends = ((127, 1), (255, 1), (383, 1), (0, 400), (1000, 1700))  # three of them side by side
    yield case("many tokens of 128", many, ratio=128, overlap=False, block=8, chunks=ends)
    for block in (1, 3, 64):
        yield case(f"states a page: {block}", "windows cross pages of states", block=block)
    yield case("first windows", "tokens before position 0 are left out", chunks=((0, 4), (0, 8), (3, 1), (2, 2)))
    yield case("no boundary", "tokens within a window write nothing", chunks=((0, 3), (4, 3)))
    yield case("no tokens", "an empty batch writes nothing", chunks=())
    yield case("model's dtype of angles", "angles may be in the model's dtype", wide=False, every_target=True)
    for name, promise, pages in page_cases(side.layout):
        yield case(name, promise, pages=pages)
    for layout in ("slice", "odd"):
        yield case(f"states {layout}", "states may lie apart", states=layout)
        yield case(f"tables {layout}", "rows of block table and angles may lie apart", tables=layout)
    yield case("states far", "page offsets of states are 64 bits wide", states="far", block=16, chunks=((0, 24),))
    yield case("further columns", "a state's halves may be wider than a row needs", further=24)
    for scores, promise in {
        "equal": "equal scores give the mean",
        "large": "scores of any size are taken relative to the largest",
        "infinite": "a score of -inf has no weight",
    }.items():
        yield case(f"scores: {scores}", promise, scores=scores)
        changes: dict[str, Any] = {"ratio": 128, "overlap": False, "block": 8, "chunks": ((0, 140),)}
        yield case(f"scores: {scores}, 128", promise, scores=scores, **changes)


def _token_cases(case: Make, saves: bool, big: bool) -> Iterator[CompressCase]:
    """Cases of tokens outside, and of requests cut into calls."""
    for slots, promise in {
        "negative": "a row with a negative slot is skipped, INT64_MIN too",
        "beyond": "a row with a slot past the last page is skipped, 2^32 and INT64_MAX too",
        "shorter": "tokens past the end of the rows' slots are skipped",
        "none": "no slots of rows write no row",
    }.items():
        yield case(f"slots: {slots}", promise, slots=slots)
    yield case("state slots: skipped", "a token without a state of its own writes no row", state_slots="skipped")
    yield case("state slots: shorter", "tokens past the end of slot_mapping are skipped", state_slots="shorter")
    for positions, promise in {
        "garbage": "a position outside the table of angles makes no row",
        "longer": "positions past the last token are not looked at",
        "past": "the table of angles may end within a request",
    }.items():
        yield case(f"positions: {positions}", promise, positions=positions)
    yield case("requests: garbage", "a token of no request in the block table makes no row", requests="garbage")
    for table, promise in {
        "holes": "a window's tokens without a page are left out; without its own page a token makes no row",
        "garbage": "pages outside the states are none",
        "narrow": "tokens past the columns of the block table have no page",
    }.items():
        yield case(f"table: {table}", promise, table=table)
        yield case(f"table: {table}, 16", promise, table=table, ratio=16, chunks=((0, 40), (20, 30)), overlap=False)
    yield case("slots in an object", "slots may be passed as vLLM's metadata", in_metadata=True)
    if saves:
        for steps in ("chunks", "single", "drafts"):
            promise = "states and rows do not depend on how a request is cut into calls"
            yield case(f"chain, {steps}", promise, check=CHAIN, steps=steps, chunks=((0, 27), (0, 14)))
            changes: dict[str, Any] = {"ratio": 16, "overlap": False, "block": 8, "chunks": ((0, 50),)}
            yield case(f"chain of 16, {steps}", promise, check=CHAIN, steps=steps, **changes)
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package; see mlagen.verify.families."""
    wrappers, sides = tuple(spec["wrappers"]), sides_of(spec)
    found: list[Case] = []
    big = device == "cuda"
    if SAVE in wrappers:
        found += [*_states_cases(big), *refused(sides[0], SAVE)]
    if COMPRESS in wrappers:
        for side in sides:
            case = _make(side)
            found += [
                *_compress_cases(side, case),
                *_token_cases(case, SAVE in wrappers, big),
                *refused(side, COMPRESS),
            ]
    return found
