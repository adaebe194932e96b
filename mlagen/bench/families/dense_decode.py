"""Dense decode over a paged cache, FlashMLA's interface without indices: the family `dense_decode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from mlagen.bench.check import Reference, attention, error_limit, row_limit
from mlagen.bench.families.cache import block_size_of, fill_with, sides_of
from mlagen.bench.measure import GRAPH_BELOW_S
from mlagen.bench.package import BenchPackage
from mlagen.bench.roofline import Roof
from mlagen.bench.shapes import TENSOR_SCALE, default_heads, empty_cache, rows_of, sets_needed, shuffled_pages, slots_of
from mlagen.bench.trial import BATCH_INVARIANT, OURS, Call, Entrant, Family, Setting, Trial
from mlagen.layout import CacheLayout
from mlagen.layout.codec import read
from mlagen.work import INDEX_BYTES, attention_bytes, flops

WRAPPER = "flash_mla_with_kvcache"
# Requests, query tokens of each, most cached tokens of each, and how many of those they have.
CASES: tuple[tuple[int, int, int, Literal["equal", "random"]], ...] = (
    (1, 1, 4 << 10, "equal"),
    (1, 1, 32 << 10, "equal"),
    (16, 1, 4 << 10, "equal"),
    (64, 1, 4 << 10, "equal"),
    (128, 1, 32 << 10, "equal"),
    (128, 2, 32 << 10, "equal"),
    (16, 1, 4 << 10, "random"),
    (128, 1, 32 << 10, "random"),
)
TUNED_REQUESTS = (1, 16, 64, 128)
TUNED_QUERIES = 2  # tokens a request, where rows are more than the model's heads
TUNED_CONTEXTS = (4 << 10, 32 << 10)  # cached tokens of a request, up to MANY_REQUESTS and above
MANY_REQUESTS = 64
TUNED_CACHES = 8  # that a device must have room for: two input sets of two shapes, as much again besides
SEED = 0  # of random lengths, which every run draws alike
EAGER_TOKENS = 1
# P of e4m3 costs 0.5e-2 to 1.4e-2 over some thousand keys, and more over few.
E4M3_P_ERROR_LIMIT = 3.2e-2
Q_SCALE = 2.0**-5  # of a q of e4m3


@dataclass(frozen=True)
class DenseDecodeShape:
    """Sizes of one call.

    Attributes:
        requests: of the batch.
        s_q: query tokens a request.
        num_heads: query heads.
        context: most cached tokens of a request.
        lengths: `equal`: every request has `context` tokens; `random`: 1 to `context` of them, uniform.
        q: dtype of q, the `model`'s or `e4m3`.
    """

    requests: int
    s_q: int
    num_heads: int
    context: int
    lengths: Literal["equal", "random"]
    q: Literal["model", "e4m3"] = "model"

    @property
    def kind(self) -> str:
        """The one table of these shapes."""
        return "dense_decode"

    @property
    def family(self) -> str:
        """The one family of these shapes."""
        return "dense_decode"

    @property
    def tokens(self) -> int:
        """Query tokens of the call."""
        return self.requests * self.s_q

    def __str__(self) -> str:
        keys = f"{self.context >> 10}K" if self.context % 1024 == 0 else str(self.context)
        keys = keys if self.lengths == "equal" else f"1 to {keys}"
        q = "" if self.q == "model" else f", q {self.q}"
        return f"{self.kind} {self.requests} x {self.s_q} x h{self.num_heads}, kv {keys}{q}"

    def cached_tokens(self) -> torch.Tensor:
        """Cached tokens of each request, i64 [requests], the same at every call."""
        if self.lengths == "equal":
            return torch.full((self.requests,), self.context)
        generator = torch.Generator().manual_seed(SEED)
        return torch.randint(1, self.context + 1, (self.requests,), generator=generator)

    def flops(self, d_qk: int, d_v: int, window: int | None) -> int:
        """FLOPs of a call. Its query tokens see no key behind their own, and at most `window` of those before."""
        own = torch.arange(self.s_q) - self.s_q + 1  # [s_q]
        pairs = (self.cached_tokens()[:, None] + own).clamp(0, window)  # [requests, s_q]
        return flops(1, self.num_heads, int(pairs.sum()), d_qk, d_v)

    def bytes_moved(self, d_qk: int, d_v: int, window: int | None, layout: CacheLayout, block_size: int) -> int:
        """Fewest bytes of a call: q, out, the rows that a request's tokens see and the pages' numbers, each once."""
        rows = self.cached_tokens().clamp(0, None if window is None else window + self.s_q - 1)
        pages = (rows + block_size - 1) // block_size
        kv_bytes = int(rows.sum()) * layout.row_bytes + int(pages.sum()) * INDEX_BYTES
        return attention_bytes(self.tokens, self.num_heads, 0, d_qk, d_v, kv_bytes)


@dataclass(frozen=True)
class DenseDecodeInputs:
    """Tensors of one call.

    Attributes:
        q: [requests, s_q, num_heads, d_qk] in the model's dtype.
        q_e4m3: where the call's q is e4m3: the same numbers over Q_SCALE.
        layout: of the cache.
        block_size: tokens a page.
        pages: uint8 [pages, page_bytes], which all input sets share.
        block_table: i32 [requests, pages of a request], in no order.
        lengths: i32 [requests], cached tokens.
        context: most of them.
        d_v: columns of V.
        sm_scale: factor of the logits.
        window: keys that a query token sees; None: all.
        k_scale: f32 [1], the cache's scale, if its layout has one a tensor.
    """

    q: torch.Tensor
    layout: CacheLayout
    block_size: int
    pages: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    context: int
    d_v: int
    sm_scale: float
    window: int | None
    k_scale: torch.Tensor
    q_e4m3: torch.Tensor | None = None

    @property
    def causal(self) -> bool:
        """Whether query tokens see different keys."""
        return self.q.shape[1] > 1

    @property
    def cache(self) -> torch.Tensor:
        """The cache as FlashMLA's callers hold it, [pages, block_size, 1, row]."""
        return rows_of(self.layout, self.pages, self.block_size, self.q.dtype)[:, :, None]

    def rows(self, request: int) -> torch.Tensor:
        """Cached rows of a request, fp32 [keys, columns]."""
        slots = slots_of(self.block_table[request], int(self.lengths[request]), self.block_size)
        return read(self.layout, self.pages, self.block_size, slots, TENSOR_SCALE)


def window_of(package: BenchPackage) -> int | None:
    """Keys that a query token of a package sees; None: all."""
    return package.attention_spec.get("window")


def dense_decode_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[DenseDecodeShape]:
    """Shapes that a package's dense attention is measured at: by default the model's heads, and a small rank's."""
    if not package.has(WRAPPER) or package.facts.kind != "dense":
        return []
    if heads is None:
        counts = default_heads(package.facts.num_heads)
        heads = sorted({counts[0], counts[-1]}, reverse=True)
    return [
        DenseDecodeShape(requests, s_q, num_heads, context, lengths, q)
        for q in (("model", "e4m3") if takes_e4m3(package) else ("model",))
        for num_heads in heads
        for requests, s_q, context, lengths in CASES
    ]


def takes_e4m3(package: BenchPackage) -> bool:
    """Whether a package's dense attention takes a q of e4m3, with a scale of its own."""
    return package.cached[0].tensor_scale


def tuned_shape(package: BenchPackage, requests: int, rows: int, memory: int) -> DenseDecodeShape:
    """The shape at which tiles of so many requests and rows a KV head are tuned, on a device of `memory` bytes."""
    s_q = 1 if rows <= package.facts.num_heads else TUNED_QUERIES
    short, long = TUNED_CONTEXTS
    room = TUNED_CACHES * requests * long * package.cached[0].row_bytes <= memory
    context = long if requests > MANY_REQUESTS and room else short
    return DenseDecodeShape(requests, s_q, rows // s_q, context, "equal")


def input_sets(work: int, moved: int, roof: Roof, l2_bytes: int) -> int:
    """Input sets of a call: one, where even at the roof it is too long for a graph and L2 is overwritten before it."""
    return 1 if roof.seconds(work, moved) >= GRAPH_BELOW_S else sets_needed(moved, l2_bytes)


def make_dense_decode_inputs(
    shape: DenseDecodeShape, package: BenchPackage, device: torch.device, sets: int
) -> list[DenseDecodeInputs]:
    """Input sets, standard normal, each with pages of its own; requests differ, lengths are those of all sets."""
    facts, layout, block_size = package.facts, package.cached[0], block_size_of(package)
    tables = shuffled_pages(sets, shape.requests, -(-shape.context // block_size), device=device)
    pages = empty_cache(layout, tables.numel(), block_size, device)
    fill_with(sides_of(package)[""], pages)
    lengths = shape.cached_tokens().to(device, torch.int32)
    size = (shape.requests, shape.s_q, shape.num_heads, facts.d_qk)
    queries = [torch.randn(size, dtype=package.dtype, device=device) for _ in tables]
    e4m3 = [(q / Q_SCALE).to(torch.float8_e4m3fn) if shape.q == "e4m3" else None for q in queries]
    return [
        DenseDecodeInputs(
            q=q if narrow is None else narrow.to(package.dtype) * Q_SCALE,
            q_e4m3=narrow,
            layout=layout,
            block_size=block_size,
            pages=pages,
            block_table=table,
            lengths=lengths,
            context=shape.context,
            d_v=facts.d_v,
            sm_scale=facts.d_qk**-0.5,
            window=window_of(package),
            k_scale=torch.full((1,), TENSOR_SCALE, device=device),
        )
        for table, q, narrow in zip(tables, queries, e4m3, strict=True)
    ]


def call_of(package: BenchPackage, inputs: DenseDecodeInputs, *, batch_invariant: bool = False) -> Call:
    """A call of the package's wrapper, which gives out [requests, s_q, num_heads, d_v]."""
    attention = package.wrapper(WRAPPER)
    metadata, _ = package.wrapper("get_mla_metadata")()
    options: dict[str, Any] = {
        "softmax_scale": inputs.sm_scale,
        "causal": inputs.causal,
        "is_fp8_kvcache": inputs.layout.quantised,
        "enable_batch_invariant": batch_invariant,
    }
    if inputs.layout.tensor_scale:
        options["k_scale"] = inputs.k_scale
    q = inputs.q
    if inputs.q_e4m3 is not None:
        q, options["q_scale"] = inputs.q_e4m3, torch.full((1,), Q_SCALE, device=q.device)
    arguments = (q, inputs.cache, inputs.block_table, inputs.lengths, inputs.d_v, metadata)
    return lambda: attention(*arguments, **options)[0]


def reference(inputs: DenseDecodeInputs, partials: str = "fp32") -> Reference:
    """Float64 results of one input set, for a package that stores its splits as `partials`."""
    return Reference(partial(_expected, inputs), row_limit(inputs.q.dtype, partials))


def _expected(inputs: DenseDecodeInputs) -> torch.Tensor:
    q = inputs.q  # [requests, s_q, num_heads, d_qk]
    s_q = q.shape[1]
    own = torch.arange(s_q, device=q.device)[:, None] - s_q + 1  # [s_q, 1]
    expected = torch.zeros(*q.shape[:3], inputs.d_v, dtype=torch.float64, device=q.device)
    for request, length in enumerate(inputs.lengths.tolist()):
        key = torch.arange(length, device=q.device)
        end = length + own  # of the keys that each query token sees
        seen = key < end if inputs.causal else key.expand(s_q, -1) < length
        if inputs.window is not None:
            seen &= key >= end - inputs.window
        arguments = (inputs.rows(request)[None], seen, inputs.sm_scale, inputs.d_v)
        expected[request] = attention(q[request], *arguments)
    return expected.flatten(0, 1)


def dense_decode_trials(setting: Setting) -> Callable[[DenseDecodeShape], Trial[DenseDecodeInputs]]:
    """Makes shapes of dense attention ready, each with a cache of its own."""
    package = setting.package
    facts, layout, window = package.facts, package.cached[0], window_of(package)

    def trial(shape: DenseDecodeShape) -> Trial[DenseDecodeInputs]:
        work = shape.flops(facts.d_qk, facts.d_v, window)
        moved = shape.bytes_moved(facts.d_qk, facts.d_v, window, layout, block_size_of(package))
        sets = input_sets(work, moved, setting.roof, setting.l2_bytes)
        inputs = make_dense_decode_inputs(shape, package, setting.device, sets)
        limit = E4M3_P_ERROR_LIMIT if package.attention_spec.get("products") == "fp8" else None
        return Trial(
            inputs=inputs,
            entrants=[
                Entrant(OURS, partial(call_of, package), error_limit=limit),
                Entrant(BATCH_INVARIANT, partial(call_of, package, batch_invariant=True), error_limit=limit),
            ],
            error_of=reference(inputs[0], package.facts.partials).error_of,
            error_limit=error_limit(package.dtype, package.facts.partials),
            flops=work,
            bytes_moved=moved,
            roof=setting.roof,
            launch_bound=shape.tokens <= EAGER_TOKENS,
        )

    return trial


BENCHMARKS = {"dense_decode": Family(dense_decode_shapes, dense_decode_trials, ("dense_decode",))}
