"""The cases of candidate blocks: plain data, made from a spec and from where it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlagen.verify.call.case import SM90, Case
from mlagen.verify.chains.candidates.invalid import (
    FLAT,
    FLAT_PICKS,
    PAGED,
    PAGED_PICKS,
    PICKS,
    SELECT,
    SHORT,
    refused,
)
from mlagen.verify.checks import variants
from mlagen.verify.mqa_logits.cases import RANGES, FlatCase, PagedCase
from mlagen.verify.mqa_logits.facts import LogitsFacts
from mlagen.verify.topk.cases import SCORE_PROMISES

LONG, NEGATIVE, LEAST = 10**6, -7, -(2**31)
PATTERNS = {
    "some": "a token's logits are those of its blocks, the newest and partly filled one among them",
    "all": "with all blocks a token has all its keys",
    "none": "a token without blocks has no key",
    "beyond": "blocks past a token's keys have no key, whatever int32 says",
    "unsorted": "blocks may come in any order",
    "holes": "-1 may be between blocks",
}


@dataclass(frozen=True)
class BlocksCase(Case):
    """A call that selects blocks from logits.

    Attributes:
        rows, columns, k: sizes.
        scores: pattern of the logits, a key of SCORE_PROMISES; "infinite": half of them are +inf.
        ends: ends of the rows' ranges in turn; None: all columns.
        starts: first columns of the rows' ranges in turn; None: not passed.
        repeat: row_repeat.
        layout, out: layout in memory of the logits and of the result.
        dtype: of the logits.
        splits: programs that share a row; None: as the package has it.
        by_name: row_repeat is passed by name.
    """

    rows: int = 3
    columns: int = 500
    k: int = 20
    scores: str = "normal"
    ends: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    repeat: int = 1
    layout: str = "contiguous"
    out: str = "contiguous"
    dtype: str = "float32"
    splits: int | None = None
    by_name: bool = True

    @property
    def kernels(self) -> tuple[str, ...]:
        """The sm90 kernel of top-k."""
        return (SM90,)


@dataclass(frozen=True)
class CandidateCase(Case):
    """A call for logits of the keys in blocks, or for their top-k.

    Attributes:
        wrapper: the wrapper called.
        scored: the same call for logits of all keys.
        blocks: columns of candidate_blocks.
        pattern: which blocks a token has, a key of PATTERNS.
        k, gives, out, room: of a call for top-k, as of PickCase.
        memory: layout in memory of candidate_blocks.
    """

    wrapper: str
    scored: FlatCase | PagedCase
    blocks: int = 12
    pattern: str = "some"
    k: int = 40
    gives: tuple[str, ...] = ("scores",)
    out: str = "contiguous"
    room: int | None = None
    memory: str = "contiguous"

    @property
    def kernels(self) -> tuple[str, ...]:
        """The sm90 kernel of top-k; logits have none."""
        return (SM90,) if self.wrapper in PICKS else ()


def _block_cases(big: bool) -> Iterator[BlocksCase]:
    base = BlocksCase("", "", rows=40, columns=9000, k=512) if big else BlocksCase("", "")

    def case(name: str, promise: str, **changes: Any) -> BlocksCase:
        return replace(base, name=f"{SHORT[SELECT]}: {name}", promise=promise, **changes)

    yield case("typical", "the blocks with the largest logits are kept, and the newest", every_target=True)
    for pattern in ("equal", "ties", "special", "zeros", "negative", "none", "few", "wide", "half"):
        yield case(f"logits: {pattern}", SCORE_PROMISES[pattern], scores=pattern)
    yield case("logits: infinite", "the newest block is kept beside any number of infinite logits", scores="infinite")
    for k in (1, 62, 63, 64, 2048, 4096):
        yield case(f"k: {k}", "any number of blocks, more than the row has too", k=k, columns=501)
    ends = (0, 1, 7, 8, 9, 160, 161, 500, LONG, NEGATIVE, LEAST)
    yield case("ends", "ends are clamped, and the newest block may be partly filled", rows=len(ends), ends=ends)
    starts = (0, 3, 490, LONG, NEGATIVE, LEAST)
    promise = "blocks are counted from a row's first column"
    yield case("starts", promise, rows=6, starts=starts, ends=(500, 400, 497, LONG, 9, 1))
    yield case("starts: equal", promise, rows=6, starts=starts, scores="equal")
    for repeat in (1, 3, 6):
        yield case(f"repeat: {repeat}", "rows may share a range", rows=12, repeat=repeat, ends=(497, 73, 1, 241))
        yield case(
            f"repeat: {repeat}, starts", "rows may share a range", rows=12, repeat=repeat, starts=(5, 0), by_name=False
        )
    for rows, columns in ((0, 500), (3, 0), (1, 1), (2, 8), (2, 9)):
        yield case(f"size: {rows} x {columns}", "any number of rows and columns", rows=rows, columns=columns)
    for layout in ("slice", "odd"):
        yield case(f"layout: {layout}", "rows of logits may lie apart", layout=layout, out=layout)
    for scores in ("normal", "ties"):
        yield case(f"bf16: {scores}", "logits may be bf16", dtype="bfloat16", scores=scores)
    yield case("bf16: layout", "logits may be bf16", dtype="bfloat16", layout="odd", ends=(499, 3, 0))
    for splits in (1, 2, 5):
        yield case(f"splits: {splits}", "any number of programs share a row", splits=splits, columns=4000, k=99)
    yield case("again", "two calls give the same bits", check="determinism")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")
    if big:
        yield case("contract: graph", "a captured call replays on other ranges", check="graph", ends=(9000, 70, 801, 8))
        yield case("large", "rows of a million columns", rows=3, columns=2**20, k=2048)
        yield case("large: ties", "rows of a million columns", rows=2, columns=2**20 + 5, k=2048, scores="ties")


def _candidate_cases(wrapper: str, scored: FlatCase | PagedCase, big: bool) -> Iterator[CandidateCase]:
    """Cases that flat keys and pages have."""
    base = CandidateCase("", "", wrapper, scored, 512 if big else 12)
    picks = wrapper in PICKS

    def case(name: str, promise: str, more: Mapping[str, Any] | None = None, **changes: Any) -> CandidateCase:
        call = replace(scored, **(more or {}))
        return replace(base, name=f"{SHORT[wrapper]}: {name}", promise=promise, scored=call, **changes)

    yield case("typical", PATTERNS["some"], every_target=True)
    yield case("exact", "where sums are exact, results are those of float64", {"contents": "whole"})
    for pattern, promise in PATTERNS.items():
        yield case(f"pattern: {pattern}", promise, {"contents": "whole"}, pattern=pattern)
    for blocks in (0, 1, 7, 64, 4096 if big else 300):
        yield case(f"blocks: {blocks}", "any number of blocks", blocks=blocks, k=8)
    yield case(
        "contents: NaN", "NaN in a key that is seen is kept, and never picked", {"nan": True}, pattern="all", blocks=80
    )
    for layout in ("slice", "odd"):
        yield case(f"layout: q {layout}", "rows of q may lie apart", {"q": layout, "weights": layout})
        yield case(f"layout: blocks {layout}", "rows of blocks may lie apart", memory=layout)
    yield case("again", "two calls give the same bits", check="determinism")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")
    if big:
        yield case("contract: graph", "a captured call replays on other ranges", check="graph")
    if not picks:
        yield case("bf16", "logits may be bf16", {"bf16": True})
        for layout, bf16 in (("contiguous", False), ("odd", False), ("contiguous", True), ("odd", True)):
            name, promise = f"variants: {layout}{', bf16' if bf16 else ''}", variants.PROMISES[variants.TARGETS]
            yield case(name, promise, {"q": layout, "bf16": bf16}, check=variants.TARGETS)
        return
    for k in (1, 95, 96, 97, 4096):
        yield case(f"k: {k}", "any number of picks, more than the blocks have too", {"contents": "whole"}, k=k)
    promise = "a token with all its blocks picks what it picks of all keys"
    yield case("all keys", promise, {"contents": "whole"}, pattern="all", blocks=1200, check="one level")
    for room in (1, 2, 3):
        promise = "in pieces a call picks what it picks at once"
        yield case(f"pieces: {room}", promise, room=room)
    for layout in ("slice", "odd"):
        yield case(
            f"out: {layout}", "results go to the tensors that are passed, and nowhere else", out=layout, k=33, room=2
        )
    yield case("own results", "a tensor of the wrapper's own", out="", gives=())
    yield case("workspace", "logits go through a given workspace, whose size changes no bit", check="workspace")


def _flat_cases(wrapper: str, big: bool, contents: str) -> Iterator[CandidateCase]:
    tokens, keys = (130, 9000) if big else (5, 300)
    scored = FlatCase("", "", "", tokens, keys, clean=False, contents=contents)
    yield from _candidate_cases(wrapper, scored, big)
    base = CandidateCase("", "", wrapper, scored, 512 if big else 12)
    for ranges, promise in RANGES.items():
        call = replace(scored, ranges=ranges, contents="whole")
        yield replace(base, name=f"{SHORT[wrapper]}: ranges: {ranges}", promise=promise, scored=call)
    for tokens, keys in ((0, 300), (1, 300), (33, 300), (3, 0), (3, 1), (3, 9)):
        call = replace(scored, tokens=tokens, keys=keys, ranges="whole")
        name = f"{SHORT[wrapper]}: size: {tokens} x {keys}"
        yield replace(base, name=name, promise="any number of tokens and keys", scored=call)
    call = replace(scored, k="odd", ranges="odd")
    yield replace(base, name=f"{SHORT[wrapper]}: layout: k odd", promise="rows of keys may lie apart", scored=call)


def _paged_cases(wrapper: str, big: bool, contents: str) -> Iterator[CandidateCase]:
    lengths = (1300, 1, 9000, 64, 0, 4097) if big else (130, 1, 300, 0)
    scored = PagedCase("", "", "", lengths, contents=contents)
    yield from _candidate_cases(wrapper, scored, big)
    base = CandidateCase("", "", wrapper, scored, 512 if big else 12)

    def case(name: str, promise: str, **changes: Any) -> CandidateCase:
        return replace(
            base, name=f"{SHORT[wrapper]}: {name}", promise=promise, scored=replace(scored, **changes),
            room=2 if wrapper in PICKS else None,
        )  # fmt: skip

    for next_n in (2, 6):
        for tokenwise in (False, True):
            how = {"next_n": next_n, "tokenwise": tokenwise, "contents": "whole"}
            name = f"next_n: {next_n}{', tokenwise' if tokenwise else ''}"
            yield case(name, "each token of a request has blocks and keys of its own", **how)
    yield case("tokenwise", "lengths may have a dimension of one token", tokenwise=True)
    for size in (1, 7, 53, 128):
        yield case(f"block size: {size}", "a block of keys may be in several pages", block_size=size)
    for memory in ("page gap", "odd"):
        yield case(f"pages: {memory}", "pages may lie apart", memory=memory)
    yield case("blocks: outside", "keys of pages outside the cache are no keys", blocks="outside", lengths=(130, 65))
    long = (2**31 - 1, NEGATIVE, LEAST, 10**6)
    given = {"lengths": (128, 64, 192, 64), "context_lens": long}
    beyond = case("lengths: beyond", "keys past the block table are left out", **given)
    yield replace(beyond, pattern="beyond")
    yield case("requests: 0", "any number of requests", lengths=())
    yield case("three dimensions", "the cache may have three dimensions", three=True)
    if big:
        yield case("pages: far", "pages may lie past 2^31 bytes", memory="far", lengths=(700, 64, 130))


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of the family; see `mlagen.verify.families.cases`."""
    wrappers, big, found = [name for name in SHORT if name in spec["wrappers"]], device == "cuda", list[Case]()
    if not wrappers:
        return []
    if SELECT in wrappers:
        found += _block_cases(big)
    for wrapper, logits, made in (
        (FLAT, FLAT, _flat_cases),
        (FLAT_PICKS, FLAT, _flat_cases),
        (PAGED, PAGED, _paged_cases),
        (PAGED_PICKS, PAGED, _paged_cases),
    ):
        if wrapper in wrappers:  # without logits to compare with, sums have to be exact
            found += made(wrapper, big, "normal" if logits in wrappers else "whole")
    return [*found, *refused(LogitsFacts.of(spec), wrappers)]
