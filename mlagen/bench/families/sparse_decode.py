"""Sparse decode over a paged cache, FlashMLA's interface: the family `sparse_decode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from mlagen.bench.check import Reference, attention, error_limit, in_chunks, row_limit
from mlagen.bench.families.cache import CacheSide, fill_with, second_side, sides_of
from mlagen.bench.package import BenchPackage
from mlagen.bench.rotation import ROTATED_APART, Angles, make_angles, rotate
from mlagen.bench.shapes import (
    L2_MULTIPLE,
    TENSOR_SCALE,
    default_heads,
    empty_cache,
    make_indices,
    rows_of,
    sets_needed,
    shuffled_pages,
)
from mlagen.bench.trial import BATCH_INVARIANT, OURS, Entrant, Family, Setting, Trial
from mlagen.layout import CacheLayout
from mlagen.layout.codec import read
from mlagen.verify.call.facts import Facts
from mlagen.work import attention_bytes, flops

WRAPPER = "flash_mla_with_kvcache"
BATCHES = (1, 16, 64, 128)
QUERIES = (1, 2)  # tokens a request, two where one is speculated
LEAST_HEADS = 64  # of a rank, by default; fewer are measured on request
CONTEXT = 32 << 10  # cached tokens of a request that top-k indices may name
WINDOW_CONTEXT = 1 << 10  # likewise of a window, which is a run of them
EAGER_TOKENS = 1
OURS_E4M3 = "ours, q of e4m3"
Q_SCALE = 2.0**-5  # of a q of e4m3


@dataclass(frozen=True)
class SparseDecodeShape:
    """Sizes of one call.

    Attributes:
        requests: of the batch.
        s_q: query tokens a request.
        num_heads: query heads.
        window: indices a token of the first cache, where there is a second one; otherwise 0.
        topk: indices a token of the only or of the second cache.
    """

    requests: int
    s_q: int
    num_heads: int
    window: int
    topk: int

    @property
    def kind(self) -> str:
        """The wrapper."""
        return WRAPPER

    @property
    def family(self) -> str:
        """Name of the family."""
        return "sparse_decode"

    @property
    def tokens(self) -> int:
        """Query tokens of the call."""
        return self.requests * self.s_q

    @property
    def keys(self) -> int:
        """Cached tokens that a query token attends to."""
        return self.window + self.topk

    def __str__(self) -> str:
        indices = f"{self.window} + {self.topk}" if self.window else f"topk {self.topk}"
        return f"{self.kind} {self.requests} x {self.s_q} x h{self.num_heads}, {indices}"

    def flops(self, facts: Facts) -> int:
        """FLOPs of a call."""
        return flops(self.tokens, self.num_heads, self.keys, facts.d_qk, facts.d_v)

    def bytes_moved(self, facts: Facts, layout: CacheLayout, extra: CacheLayout | None) -> int:
        """Fewest bytes of a call: every token names rows of its own."""
        first, second = (self.window, self.topk) if extra else (self.topk, 0)
        row_bytes = first * layout.row_bytes + (second * extra.row_bytes if extra else 0)
        return attention_bytes(self.tokens, self.num_heads, self.keys, facts.d_qk, facts.d_v, self.tokens * row_bytes)


@dataclass(frozen=True)
class Cached:
    """A paged cache and the indices of a call into it.

    Attributes:
        layout: its layout.
        block_size: tokens a page.
        pages: uint8 [pages, page_bytes], which all input sets share.
        indices: i32 [requests, s_q, count], slots.
    """

    layout: CacheLayout
    block_size: int
    pages: torch.Tensor
    indices: torch.Tensor

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        """The cache as FlashMLA's callers hold it, [pages, block_size, 1, row]."""
        return rows_of(self.layout, self.pages, self.block_size, dtype)[:, :, None]

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows in some slots, fp32 [*slots.shape, columns]; any row in an absent one's place."""
        found = read(self.layout, self.pages, self.block_size, slots.flatten().clamp(min=0), TENSOR_SCALE)
        return found.view(*slots.shape, -1)


@dataclass(frozen=True)
class SparseDecodeInputs:
    """Tensors of one call.

    Attributes:
        q: [requests, s_q, num_heads, d_qk]; if the package also takes e4m3, e4m3 numbers times Q_SCALE.
        main, extra: the caches.
        d_v: columns of V.
        sm_scale: factor of the logits.
        attn_sink: f32 [num_heads] where the spec requires one.
        topk_length, extra_topk_length: i32 [requests] where the spec requires them: all of the indices.
        k_scale: f32 [1], the cache's scale, if its layout has one a tensor.
        angles: positions and angles where attention rotates its output.
    """

    q: torch.Tensor
    main: Cached
    extra: Cached | None
    d_v: int
    sm_scale: float
    attn_sink: torch.Tensor | None
    topk_length: torch.Tensor | None
    extra_topk_length: torch.Tensor | None
    k_scale: torch.Tensor
    angles: Angles | None = None


def shape_at(package: BenchPackage, requests: int, s_q: int, num_heads: int) -> SparseDecodeShape:
    """A call of a package: the window in the first cache where there are two, topk tokens in the other."""
    window = int(package.attention_spec.get("window") or 0) if package.layouts[1] else 0
    return SparseDecodeShape(requests, s_q, num_heads, window, package.facts.topk)


def sparse_decode_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[SparseDecodeShape]:
    """Shapes that a package's attention over a cache is measured at; none if it quantises its output."""
    if package.facts.out_heads or not package.has(WRAPPER) or package.facts.kind != "sparse":
        return []
    facts = package.facts
    if heads is None:
        wide = [count for count in default_heads(facts.num_heads) if count >= LEAST_HEADS]
        heads = wide or [facts.num_heads]
    return [
        shape_at(package, requests, s_q, num_heads) for num_heads in heads for s_q in QUERIES for requests in BATCHES
    ]


def takes_e4m3(package: BenchPackage) -> bool:
    """Whether a q of e4m3 is multiplied as it is."""
    return package.attention_spec.get("products") == "mixed"


def call_of(
    package: BenchPackage, inputs: SparseDecodeInputs, *, batch_invariant: bool = False, e4m3: bool = False
) -> Callable[[], Any]:
    """A call of the package's wrapper, which gives out [requests, s_q, num_heads, d_v]; `e4m3`: with q as e4m3."""
    attention = package.wrapper(WRAPPER)
    metadata, _ = package.wrapper("get_mla_metadata")()
    main, extra = inputs.main, inputs.extra
    options: dict[str, Any] = {
        "softmax_scale": inputs.sm_scale,
        "is_fp8_kvcache": main.layout.quantised,
        "indices": main.indices,
        "enable_batch_invariant": batch_invariant,
    }
    if main.layout.tensor_scale:
        options["k_scale"] = inputs.k_scale
    if extra is not None:
        options["extra_k_cache"] = extra.view(inputs.q.dtype)
        options["extra_indices_in_kvcache"] = extra.indices
        if extra.layout.tensor_scale:
            options["extra_k_scale"] = inputs.k_scale
    for name in ("attn_sink", "topk_length", "extra_topk_length"):
        if getattr(inputs, name) is not None:
            options[name] = getattr(inputs, name)
    if inputs.angles is not None:
        options |= inputs.angles.arguments
    q = inputs.q
    if e4m3:
        q = (q / Q_SCALE).to(torch.float8_e4m3fn)
        options["q_scale"] = torch.full((1,), Q_SCALE, device=q.device)
    arguments = (q, main.view(inputs.q.dtype), None, None, inputs.d_v, metadata)
    return lambda: attention(*arguments, **options)[0]


def call_rotated_apart(package: BenchPackage, inputs: SparseDecodeInputs) -> Callable[[], Any]:
    """As `call_of` of an output that attention does not rotate, and a launch that does."""
    angles = inputs.angles
    assert angles is not None
    call = call_of(package, replace(inputs, angles=angles.nowhere))
    return lambda: rotate(call(), angles)


class Pool:
    """A cache of many contexts, pages in no order. Input sets take their indices from it.

    Args:
        side: the cache's side.
        contexts: how many.
        tokens: cached tokens of each.
        device: where it lies.
    """

    def __init__(self, side: CacheSide, contexts: int, tokens: int, device: torch.device) -> None:
        self.layout = side.layout
        self.block_size = side.block_size
        self.tokens = tokens
        self.tables = shuffled_pages(contexts, -(-tokens // side.block_size), device=device)
        self.pages = empty_cache(side.layout, self.tables.numel(), side.block_size, device)
        fill_with(side, self.pages)

    def cached(self, first: int, requests: int, s_q: int, count: int, *, window: bool) -> Cached:
        """Indices of a call into contexts `first` and following: a run of tokens, or any `count` in no order."""
        device = self.tables.device
        contexts = (first + torch.arange(requests, device=device)) % len(self.tables)  # [requests]
        if window:
            begin = torch.randint(0, self.tokens - s_q - count + 2, (requests, 1, 1), device=device)
            tokens = begin + torch.arange(s_q, device=device)[:, None] + torch.arange(count, device=device)
        else:
            tokens = make_indices(requests * s_q, count, self.tokens, device).view(requests, s_q, count).long()
        pages = self.tables[contexts[:, None, None], tokens // self.block_size]
        indices = (pages * self.block_size + tokens % self.block_size).int()
        indices[tokens < 0] = -1
        return Cached(self.layout, self.block_size, self.pages, indices)


def contexts_needed(row_bytes: int, tokens: int, l2_bytes: int, requests: int) -> int:
    """Contexts of a pool: one a request, and enough that they exceed L2 together."""
    return max(requests, -(-L2_MULTIPLE * l2_bytes // (tokens * row_bytes)))


class _Pools:
    def __init__(self, setting: Setting, most_requests: int) -> None:
        self.setting = setting
        self.package = setting.package
        self.most_requests = most_requests
        self.two = self.package.layouts[1] is not None

    def _pool(self, side: CacheSide, tokens: int) -> Pool:
        contexts = contexts_needed(side.layout.row_bytes, tokens, self.setting.l2_bytes, self.most_requests)
        return Pool(side, contexts, tokens, self.setting.device)

    @cached_property
    def main(self) -> Pool:
        return self._pool(sides_of(self.package)[""], WINDOW_CONTEXT if self.two else CONTEXT)

    @cached_property
    def extra(self) -> Pool | None:
        return self._pool(second_side(self.package), CONTEXT) if self.two else None

    def inputs(self, shape: SparseDecodeShape, number: int) -> SparseDecodeInputs:
        facts, device = self.package.facts, self.setting.device
        main_count, extra_count = (shape.window, shape.topk) if self.two else (shape.topk, 0)
        first = number * shape.requests
        extra = self.extra

        def lengths(count: int) -> torch.Tensor | None:
            if facts.length != "required" or not count:
                return None
            return torch.full((shape.requests,), count, dtype=torch.int32, device=device)

        q = torch.randn(
            (shape.requests, shape.s_q, shape.num_heads, facts.d_qk), dtype=self.package.dtype, device=device
        )
        if takes_e4m3(self.package):
            q = (q / Q_SCALE).to(torch.float8_e4m3fn).to(self.package.dtype) * Q_SCALE
        return SparseDecodeInputs(
            q=q,
            main=self.main.cached(first, shape.requests, shape.s_q, main_count, window=extra is not None),
            extra=None if extra is None else extra.cached(first, shape.requests, shape.s_q, extra_count, window=False),
            d_v=facts.d_v,
            sm_scale=facts.d_qk**-0.5,
            attn_sink=torch.randn(shape.num_heads, device=device) if facts.sink == "required" else None,
            topk_length=lengths(main_count),
            extra_topk_length=lengths(extra_count),
            k_scale=torch.full((1,), TENSOR_SCALE, device=device),
            angles=make_angles(facts, shape.tokens, device),
        )


def reference(inputs: SparseDecodeInputs, partials: str = "fp32") -> Reference:
    """Float64 results of one input set, for a package that stores its splits as `partials`."""
    return Reference(partial(_expected, inputs), row_limit(inputs.q.dtype, partials))


def _expected(inputs: SparseDecodeInputs) -> torch.Tensor:
    q = inputs.q.flatten(0, 1)  # [tokens, num_heads, d_qk]
    caches = [inputs.main, *([inputs.extra] if inputs.extra else [])]
    slots = [cached.indices.flatten(0, 1) for cached in caches]  # [tokens, count] each
    expected = torch.zeros(*q.shape[:2], inputs.d_v, dtype=torch.float64, device=q.device)
    keys = sum(each.shape[1] for each in slots)
    for some in in_chunks(len(q), keys * (2 * q.shape[2] + 3 * q.shape[1]) * expected.itemsize):
        kv = [cached.rows(each[some]) for cached, each in zip(caches, slots, strict=True)]
        seen = torch.cat([each[some] >= 0 for each in slots], 1)
        expected[some] = attention(q[some], torch.cat(kv, 1), seen, inputs.sm_scale, inputs.d_v, inputs.attn_sink)
    return expected if inputs.angles is None else inputs.angles.turned(expected)


def sparse_decode_trials(
    setting: Setting, most_requests: int = max(BATCHES)
) -> Callable[[SparseDecodeShape], Trial[SparseDecodeInputs]]:
    """Makes shapes of up to so many requests ready; they share one pool of contexts a cache."""
    package = setting.package
    pools = _Pools(setting, most_requests)

    def trial(shape: SparseDecodeShape) -> Trial[SparseDecodeInputs]:
        moved = shape.bytes_moved(package.facts, *package.cached)
        sets = sets_needed(moved, setting.l2_bytes)
        inputs = [pools.inputs(shape, number) for number in range(sets)]
        apart = [Entrant(ROTATED_APART, partial(call_rotated_apart, package))] if package.facts.out_rope else []
        e4m3 = [Entrant(OURS_E4M3, partial(call_of, package, e4m3=True))] if takes_e4m3(package) else []
        return Trial(
            inputs=inputs,
            entrants=[
                Entrant(OURS, partial(call_of, package)),
                Entrant(BATCH_INVARIANT, partial(call_of, package, batch_invariant=True)),
                *e4m3,
                *apart,
            ],
            error_of=reference(inputs[0], package.facts.partials).error_of,
            error_limit=error_limit(package.dtype, package.facts.partials),
            flops=shape.flops(package.facts),
            bytes_moved=moved,
            roof=setting.roof,
            graph_only=True,
            launch_bound=shape.tokens <= EAGER_TOKENS,
        )

    return trial


BENCHMARKS = {"sparse_decode": Family(sparse_decode_shapes, sparse_decode_trials, ("sparse_decode",))}
