"""The cases of pools of keys: plain data, made from a spec and from where it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlagen.verify.call.case import Case
from mlagen.verify.kpool.invalid import refused
from mlagen.verify.kpool.side import COMPRESS, EXPAND, NEEDED, QUERY, SEED, UPDATE, KpoolSide, side_of
from mlagen.verify.paged.pages import Pages, page_cases

CHAIN, SELECT = "chain", "select"
PAGES = Pages()
LAYOUTS = ("slice", "odd")  # of memory: keys of mlagen.verify.call.memory.LAYOUTS


@dataclass(frozen=True)
class RowsCase(Case):
    """A call that transforms and quantises rows of the query.

    Attributes:
        rows: of the query.
        q: layout in memory.
        values: "random", "zero", "tiny", "large", "one" (column of each row) or "nan" (some rows).
    """

    rows: int = 40
    q: str = "contiguous"
    values: str = "random"


@dataclass(frozen=True)
class PoolsCase(Case):
    """A call that compresses given tokens.

    Attributes:
        pool: tokens of a pool.
        pools: of the call.
        pages: how the cache lies in memory.
        rows, ape: layouts in memory of keys and scores, and of ape.
        slots: pattern of the slots, as mlagen.verify.paged.pages draws them; never shorter.
        mask: "", "mixed" or "none" (is written).
        scores: "random", "equal", "large", "infinite" or "no" (score of some columns: their pools are NaN).
    """

    pool: int = 4
    pools: int = 9
    pages: Pages = PAGES
    rows: str = "contiguous"
    ape: str = "contiguous"
    slots: str = "shuffled"
    mask: str = ""
    scores: str = "random"


@dataclass(frozen=True)
class SeedCase(Case):
    """A call that seeds rings.

    Attributes:
        pool: tokens of a pool.
        rings: pools of a ring.
        requests: of each the position of its first token and its number of tokens.
        wide: slots are int64.
        slots: "own", or for the last third of each request "negative" or "beyond".
        rows, tail: layouts in memory of keys and scores, and of the tails.
        further: rows of keys and scores without a slot.
    """

    pool: int = 4
    rings: int = 1
    requests: tuple[tuple[int, int], ...] = ((0, 9), (6, 5), (0, 3), (2, 1))
    wide: bool = True
    slots: str = "own"
    rows: str = "contiguous"
    tail: str = "contiguous"
    further: int = 0


@dataclass(frozen=True)
class UpdateCase(Case):
    """A call that stores the tokens of a decode step.

    Attributes:
        pool: tokens of a pool.
        rings: pools of a ring.
        first: position of the first token of each request.
        next_n: tokens of a request.
        wide: names of the integers that are int64, of "tail", "slots" and "positions".
        garbage: the argument with entries outside, "tail", "slots" or "positions"; "padding": short requests.
        pages: how the cache lies in memory.
        rows, tail, integers: layouts in memory of keys, scores and ape, of the tails, and of the integers.
        lengths: of the requests of CHAIN.
        steps: how CHAIN cuts requests: "chunks", "single" tokens, "accepted" tokens or "drafts".
    """

    pool: int = 4
    rings: int = 1
    first: tuple[int, ...] = (3, 0, 7, 39, 5, 6, 2)
    next_n: int = 1
    wide: str = "tail, slots"
    garbage: str = ""
    pages: Pages = PAGES
    rows: str = "contiguous"
    tail: str = "contiguous"
    integers: str = "contiguous"
    lengths: tuple[int, ...] = (27, 14)
    steps: str = ""


@dataclass(frozen=True)
class ExpandCase(Case):
    """A call that expands pools.

    Attributes:
        pool: tokens of a pool.
        rows, picked: of the call: rows and pools of each.
        wide: pools are int64.
        ids: "random" (some are none), "none", "outside" or "complete" (the last ones of the row).
        lens: "random", "zero", "negative", "largest" or "short" (below a pool).
        memory: layout in memory of the pools.
    """

    pool: int = 4
    rows: int = 5
    picked: int = 16
    wide: bool = True
    ids: str = "random"
    lens: str = "random"
    memory: str = "contiguous"


@dataclass(frozen=True)
class SelectCase(Case):
    """Calls from keys of pools to the tokens of the best ones, of the last token of each request.

    Attributes:
        pool: tokens of a pool.
        lengths: of the requests.
        picked: pools that are picked.
    """

    pool: int = 4
    lengths: tuple[int, ...] = (571, 38, 140)
    picked: int = 16


def _rows_cases(big: bool) -> Iterator[Case]:
    base = RowsCase("", "", rows=4000 if big else 40)

    def case(name: str, promise: str, **changes: Any) -> RowsCase:
        return replace(base, name=f"kpool: {name} (query)", promise=promise, **changes)

    yield case("typical", "rows are transformed and quantised", every_target=True)
    for rows in (0, 1, 17):
        yield case(f"rows {rows}", "any number of rows", rows=rows)
    for layout in LAYOUTS:
        yield case(f"q {layout}", "rows may lie apart", q=layout)
    for values, promise in {
        "zero": "rows of zeros have the least scale",
        "tiny": "the least scale is the rule's floor",
        "large": "large values have large scales",
        "one": "each column has its own signs",
        "nan": "a NaN stays in its row",
    }.items():
        yield case(f"values {values}", promise, values=values)
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")


SLOTS = {
    "negative": "a negative slot is skipped, INT64_MIN too",
    "beyond": "a slot past the last page is skipped, 2^32 and INT64_MAX too",
}


def _pools_cases(side: KpoolSide, big: bool) -> Iterator[Case]:
    base = PoolsCase("", "", pools=300 if big else 9)

    def case(name: str, promise: str, **changes: Any) -> PoolsCase:
        return replace(base, name=f"kpool: {name} (pools)", promise=promise, **changes)

    yield case("typical", "an ordinary call writes the reference's keys", every_target=True)
    yield case("typical of 16", "a pool may have 16 tokens", pool=16, every_target=True)
    for pool in (1, 2, 3, 7, 64):
        yield case(f"pools of {pool}", "a pool has any number of tokens", pool=pool)
    yield case("no pools", "an empty batch writes nothing", pools=0)
    for name, promise, pages in page_cases(side.layout):
        yield case(name, promise, pages=pages)
    for layout in (*LAYOUTS, "transposed"):
        yield case(f"rows {layout}", "keys and scores may be slices", rows=layout)
    for layout in LAYOUTS:
        yield case(f"ape {layout}", "rows of ape may lie apart", ape=layout)
    for slots, promise in SLOTS.items():
        yield case(f"slots: {slots}", promise, slots=slots)
    for mask in ("mixed", "none"):
        yield case(f"mask: {mask}", "masked pools are skipped", mask=mask)
    for scores, promise in {
        "equal": "equal scores give the mean",
        "large": "scores of any size are taken relative to the largest",
        "infinite": "a score of -inf has no weight",
        "no": "without a score above -inf a key is NaN",
    }.items():
        yield case(f"scores: {scores}", promise, scores=scores)
        yield case(f"scores: {scores}, 16", promise, scores=scores, pool=16)
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")


def _seed_cases() -> Iterator[Case]:
    base = SeedCase("", "")

    def case(name: str, promise: str, **changes: Any) -> SeedCase:
        return replace(base, name=f"kpool: {name} (seed)", promise=promise, **changes)

    yield case("typical", "each request's last tokens are in its ring", every_target=True)
    yield case("slots int32", "slots may be int32", wide=False)
    for pool, rings in ((1, 1), (2, 1), (2, 3), (16, 1), (16, 2)):
        yield case(f"pools of {pool}, {rings} in a ring", "any pool and ring", pool=pool, rings=rings)
    yield case("no tokens", "an empty batch writes nothing", requests=())
    for slots in SLOTS:
        yield case(f"slots: {slots}", SLOTS[slots], slots=slots)
    for layout in LAYOUTS:
        yield case(f"rows {layout}", "keys and scores may be slices", rows=layout)
        yield case(f"tail {layout}", "rings may lie apart; the memory between them stays", tail=layout)
    yield case("further rows", "rows without a slot are not looked at", further=6)
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")


def _update_cases(side: KpoolSide, wrappers: tuple[str, ...], big: bool) -> Iterator[Case]:
    first = tuple((7 * number) % 97 for number in range(200)) if big else (3, 0, 7, 39, 5, 6, 2)
    base = UpdateCase("", "", first=first)

    def case(name: str, promise: str, **changes: Any) -> UpdateCase:
        return replace(base, name=f"kpool: {name} (update)", promise=promise, **changes)

    yield case("typical", "a decode step stores its tokens and completes pools", every_target=True)
    yield case("typical of 3 tokens", "a step may have several tokens", next_n=3, every_target=True)
    for pool, rings, next_n in ((1, 1, 2), (2, 1, 5), (4, 2, 6), (4, 1, 9), (16, 1, 3), (16, 2, 18), (3, 2, 2)):
        promise = "any pool, ring and number of tokens, more than a ring too"
        yield case(
            f"pools of {pool}, {rings} in a ring, {next_n} tokens", promise, pool=pool, rings=rings, next_n=next_n
        )
    for wide in ("", "tail", "slots", "positions", "tail, slots, positions"):
        yield case(f"int64: {wide or 'none'}", "integers may be int32 or int64", wide=wide, next_n=2)
    for garbage, promise in {
        "tail": "tokens with a tail slot outside are skipped",
        "slots": "pools with a slot outside are not written, and their tokens are stored",
        "positions": "tokens before position 0 are skipped",
        "padding": "short requests end with tokens of -1",
    }.items():
        for wide in ("", "tail, slots, positions"):
            name = f"garbage: {garbage}, int{64 if wide else 32}"
            yield case(name, promise, garbage=garbage, next_n=3, wide=wide)
    yield case("last positions", "positions up to 2^31 - 1", first=(2**31 - 4, 2**31 - 5), next_n=4, wide="positions")
    yield case("no requests", "an empty batch writes nothing", first=())
    yield case("no tokens", "requests without tokens write nothing", next_n=0)
    for name, promise, pages in page_cases(side.layout):
        yield case(name, promise, pages=pages, next_n=2)
    for layout in LAYOUTS:
        yield case(f"rows {layout}", "keys, scores and ape may be slices", rows=layout, next_n=3)
        yield case(f"tail {layout}", "rings may lie apart; the memory between them stays", tail=layout, next_n=3)
        yield case(f"integers {layout}", "rows of integers may lie apart", integers=layout, next_n=3)
    if {COMPRESS, SEED} <= set(wrappers):
        for pool, rings in ((4, 2), (16, 2), (2, 3)):
            for steps in ("chunks", "single", "accepted", "drafts"):
                promise = "keys do not depend on how a request is cut into calls"
                lengths = (45, 70) if pool == 16 else (27, 14)
                name = f"chain, {steps}, pools of {pool}"
                yield case(name, promise, check=CHAIN, pool=pool, rings=rings, steps=steps, lengths=lengths)
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph", next_n=3)
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")


def _expand_cases(big: bool) -> Iterator[Case]:
    base = ExpandCase("", "", rows=300 if big else 5, picked=512 if big else 16)

    def case(name: str, promise: str, **changes: Any) -> ExpandCase:
        return replace(base, name=f"kpool: {name} (expand)", promise=promise, **changes)

    yield case("typical", "pools become their tokens, and the tail follows", every_target=True)
    yield case("int32", "pools may be int32", wide=False)
    for pool in (1, 2, 3, 16):
        yield case(f"pools of {pool}", "any pool", pool=pool)
    yield case("512 pools", "rows of the model's size", rows=2, picked=512)
    for rows, picked in ((0, 16), (3, 0), (1, 1)):
        yield case(f"{rows} rows, {picked} pools", "any number of rows and pools", rows=rows, picked=picked)
    for ids, promise in {
        "none": "a row may pick no pool",
        "outside": "a pool that is not complete, or none, has no tokens",
        "complete": "the last complete pool and the tail meet",
    }.items():
        yield case(f"pools: {ids}", promise, ids=ids)
        yield case(f"pools: {ids}, int32", promise, ids=ids, wide=False)
    for lens, promise in {
        "zero": "a row may see no token",
        "negative": "negative lengths count as 0",
        "largest": "lengths up to 2^31 - 1",
        "short": "a row may have a tail and no pool",
    }.items():
        yield case(f"lengths: {lens}", promise, lens=lens)
        yield case(f"lengths: {lens}, pools of 16", promise, lens=lens, ids="outside", pool=16)
    for layout in LAYOUTS:
        yield case(f"pools {layout}", "rows of pools may lie apart", memory=layout)
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package; see mlagen.verify.families."""
    wrappers, side, big = tuple(spec["wrappers"]), side_of(spec), device == "cuda"
    found: list[Case] = []
    if side is not None:
        for wrapper, made in (
            (QUERY, _rows_cases(big)),
            (COMPRESS, _pools_cases(side, big)),
            (SEED, _seed_cases()),
            (UPDATE, _update_cases(side, wrappers, big)),
        ):
            found += [*made, *refused(side, wrapper)] if wrapper in wrappers else []
    if side is not None and set(NEEDED) <= set(wrappers):
        for pool in (4, 16):
            name, promise = f"kpool: selection, pools of {pool}", "picked pools are the best, and become their tokens"
            found.append(SelectCase(name, promise, check=SELECT, pool=pool))
    return [*found, *_expand_cases(big), *refused(side, EXPAND)] if EXPAND in wrappers else found
