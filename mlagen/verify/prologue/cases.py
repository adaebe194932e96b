"""The cases of attention's prologue: plain data, made from a spec and from where it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlagen.verify.call.case import Case
from mlagen.verify.paged.pages import Pages, page_cases
from mlagen.verify.prologue.invalid import refused
from mlagen.verify.prologue.side import CONCAT, PADDED, SHORT, PrologueSide, side_of

CHAIN = "chain"
PAGES = Pages()


@dataclass(frozen=True)
class PrologueCase(Case):
    """A call of a prologue.

    Attributes:
        wrapper: the wrapper.
        pages: how the cache lies in memory.
        tokens: tokens of Q; None: as many as `values` needs.
        heads: of Q.
        padded: heads that PADDED's result has more.
        given: of PADDED, layout in memory of `out`, a key of mlagen.verify.memory.LAYOUTS; "": it is not passed.
        values: pattern of the rows, a key of VALUES or "powers": rows with a norm that is exact.
        slots: pattern of the slots, as mlagen.verify.cache.write draws them.
        positions: "random", "zero", "garbage" (among them) or "longer" (than the tokens).
        q, rows, tables: layouts in memory of Q, of the rows, and of the table of angles.
        k_pe: of CONCAT, its form: "2d" or "3d".
        weights: norms with a weight: of "q", "kv" or both.
        wide: the table of angles is fp32.
    """

    wrapper: str
    pages: Pages = PAGES
    tokens: int | None = 20
    heads: int = 2
    padded: int = 0
    given: str = ""
    values: str = "random"
    slots: str = "shuffled"
    positions: str = "random"
    q: str = "contiguous"
    rows: str = "contiguous"
    tables: str = "contiguous"
    k_pe: str = "2d"
    weights: str = ""
    wide: bool = True


Make = Callable[..., PrologueCase]


def _make(side: PrologueSide, wrapper: str, big: bool) -> Make:
    """The function that makes a case of a name and a promise, with changes to an ordinary one."""
    base = PrologueCase("", "", wrapper=wrapper, tokens=1000 if big else 20, heads=side.facts.num_heads if big else 2)

    def case(name: str, promise: str, **changes: Any) -> PrologueCase:
        return replace(base, name=f"prologue: {name} ({SHORT[wrapper]})", promise=promise, **changes)

    return case


def _cases(side: PrologueSide, wrapper: str, case: Make) -> Iterator[PrologueCase]:
    """Cases of each wrapper."""
    both = "kv" if wrapper == CONCAT else "q, kv"
    yield case("typical", "an ordinary call writes the reference's bytes and Q", every_target=True)
    yield case("norm of rows", "a weight normalises rows in front of RoPE", weights="kv", every_target=True)
    yield case("norms", "norms may have weights", weights=both)
    yield case("model's own heads", "the model's number of heads", heads=side.facts.num_heads, tokens=3)
    for heads in (1, 3, 17):
        yield case(f"heads: {heads}", "any number of heads", heads=heads)
    yield case(
        "chain",
        "rows that are gathered, and attention over them, are plain torch's",
        check=CHAIN,
        weights="kv",
        values="powers",
    )
    if wrapper == PADDED:
        for padded, heads in ((1, 3), (14, 2), (5, 0)):
            yield case(f"padded by {padded}", "further heads are 0", padded=padded, heads=heads, tokens=5)
        for layout in ("contiguous", "slice", "odd", "transposed"):
            yield case(f"out {layout}", "Q may be written to a given tensor", given=layout, padded=3, tokens=5)
    if wrapper != CONCAT:
        for size in (2, 53):
            pages = Pages(size, "pages", page_gap=32)
            yield case(f"pages of bytes, block size {size}", "a page is a run of bytes", pages=pages)


def _kernel_cases(side: PrologueSide, wrapper: str, big: bool, case: Make) -> Iterator[PrologueCase]:
    """Cases of a kernel, for one of its wrappers."""
    yield case("exact norm", "rows with a norm that is exact have the reference's bytes", values="powers", weights="kv")
    yield case("bf16 angles", "angles may be in the model's dtype", wide=False, every_target=True)
    for name, promise, pages in page_cases(side.layout):
        yield case(name, promise, pages=pages, **({"tokens": 6} if pages.far else {}))
    if side.layout.quantised:
        yield case("tiles", "scales at their floors and about powers of two", values="tiles", tokens=None)
    for layout in ("slice", "odd", "transposed", "far"):
        sizes: Mapping[str, Any] = {"tokens": 3, "heads": 2} if layout == "far" else {}
        yield case(f"q {layout}", "heads and tokens of Q may lie apart", q=layout, **sizes)
    for layout in ("slice", "odd"):
        yield case(f"rows {layout}", "rows may be slices of a wider projection", rows=layout, weights="kv")
        yield case(f"angles {layout}", "rows of the table may lie apart", tables=layout)
    for slots, promise in {
        "negative": "a row with a negative slot is skipped, INT64_MIN too",
        "beyond": "a row with a slot past the last page is skipped, 2^32 and INT64_MAX too",
        "shorter": "rows past the end of slot_mapping are skipped, and Q of all tokens is rotated",
        "none": "an empty slot_mapping writes no row",
    }.items():
        yield case(f"slots: {slots}", promise, slots=slots)
    for positions, promise in {
        "zero": "at position 0 nothing turns",
        "garbage": "a token of a position without angles has an unrotated Q and no row",
        "longer": "positions past the last token are not looked at",
    }.items():
        yield case(f"positions: {positions}", promise, positions=positions)
    yield case("no tokens", "an empty batch writes nothing", tokens=0)
    yield case("no heads", "without heads rows are still written", heads=0)
    for tokens in (1, 7):
        yield case(f"tokens: {tokens}", "any number of tokens", tokens=tokens)
    if wrapper == CONCAT:
        yield case("k_pe with a head dimension", "k_pe may be [tokens, 1, rope]", k_pe="3d")
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package; see mlagen.verify.families."""
    side, wrappers = side_of(spec), tuple(spec["wrappers"])
    found: list[Case] = []
    kernels = set()
    for wrapper in [name for name in SHORT if name in wrappers and side is not None]:
        assert side is not None
        full = (wrapper == CONCAT) not in kernels  # wrappers of whole heads have one kernel, so one takes all cases
        kernels.add(wrapper == CONCAT)
        case = _make(side, wrapper, device == "cuda")
        found += _cases(side, wrapper, case)
        found += _kernel_cases(side, wrapper, device == "cuda", case) if full else ()
        found += refused(side, wrapper)
    return found
