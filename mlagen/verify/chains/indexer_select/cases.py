"""The cases of wrappers that score and select: plain data, made from a spec and from where it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlagen.verify.call.case import SM90, Case
from mlagen.verify.chains.indexer_select.invalid import BLOCKS, FLAT, PAGED, SHORT, refused
from mlagen.verify.mqa_logits.cases import RANGES, FlatCase, PagedCase
from mlagen.verify.mqa_logits.facts import LogitsFacts


@dataclass(frozen=True)
class PickCase(Case):
    """A call that scores and selects.

    Attributes:
        wrapper: the wrapper called.
        scored: the same call for only its logits.
        k: how many are picked.
        gives: results besides indices that are asked for: "scores", "slots".
        out: layout in memory of the results, a key of mlagen.verify.call.memory.LAYOUTS; empty: the wrapper's own.
        own_table: slots go through a page table of their own, with pages of so many slots; 0: that of the keys.
        mapped: row_to_batch is passed.
        room: tokens, or requests, that the call holds logits of at once; None: as the package has it.
        kept: candidate blocks that the call keeps as well; 0: not asked for.
    """

    wrapper: str
    scored: FlatCase | PagedCase
    k: int = 40
    gives: tuple[str, ...] = ("scores",)
    out: str = "contiguous"
    own_table: int = 0
    mapped: bool = False
    room: int | None = None
    kept: int = 0

    @property
    def kernels(self) -> tuple[str, ...]:
        """The sm90 kernel."""
        return (SM90,)


def _flat_cases(big: bool) -> Iterator[PickCase]:
    scored = FlatCase("", "", "", tokens=130, keys=5000) if big else FlatCase("", "", "", tokens=5, keys=300)
    base = PickCase("", "", FLAT, scored, 512 if big else 40)

    def case(name: str, promise: str, more: Mapping[str, Any] | None = None, **changes: Any) -> PickCase:
        call = replace(scored, **{"clean": False, **(more or {})})
        return replace(base, name=f"{SHORT[FLAT]}: {name}", promise=promise, scored=call, **changes)

    yield case("typical", "the best keys of the package's logits are picked", every_target=True)
    yield case("exact", "where sums are exact, the best of float64 logits are picked", {"contents": "whole"})
    for ranges, promise in RANGES.items():
        yield case(f"ranges: {ranges}", promise, {"ranges": ranges, "contents": "whole"})
    for k in (1, 299, 300, 4096):
        yield case(f"k: {k}", "any number of picks, more than the range has too", {"tokens": 3}, k=k)
    for tokens in (0, 1, 33):
        yield case(f"tokens: {tokens}", "any number of query tokens", {"tokens": tokens})
    for keys in (0, 1, 129):
        yield case(f"keys: {keys}", "any number of keys", {"keys": keys, "ranges": "whole", "tokens": 3})
    yield case("contents: NaN", "NaN is never picked", {"nan": True, "ranges": "odd"}, k=300)
    for room in (1, 3, 4) + ((16, 48, 129) if big else ()):
        promise = "in pieces a call picks what it picks at once"
        yield case(f"pieces: {room}", promise, {"ranges": "odd"}, room=room, gives=("scores", "slots"))
    slots: Mapping[str, Any] = {"gives": ("slots",), "own_table": 64}
    yield case("slots", "slots of the picks, by each token's own pages", **slots)
    yield case("slots: mapped", "by the pages of each token's request", **slots, mapped=True, room=2)
    yield case("slots: page of one", "of any page size", gives=("slots", "scores"), own_table=1)
    for layout in ("slice", "odd"):
        yield case(f"layout: q {layout}", "rows of q may lie apart", {"q": layout}, room=2)
        promise = "results go to the tensors that are passed, and nowhere else"
        yield case(f"out: {layout}", promise, out=layout, gives=("scores", "slots"), own_table=7, k=33, room=2)
    yield case("own results", "a tensor of the wrapper's own", out="", gives=())
    yield case("workspace", "logits go through a given workspace, whose size changes no bit", check="workspace")
    yield case("again", "two calls give the same bits", check="determinism")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")
    if big:
        yield case("contract: graph", "a captured call replays on other ranges", check="graph")
        yield case("contract: graph, pieces", "so does one in pieces", check="graph", room=48)
        many = {"tokens": 2050, "keys": 9000}
        yield case("large", "a prefill", {**many, "contents": "whole"}, k=2048)
        yield case("large: pieces", "a prefill in pieces", many, k=2048, room=512)


def _paged_cases(big: bool) -> Iterator[PickCase]:
    lengths = (1300, 1, 9000, 64, 0, 4097) if big else (130, 1, 300, 0)
    scored = PagedCase("", "", "", lengths)
    base = PickCase("", "", PAGED, scored, 512 if big else 40)

    def case(name: str, promise: str, more: Mapping[str, Any] | None = None, **changes: Any) -> PickCase:
        call = replace(scored, **(more or {}))
        return replace(base, name=f"{SHORT[PAGED]}: {name}", promise=promise, scored=call, **changes)

    yield case("typical", "the best keys of the package's logits are picked", every_target=True)
    yield case("exact", "where sums are exact, the best of float64 logits are picked", {"contents": "whole"})
    for next_n in (2, 3, 8):
        for tokenwise in (False, True):
            promise = "a token picks of its own keys"
            how = {"next_n": next_n, "tokenwise": tokenwise, "contents": "whole"}
            name = f"next_n: {next_n}{', tokenwise' if tokenwise else ''}"
            yield case(name, promise, how)
            yield case(f"{name}, pieces", promise, how, room=1, gives=("scores", "slots"), mapped=True)
    yield case("tokenwise", "lengths may have a dimension of one token", {"tokenwise": True}, room=2)
    for size in (1, 53, 128):
        yield case(
            f"block size: {size}", "any block size", {"block_size": size, "lengths": lengths[:3]}, gives=("slots",)
        )
    yield case("lengths: none", "no request has keys", {"lengths": (0, 0, 0)})
    yield case("lengths: few of many tokens", "fewer keys than query tokens", {"lengths": (1, 2, 3), "next_n": 4})
    yield case("lengths: past max_context_len", "keys past it are left out", {"columns": -50})
    yield case(
        "lengths: past the block table", "keys past it are left out", {"columns": 5000, "lengths": (130, 64)}, k=200
    )
    yield case("lengths: negative", "a negative length is an empty one", {"lengths": (-5, 70, -(2**31))})
    yield case("requests: none", "an empty batch gives an empty result", {"lengths": ()})
    yield case(
        "requests: many", "more of them than a piece holds", {"lengths": tuple(n * 3 % 70 for n in range(12))}, room=5
    )
    yield case("contents: NaN", "NaN is never picked", {"nan": True, "next_n": 2}, k=300)
    for room in (1, 2, 3):
        promise = "in pieces a call picks what it picks at once"
        yield case(f"pieces: {room}", promise, room=room, gives=("scores", "slots"))
    yield case("slots: own table", "slots by another page table", gives=("slots",), own_table=7)
    yield case("slots: mapped", "of the request that row_to_batch names", gives=("slots",), mapped=True, room=2)
    for layout in ("slice", "odd"):
        promise = "results go to the tensors that are passed, and nowhere else"
        yield case(f"out: {layout}", promise, out=layout, gives=("scores", "slots"), k=33, room=2)
    yield case("own results", "a tensor of the wrapper's own", out="", gives=())
    yield case("workspace", "logits go through a given workspace, whose size changes no bit", check="workspace")
    yield case("again", "two calls give the same bits", check="determinism")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")
    if big:
        yield case("contract: graph", "a captured call replays on other lengths", check="graph")
        yield case("contract: graph, pieces", "so does one in pieces", check="graph", room=2)
        yield case("large", "long requests", {"lengths": (131072, 70001, 5), "contents": "whole"}, k=2048)


def _block_cases(wrapper: str, big: bool) -> Iterator[PickCase]:
    """Cases of calls that keep candidate blocks as well."""
    tokens, keys = (130, 5000) if big else (5, 300)
    scored: FlatCase | PagedCase = FlatCase("", "", "", tokens, keys, "odd", clean=False)
    if wrapper == PAGED:
        scored = PagedCase("", "", "", (1300, 1, 9000, 64, 0, 4097) if big else (130, 1, 300, 0))
    base = PickCase("", "", wrapper, scored, 512 if big else 40, kept=300 if big else 12)

    def case(name: str, promise: str, more: Mapping[str, Any] | None = None, **changes: Any) -> PickCase:
        call = replace(scored, **(more or {}))
        return replace(base, name=f"{SHORT[wrapper]}: blocks: {name}", promise=promise, scored=call, **changes)

    yield case("typical", "a call keeps the best blocks of its logits", every_target=True)
    yield case("ties", "of equal blocks the first are kept", {"contents": "whole"}, kept=7)
    yield case("more than there are", "rows of few blocks keep them all", kept=2000)
    yield case("NaN", "NaN never counts", {"nan": True})
    for room in (1, 3):
        yield case(f"pieces: {room}", "in pieces a call keeps what it keeps at once", room=room)
    for layout in ("slice", "odd"):
        yield case(f"out: {layout}", "blocks go to the tensors that are passed, and nowhere else", out=layout, room=2)
    if wrapper == PAGED:
        for next_n, tokenwise in ((3, False), (6, False), (2, True)):
            how = {"next_n": next_n, "tokenwise": tokenwise}
            promise = "a token keeps blocks of its own keys"
            yield case(f"next_n: {next_n}{', tokenwise' if tokenwise else ''}", promise, how, room=1)
    if big:
        yield case("graph", "a captured call replays on other ranges", check="graph")


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of the family; see `mlagen.verify.families.cases`."""
    facts, big, found = LogitsFacts.of(spec), device == "cuda", list[Case]()
    wrappers = [name for name in SHORT if name in spec["wrappers"]]
    if facts is None or not wrappers:
        return []
    if FLAT in wrappers:
        found += _flat_cases(big)
    if PAGED in wrappers:
        found += _paged_cases(big)
    if BLOCKS in spec["wrappers"]:
        found += [case for wrapper in wrappers for case in _block_cases(wrapper, big)]
    return [*found, *refused(facts, wrappers, keeps_blocks=BLOCKS in spec["wrappers"])]
