"""The cases of the indexer's logits: plain data, made from a spec and from where it runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlagen.verify.call.case import SM90, Case
from mlagen.verify.checks import variants
from mlagen.verify.mqa_logits.facts import FLAT, FLAT_PAIR, PAGED, PAGED_PAIR, SCHEDULE, LogitsFacts
from mlagen.verify.mqa_logits.invalid import SHORT, refused

RANGES = {
    "causal": "a token sees one key more than the one before",
    "context parallel": "ranges need not be in any order",
    "whole": "every token sees every key",
    "empty": "no token sees any key",
    "some empty": "tokens that see nothing stand between others, with a start behind the end too",
    "odd": "ranges begin and end anywhere",
    "beyond": "ranges are cut to the keys that there are, whatever int32 says",
    "one": "a token sees one key",
    "far apart": "blocks of keys that no token of a program sees lie between those that some do",
}


@dataclass(frozen=True)
class FlatCase(Case):
    """A call over flat keys.

    Attributes:
        wrapper: the wrapper called.
        tokens, keys: sizes.
        ranges: which keys tokens see, a key of RANGES.
        clean: clean_logits.
        compressed: max_seqlen_k; 0: not passed.
        bf16: bf16 logits.
        contents: of q and of the keys, "normal" or "codes".
        nan: keys that a token sees have NaN.
        q, weights, k: where they lie in memory, keys of mlagen.verify.call.memory.LAYOUTS.
        words: scales are int32 of four bytes, where they can be.
        positional: arguments by position.
        multiprocessors: that the call plans for; None: as many as there are.
    """

    wrapper: str
    tokens: int = 7
    keys: int = 300
    ranges: str = "causal"
    clean: bool = True
    compressed: int = 0
    bf16: bool = False
    contents: str = "normal"
    nan: bool = False
    q: str = "contiguous"
    weights: str = "contiguous"
    k: str = "contiguous"
    words: bool = False
    positional: bool = False
    multiprocessors: int | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        """The sm90 kernel."""
        return (SM90,)


@dataclass(frozen=True)
class PagedCase(Case):
    """A call over pages.

    Attributes:
        wrapper: the wrapper called.
        lengths: keys of each request.
        context_lens: lengths that the call is given; empty: those.
        next_n: query tokens a request.
        tokenwise: lengths of tokens, [B, next_n], not of requests.
        block_size: keys a page.
        memory: where pages lie, see mlagen.verify.call.memory.empty_pages.
        table: where the block table lies, and q, keys of mlagen.verify.call.memory.LAYOUTS.
        blocks: pattern of the block table: "garbage" past the keys, or "outside" the cache within them.
        columns: max_context_len beyond the longest request.
        ranges: num_sms.
        first_longer: the schedule is another one: its first ranges have a unit more, as in older versions of DeepGEMM.
        three: the cache has three dimensions.
        clean, bf16, contents, nan, q, weights, words, positional: as of `FlatCase`.
    """

    wrapper: str
    lengths: tuple[int, ...] = (130, 1, 300)
    context_lens: tuple[int, ...] = ()
    next_n: int = 1
    tokenwise: bool = False
    block_size: int = 64
    memory: str = "end to end"
    table: str = "slice"
    blocks: str = "garbage"
    columns: int = 5
    ranges: int = 4
    first_longer: bool = False
    three: bool = False
    clean: bool = False
    bf16: bool = False
    contents: str = "normal"
    nan: bool = False
    q: str = "contiguous"
    weights: str = "contiguous"
    words: bool = False
    positional: bool = False

    @property
    def kernels(self) -> tuple[str, ...]:
        """The sm90 kernel."""
        return (SM90,)


@dataclass(frozen=True)
class ScheduleCase(Case):
    """A call of get_paged_mqa_logits_metadata.

    Attributes:
        lengths: keys of each request.
        next_n: tokens of [B, next_n] lengths; 0: [B].
        ranges: num_sms.
        table: where the lengths lie.
    """

    lengths: tuple[int, ...] = (130, 1, 300)
    next_n: int = 0
    ranges: int = 4
    table: str = "slice"


def _flat_cases(wrapper: str, facts: LogitsFacts, big: bool) -> Iterator[FlatCase]:
    base = FlatCase("", "", wrapper, tokens=130, keys=5000) if big else FlatCase("", "", wrapper)

    def case(name: str, promise: str, **changes: Any) -> FlatCase:
        return replace(base, name=f"{SHORT[wrapper]}: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's logits, and -inf elsewhere", every_target=True)
    for ranges, promise in RANGES.items():
        yield case(f"ranges: {ranges}", promise, ranges=ranges)
        yield case(f"ranges: {ranges}, not clean", promise, ranges=ranges, clean=False)
        yield case(f"ranges: {ranges}, compressed", promise, ranges=ranges, clean=False, compressed=base.keys)
    yield case("compressed: short", "what is past max_seqlen_k is left out", clean=False, compressed=67, ranges="odd")
    yield case("compressed: one column", "a column", clean=False, compressed=1, ranges="odd")
    yield case("compressed: more columns than keys", "any number of them", clean=False, compressed=base.keys + 333)
    for tokens in (0, 1, 2, 3, 16, 33):
        yield case(f"tokens: {tokens}", "any number of query tokens", tokens=tokens)
    for keys in (0, 1, 31, 127, 128, 129, 256, 1000):
        yield case(f"keys: {keys}", "any number of keys", keys=keys, ranges="whole")
    for multiprocessors in (1, 3, 1000):
        promise = "however many programs share the keys, each is scored once"
        for ranges in ("odd", "far apart"):
            changes = {"multiprocessors": multiprocessors, "ranges": ranges, "keys": 900}
            yield case(f"splits: {multiprocessors} multiprocessors, {ranges}", promise, **changes)
    promise = "every stage of shared memory is used again"
    for name, tokens, keys in (("long", 13, 1700), ("many tokens", 40, 200)):
        one = {"tokens": tokens, "keys": keys, "multiprocessors": 1}
        yield case(name, promise, **one, only_sm90=True, every_target=True)
    codes = {"contents": "codes", "tokens": 3}
    yield case("contents: any codes", "every code and scale has its value", **codes, every_target=True)
    yield case("contents: NaN", "NaN of what a token sees gives NaN, and nothing else does", nan=True, ranges="odd")
    for part in ("q", "weights", "k"):
        for layout in ("slice", "odd", "far"):
            changes = {part: layout} | ({"tokens": 3, "keys": 3} if layout == "far" else {})
            yield case(f"layout: {part} {layout}", f"rows of {part} may lie apart, 2^31 elements too", **changes)
    yield case("layout: q transposed", "heads may come before tokens", q="transposed")
    if wrapper == FLAT_PAIR:
        yield case("bf16 logits", "the nearest bf16", bf16=True, every_target=True)
        yield case("bf16 logits: compressed", "the nearest bf16", bf16=True, clean=False, compressed=base.keys, q="odd")
    if facts.packed and facts.scales.count == 4:
        yield case("scales: words", "scales may be int32 of four bytes", words=True)
    yield case("by position", "arguments go by position, as engines pass them", positional=True)
    yield case("contract: determinism", "two calls give the same bits", check="determinism")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")
    if big:
        yield case("contract: graph", "a captured call replays on new inputs", check="graph")
        promise = "offsets of the logits are 64 bits wide"
        yield case("offsets: logits past 2^31", promise, tokens=33_000, keys=66_000, clean=False, check="sampled")
        yield case("large: many tokens and keys", "a prefill", tokens=2050, keys=9000, check="sampled")


def _paged_cases(wrapper: str, facts: LogitsFacts, big: bool) -> Iterator[PagedCase]:
    lengths = (1300, 1, 9000, 64, 0, 4097) if big else (130, 1, 300, 64, 0, 129)
    base = PagedCase("", "", wrapper, lengths)

    def case(name: str, promise: str, **changes: Any) -> PagedCase:
        return replace(base, name=f"{SHORT[wrapper]}: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's logits", every_target=True)
    promise = "every stage of shared memory is used again"
    yield case("long", promise, lengths=(3000, 3000, *12 * (70,)), only_sm90=True, every_target=True)
    yield from _paged_tokens(case)
    yield from _paged_variants(replace(base, lengths=(70,)))
    for size in (1, 2, 16, 53, 64, 128, 256):
        yield case(f"block size: {size}", "any block size", block_size=size)
    for memory in ("page gap", "odd", "idle", "far"):
        pages = {"lengths": (100, 130)} if memory == "far" else {}
        yield case(f"cache: {memory}", "pages may lie apart, 2^31 bytes too", memory=memory, **pages)
    yield case("cache: three dimensions", "keys have no dimension of heads", three=True)
    yield from _paged_lengths(case)
    yield from _paged_shares(case)
    yield case("blocks: outside", "a key in no page of the cache is -inf, and nothing is read", blocks="outside")
    yield case("contents: any codes", "every code and scale has its value", contents="codes", every_target=True)
    yield case("contents: NaN", "NaN of what a token sees gives NaN, and nothing else does", nan=True, next_n=2)
    for part in ("q", "weights", "table"):
        for layout in ("slice", "odd"):
            yield case(f"layout: {part} {layout}", f"rows of {part} may lie apart", **{part: layout}, next_n=2)
    if wrapper == PAGED_PAIR:
        yield case("bf16 logits", "the nearest bf16", bf16=True, every_target=True)
        yield case("bf16 logits: page of one", "the nearest bf16", bf16=True, block_size=1, next_n=2)
    if facts.packed and facts.scales.count == 4:
        yield case("scales: words", "scales may be int32 of four bytes", words=True)
    yield case("by position", "arguments go by position, as engines pass them", positional=True)
    yield case("contract: determinism", "two calls give the same bits", check="determinism")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")
    if big:
        yield case("contract: graph", "a captured call replays on other lengths", check="graph")


def _paged_tokens(case: Callable[..., PagedCase]) -> Iterator[PagedCase]:
    """Query tokens of a request: fewer than a query block has, as many, and more."""
    for next_n in (1, 2, 3, 8):
        for tokenwise in (False, True):
            how = ", tokenwise" if tokenwise else ""
            promise = "a token sees its own keys: as many as its length says, or all but those of the tokens behind it"
            changes = {"next_n": next_n, "tokenwise": tokenwise}
            yield case(f"next_n: {next_n}{how}", promise, **changes, every_target=next_n in (2, 3))
            yield case(f"next_n: {next_n}{how}, clean", f"{promise}; the others are -inf", **changes, clean=True)
    for next_n in (8, 16):
        promise = "every query block of a request sees its keys"
        yield case(f"query blocks: next_n {next_n}", promise, lengths=(130, 0, 70), next_n=next_n, every_target=True)


def _paged_lengths(case: Callable[..., PagedCase]) -> Iterator[PagedCase]:
    """Lengths of no keys, of fewer than none, and of more than a row of logits has."""
    yield case("lengths: none", "no request has keys", lengths=(0, 0, 0))
    yield case("lengths: none, clean", "all is -inf", lengths=(0, 0, 0), clean=True)
    yield case("lengths: padded", "requests without keys come last, as graphs pad", lengths=(200, 90) + 30 * (0,))
    yield case("lengths: few of many tokens", "fewer keys than query tokens", lengths=(1, 2, 3), next_n=8)
    yield case("lengths: past max_context_len", "logits stay in their row", columns=-50)
    yield case("lengths: negative", "a negative length is an empty one", lengths=(-5, 70, -(2**31)), clean=True)
    least = {"lengths": (-(2**31), 70, 1 - 2**31), "next_n": 3}
    yield case("lengths: least of several tokens", "a negative length is an empty one, whatever int32 says", **least)
    promise = "a length past max_context_len takes no key of the other requests, however many ranges there are"
    most = ((2**31 - 1, 4), (2**31 - 64, 4), (2**31 - 4095, 4), (2**31 - 4095, 132))
    for next_n, (largest, ranges) in itertools.product((1, 3), most):
        changes = {"lengths": (100, 300, 70), "context_lens": (100, largest, 70), "columns": 0}
        name = f"lengths: {largest}, next_n {next_n}, ranges {ranges}"
        yield case(name, promise, **changes, next_n=next_n, ranges=ranges)


def _paged_shares(case: Callable[..., PagedCase]) -> Iterator[PagedCase]:
    """Batches and schedules: how keys are shared out."""
    yield case("requests: none", "an empty batch gives an empty result", lengths=())
    yield case("requests: one", "a batch of one is shared out", lengths=(1111,), ranges=132)
    yield case("requests: many", "more requests than a program looks at", lengths=tuple(n % 7 for n in range(300)))
    for ranges in (1, 2, 7, 132):
        yield case(f"ranges: {ranges}", "however keys are shared out, each is scored once", ranges=ranges)
        yield case(f"ranges: {ranges}, next_n 3", "so they are with more tokens", ranges=ranges, next_n=3)
    promise = "a range may have more pages than a program reads of a block table at a time"
    long = {"lengths": (9000, 300), "ranges": 1, "only_sm90": True, "every_target": True}
    yield case("ranges: one of many pages", promise, **long)
    promise = "a schedule may cut the units into other ranges"
    for next_n in (1, 2):
        changes = {"lengths": (700, 0, 65, 900, 1, 0, 0), "ranges": 5, "next_n": next_n, "first_longer": True}
        yield case(f"schedule: first ranges longer, next_n {next_n}", promise, **changes)


def _paged_variants(base: PagedCase) -> Iterator[PagedCase]:
    dtypes = (False, True) if base.wrapper == PAGED_PAIR else (False,)  # whether logits are bf16
    for next_n, layout, bf16 in itertools.product((1, 2, 4, 8, 16), ("contiguous", "odd"), dtypes):
        options: dict[str, Any] = {
            "next_n": next_n,
            "q": layout,
            "bf16": bf16,
            "check": variants.TARGETS,
            "in_full": True,
        }
        name = f"{SHORT[base.wrapper]}: variants: {layout}, next_n {next_n}{', bf16' if bf16 else ''}"
        yield replace(base, name=name, promise=variants.PROMISES[variants.TARGETS], **options)


def _schedule_cases(big: bool) -> Iterator[ScheduleCase]:
    base = ScheduleCase("", "")

    def case(name: str, **changes: Any) -> ScheduleCase:
        promise = "ranges are equal to a KV block, and together they are every request's keys"
        return replace(base, name=f"{SHORT[SCHEDULE]}: {name}", promise=promise, **changes)

    yield case("typical")
    for ranges in (1, 15, 16, 132, 148):
        yield case(f"ranges: {ranges}", ranges=ranges, lengths=(700, 0, 65, 64, 1, 5000, 0, 0))
    yield case("tokenwise", next_n=3, lengths=(700, 1, 0, 65, 258, 5000))
    yield case("lengths: none", lengths=(0, 0))
    yield case("lengths: negative", lengths=(-9, 400, -(2**31)))
    yield case("lengths: large", lengths=(2**30, 1, 2**30 + 63, 2**31 - 64), ranges=132)
    for largest in (2**31 - 1, 2**31 - 63, 2**31 - 4095):
        yield case(f"lengths: {largest}", lengths=(100, largest, 70), ranges=132)
    yield case("lengths: many of the largest", lengths=300 * (2**31 - 1,), ranges=132)
    yield case("requests: none", lengths=())
    yield case("requests: many", lengths=tuple(37 * n % 900 for n in range(1000)), ranges=132)
    yield case("requests: padded", lengths=(300, 200) + 600 * (0,), ranges=132)
    yield case("contract: torch's defaults", check="defaults")
    if big:
        yield case("requests: very many", lengths=tuple(37 * n % 9000 for n in range(8192)), ranges=132)
        yield case("contract: graph", check="graph")


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of the family; see `mlagen.verify.families.cases`."""
    facts = LogitsFacts.of(spec)
    if facts is None:
        return []
    big, found = device == "cuda", list[Case]()
    for wrapper in facts.wrappers:
        if wrapper in (FLAT, FLAT_PAIR):
            found += _flat_cases(wrapper, facts, big)
        elif wrapper in (PAGED, PAGED_PAIR):
            found += _paged_cases(wrapper, facts, big)
        else:
            found += _schedule_cases(big)
    return [*found, *refused(facts)]
