"""Changes of the cases of sparse attention over a paged cache for a q of e4m3, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlagen.verify.call.patterns import INDEX_PROMISES
from mlagen.verify.sparse_decode.facts import CacheFacts

Setting = tuple[str, str, dict[str, Any]]  # a name, the promise, and changes of the suite's usual problem


def settings(known: CacheFacts, split_heads: int, *, big: bool) -> Iterator[Setting]:
    """The settings of all cases.

    Args:
        known: of the package.
        split_heads: heads of a call in splits.
        big: a GPU runs them.
    """
    yield from _sizes(known, big=big)
    yield from _rows_and_indices()
    yield from _numbers()
    yield from _splits(known, split_heads)
    promise = "two calls give the same bits"
    split: dict[str, Any] = {"heads": split_heads, "main": {"topk": 304}, "multiprocessors": 1000}
    yield "q, same bits twice", promise, {"check": "determinism"}
    yield "q, same bits twice, split", promise, {"check": "determinism", **split}
    if big:
        yield "q, graph", "a captured call replays on new inputs", {"check": "graph"}


def _sizes(known: CacheFacts, *, big: bool) -> Iterator[Setting]:
    promise = "q may be of e4m3, with its scale"
    topk = known.topks[0] if big else 112
    for heads, s_q in ((3, 1), (16, 1), (70, 2), (128, 1)):
        sizes = {"heads": heads, "s_q": s_q, "requests": 40 if big else 1, "main": {"topk": topk, "rows": 9999}}
        yield f"q, {heads} heads, s_q {s_q}", promise, {"every_target": heads == 16, **sizes}
    for count in (1, 17, 65, 301):
        yield f"q, topk {count}", promise, {"heads": 5, "requests": 2, "main": {"topk": count}}
    for layout in ("slice", "transposed", "odd", "by position"):
        yield f"q {layout}", promise, {"q": layout, "heads": 6, "requests": 2, "s_q": 2, "main": {"topk": 48}}


def _rows_and_indices() -> Iterator[Setting]:
    for size, layout in ((53, "end to end"), (16, "far"), (5, "row gap")):
        rows = {"topk": 48, "block_size": size, "cache": layout}
        yield f"q, pages of {size}, {layout}", "rows may lie anywhere", {"heads": 6, "requests": 2, "main": rows}
    for pattern, promise in INDEX_PROMISES.items():
        yield f"q, indices {pattern}", promise, {"main": {"indices": pattern}, "requests": 2}
    changes = {"contents": "any", "indices": "full", "poison": 0x7F}
    yield "q, any codes", "a row is its codes times its scale", {"main": changes}


def _numbers() -> Iterator[Setting]:
    promise = "the scales of q and of the logits may be any power of two"
    for exponent in (-100, -20, 10):
        scale = 2.0**-exponent if exponent > -100 else None
        yield f"scale of q 2^{exponent}", promise, {"q_scale": 2.0**exponent, "scale": scale, "requests": 2}
    yield "q, large logits", "a softmax that saturates stays finite", {"scale": 40.0, "requests": 2}
    yield "q, NaN", "NaN in q stays in its head", {"check": "nan", "s_q": 2}


def _splits(known: CacheFacts, split_heads: int) -> Iterator[Setting]:
    if known.facts.length != "none":
        lists: dict[str, Any] = {"main": {"topk": 304, "length": "mixed"}, "requests": 7, "heads": 3}
        sink = {} if known.facts.sink == "none" else {"sink": "mixed"}
        few = {"every_target": True, "multiprocessors": 3, **lists, **sink}
        yield "q, lengths", "lengths from 0 on, with a sink where there may be one", few
        if sink:
            lists |= sink
            yield "q, lengths and sink", "a sink, and lengths from 0 on", lists
        yield "q, lengths in splits", "the same in splits", {"multiprocessors": 10_000, **lists}
    split: dict[str, Any] = {"heads": split_heads, "main": {"topk": 304}, "multiprocessors": 1000}
    yield "q, in splits", "splits of a q of e4m3", {"requests": 2, **split}
    sizes = {"requests": 4, "heads": split_heads, "main": {"topk": 608, "rows": 999}}
    promise = "batch-invariant mode takes q of e4m3 too"
    yield "q, batch invariant", promise, {"batch_invariant": True, "check": "invariance", **sizes}
