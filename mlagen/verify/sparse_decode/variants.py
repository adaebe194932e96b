"""Cases of sparse attention over a paged cache: compiled variants that no other case reaches, and positions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mlagen.verify.checks import out_rope, variants

if TYPE_CHECKING:
    from mlagen.verify.sparse_decode.cases import SparseDecodeCase, _Suite

ABSENT = "absent"


def position_cases(suite: _Suite) -> Iterator[SparseDecodeCase]:
    """Patterns of positions; none where attention does not rotate its output."""
    if not suite.facts.out_rope:
        return
    for pattern, (_, promise) in out_rope.PATTERNS.items():
        sizes: dict[str, Any] = {"positions": pattern, "requests": 4, "s_q": 2, "heads": suite.split_heads}
        name, every = f"positions: {pattern}", pattern in ("any", "outside")
        yield from suite.case(name, promise, every_target=every, **sizes)
        yield from suite.case(f"{name}, many heads", promise, **{**sizes, "requests": 1, "heads": 70})
        split: dict[str, Any] = {**sizes, "main": {"topk": 304}, "multiprocessors": 1000}
        yield from suite.case(f"{name}, split", promise, every_target=every, **split)
        none = {"indices": "some rows none"}
        yield from suite.case(f"{name}, empty rows", promise, main=none, extra=none, **sizes)


def quantised_cases(suite: _Suite) -> Iterator[SparseDecodeCase]:
    """Rows that sm90 kernels recompute in a single pass, with small tolerances; none without a quantised output."""
    if suite.facts.out_heads and suite.facts.dtype == "bfloat16":
        promise = "rows whose values are far apart are quantised as others are, logits all alike"
        wide: dict[str, Any] = {"contents": "wide", "indices": "full"}
        options: dict[str, Any] = {"scale": 2.0**-60, "requests": 2, "every_target": True}
        yield from suite.each_list("cache: scales far apart, logits alike", promise, wide, **options)


def variant_cases(suite: _Suite) -> Iterator[SparseDecodeCase]:
    """Small calls with and without each optional argument."""
    lengths = variants.choices(suite.facts.length, "random")
    sinks = variants.choices(suite.facts.sink, "random")
    seconds: list[str | None] = [ABSENT]
    if suite.has_extra:  # an absent second length means the first one, where both caches have one layout
        seconds = [*lengths, *([ABSENT] if len(set(suite.known.layouts)) > 1 else [])]
    for length, second, sink in itertools.product(lengths, seconds, sinks):
        yield from _cases(suite, length, second, sink, combines=(length, second) == (lengths[0], seconds[0]))


def _cases(
    suite: _Suite, length: str | None, second: str | None, sink: str | None, *, combines: bool
) -> Iterator[SparseDecodeCase]:
    said = {"lengths": length, "second lengths": second not in (None, ABSENT), "sink": sink}
    said["one cache"] = suite.has_extra and second == ABSENT
    suffix = "".join(f", {name}" for name, given in said.items() if given)

    def case(name: str, check: str, topk: int, *, odd: bool = False, **options: Any) -> Iterator[SparseDecodeCase]:
        lists: dict[str, Any] = {"cache": "odd" if odd else "end to end", "rows": 60}
        if suite.has_extra:
            options["extra"] = {**lists, "topk": 16 if topk % 16 == 0 else 1}
            options["extra"]["length"] = None if second == ABSENT else second
        options |= {"main": {**lists, "topk": topk, "length": length}, "absent": second == ABSENT, "sink": sink}
        options |= {"requests": 1, "heads": 1, "out": "odd" if odd else None, "in_full": True}
        name = f"variants: {name}{', odd' if odd else ''}{suffix}"
        return suite.case(name, variants.PROMISES[check], check=check, **options)

    # Enough for two steps of the widest tile; and no multiple of 16, which takes the small ones.
    yield from case("tiles", variants.TILES, 144)
    yield from case("sm90", variants.TILES, 144, only_sm90=True, every_target=True)
    for odd in (False, True):
        yield from case("small", variants.SMALL, 33, odd=odd)
        if combines:
            yield from case("combine", variants.SPLITS, 511, odd=odd)  # a small step has 16 indices
