"""The cases of latents: plain data, made from a spec and from where it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlagen.verify.call.case import Case
from mlagen.verify.latents.invalid import refused
from mlagen.verify.latents.side import INSERT, POOL, SHORT, LatentsSide, side_of
from mlagen.verify.paged.pages import Pages, page_cases

CHAIN = "chain"
PAGES = Pages()


@dataclass(frozen=True)
class PoolCase(Case):
    """A call that makes latents.

    Attributes:
        chunks: of each request, the position of its first token and its number of tokens.
        ratio: tokens of a group.
        capacity: places of a ring.
        states, rows: layouts in memory of the states, and of kv_score and latents; keys of
            mlagen.verify.memory.LAYOUTS.
        slots: "own", "negative", "beyond" (some of each), "shorter" or "none".
        positions: "own", "garbage" (of a whole request), "longer" (than the tokens) or "last" (near 2^31).
        requests: "own" or "garbage" (among them).
        scores: "random", "equal", "large" or "infinite".
        steps: how CHAIN cuts a request: "chunks", "single" tokens, or with "drafts" that are replaced.
    """

    chunks: tuple[tuple[int, int], ...] = ((0, 13), (5, 9), (0, 3), (7, 1), (4, 1), (2, 0))
    ratio: int = 2
    capacity: int = 8
    states: str = "contiguous"
    rows: str = "contiguous"
    slots: str = "own"
    positions: str = "own"
    requests: str = "own"
    scores: str = "random"
    steps: str = "chunks"


@dataclass(frozen=True)
class InsertCase(Case):
    """A call that inserts latents.

    Attributes:
        tokens: of the call.
        ratio: tokens of a group.
        pages: how the cache lies in memory.
        rows, tables: layouts in memory of the latents, and of the table of angles.
        slots: pattern of the slots, as mlagen.verify.cache.write draws them.
        positions: pattern of the positions, as mlagen.verify.paged.angles draws them.
        wide: the table of angles is fp32.
    """

    tokens: int = 20
    ratio: int = 2
    pages: Pages = PAGES
    rows: str = "contiguous"
    tables: str = "contiguous"
    slots: str = "shuffled"
    positions: str = "random"
    wide: bool = True


Make = Callable[..., Any]


def _pool_cases(case: Make, inserts: bool, big: bool) -> Iterator[PoolCase]:
    yield case("typical", "an ordinary call writes the reference's latents and states", every_target=True)
    yield case("ratio 1", "a group of one token has no scores and no states", ratio=1, every_target=True)
    for ratio, capacity in ((2, 2), (3, 8), (5, 5), (8, 16)):
        promise = "any ratio, and rings of any size from it on"
        yield case(f"ratio {ratio}, rings of {capacity}", promise, ratio=ratio, capacity=capacity)
    long = ((0, 40), (1000, 37), (999, 41))
    yield case("chunks longer than rings", "a ring that is read and then filled anew", chunks=long, capacity=4)
    single = tuple((first, 1) for first in (0, 1, 2, 3, 1023, 1024))
    yield case("decode", "single tokens take the rest of their group from the ring", chunks=single)
    yield case("decode, ratio 4", "as many as the group lacks", chunks=single, ratio=4)
    drafts = tuple((first, 6) for first in (0, 1, 2, 77))
    yield case("drafts", "a step of several tokens", chunks=drafts)
    yield case("no requests", "an empty batch writes nothing", chunks=())
    yield case("no tokens", "requests without tokens write nothing", chunks=((3, 0), (0, 0)))
    for layout in ("slice", "odd"):
        yield case(f"states {layout}", "states may lie apart; the bytes between them stay", states=layout)
        yield case(f"rows {layout}", "kv, scores and latents may be slices", rows=layout)
        yield case(f"rows {layout}, ratio 1", "kv and latents may be slices", rows=layout, ratio=1)
        yield case(f"rows {layout}, ratio 3", "kv, scores and latents may be slices", rows=layout, ratio=3)
    yield case("states far", "offsets of rings are 64 bits wide", states="far", chunks=((5, 3), (1, 1)))
    for scores, promise in {
        "equal": "equal scores give the mean",
        "large": "scores of any size are taken relative to the largest",
        "infinite": "a score of -inf has no weight",
    }.items():
        yield case(f"scores: {scores}", promise, scores=scores)
        yield case(f"scores: {scores}, ratio 5", promise, scores=scores, ratio=5)
    for slots, promise in {
        "negative": "a token with a negative slot makes no latent and no state, INT64_MIN too",
        "beyond": "a token with a slot past the last ring likewise, 2^32 and INT64_MAX too",
        "shorter": "tokens past the end of slot_mapping are skipped",
        "none": "an empty slot_mapping writes nothing",
    }.items():
        yield case(f"slots: {slots}", promise, slots=slots)
        yield case(f"slots: {slots}, ratio 3", promise, slots=slots, ratio=3)
        if slots != "beyond":  # of groups of one token every slot from 0 on works
            yield case(f"slots: {slots}, ratio 1", promise, slots=slots, ratio=1)
    for positions, promise in {
        "garbage": "a token before position 0 or past 2^31 ends no group",
        "longer": "positions past the last token are not looked at",
        "last": "positions may be near 2^31",
    }.items():
        yield case(f"positions: {positions}", promise, positions=positions)
        for ratio in (1, 3):
            yield case(f"positions: {positions}, ratio {ratio}", promise, positions=positions, ratio=ratio)
    for name, ratio in (("", 2), (", ratio 3", 3)):
        promise = "a token of no request ends no group of the call"
        yield case(f"requests: garbage{name}", promise, requests="garbage", ratio=ratio)
    for steps in ("chunks", "single", "drafts") if inserts else ():
        promise = "latents, rows and keys do not depend on how a request is cut into calls"
        for ratio in (1, 2, 3):
            changes: dict[str, Any] = {"ratio": ratio, "chunks": ((0, 23), (0, 14))}
            yield case(f"chain of {ratio}, {steps}", promise, check=CHAIN, steps=steps, **changes)
    if big:
        yield case("many tokens", "any number of tokens", chunks=((0, 9000), (1001, 400)))
        yield case("graph", "a captured call replays on new inputs", check="graph")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")


def _insert_cases(side: LatentsSide, case: Make, big: bool) -> Iterator[InsertCase]:
    yield case("typical", "an ordinary call writes the reference's rows", every_target=True)
    for ratio in (1, 3, 7):
        yield case(f"ratio {ratio}", "any ratio", ratio=ratio)
    yield case("model's dtype of angles", "angles may be in the model's dtype", wide=False, every_target=True)
    for name, promise, pages in page_cases(side.layout):
        yield case(name, promise, pages=pages, **({"tokens": 6} if pages.far else {}))
    for layout in ("slice", "odd", "far"):
        tokens = {"tokens": 3} if layout == "far" else {}
        yield case(f"latents {layout}", "latents may be slices", rows=layout, **tokens)
    for layout in ("slice", "odd"):
        yield case(f"angles {layout}", "rows of the table may lie apart", tables=layout)
    for slots, promise in {
        "negative": "a token with a negative slot is skipped, INT64_MIN too",
        "beyond": "a token with a slot past the last page is skipped, 2^32 and INT64_MAX too",
        "shorter": "tokens past the end of slot_mapping are skipped",
        "none": "an empty slot_mapping writes nothing",
    }.items():
        yield case(f"slots: {slots}", promise, slots=slots, ratio=1)
    for positions, promise in {
        "zero": "at position 0 a group of two does not end",
        "garbage": "a position outside the table of angles makes no row",
        "longer": "positions past the last token are not looked at",
    }.items():
        yield case(f"positions: {positions}", promise, positions=positions, ratio=1 if positions == "garbage" else 2)
    yield case("no tokens", "an empty batch writes nothing", tokens=0)
    yield case("many tokens", "any number of tokens", tokens=8203, ratio=1)
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package; see mlagen.verify.families."""
    side, wrappers, big = side_of(spec), tuple(spec["wrappers"]), device == "cuda"
    found: list[Case] = []
    for wrapper in [name for name in SHORT if name in wrappers]:
        assert side is not None
        base: Any = PoolCase("", "") if wrapper == POOL else InsertCase("", "", tokens=1000 if big else 20)

        def case(name: str, promise: str, base: Any = base, short: str = SHORT[wrapper], **changes: Any) -> Any:
            return replace(base, name=f"latents: {name} ({short})", promise=promise, **changes)

        mine = _pool_cases(case, INSERT in wrappers, big) if wrapper == POOL else _insert_cases(side, case, big)
        found += [*mine, *refused(side, wrapper)]
    return found
