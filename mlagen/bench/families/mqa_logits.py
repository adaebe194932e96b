"""Logits of the lightning indexer, over flat keys and over pages: the family `mqa_logits`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from mlagen.bench.check import in_chunks
from mlagen.bench.package import BenchPackage
from mlagen.bench.roofline import Roof
from mlagen.bench.shapes import BLOCK_SIZE, empty_cache, fill, rows_of, sets_needed, shuffled_pages, slots_of
from mlagen.bench.trial import OURS, Call, Entrant, Family, Setting, Trial
from mlagen.layout import CacheLayout, indexer_layout_of
from mlagen.layout.codec import decode, encode, read
from mlagen.work import logits_bytes, logits_flops

FLAT, PAGED, SCHEDULE = "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata"
FP8 = {"fp8_mqa_logits": FLAT, "fp8_paged_mqa_logits": PAGED}  # the same with q alone
DTYPES = {"e4m3": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
PREFILL_TOKENS = 4096
PREFILL_KEYS = (8 << 10, 32 << 10, 128 << 10)
# Requests, query tokens of each, keys of each.
DECODES = (
    *((1, 1, keys << 10) for keys in (4, 32, 128)),
    (4, 1, 32 << 10),
    *((16, 1, keys << 10) for keys in (4, 32)),
    *((64, 1, keys << 10) for keys in (4, 32, 64)),
    (128, 1, 32 << 10),
    (64, 2, 32 << 10),
)
ERROR_LIMIT = 2e-3  # relative; products of fp8 are added with about 14 bits on sm90, where a right result has 1.5e-4
FP8_FACTOR = 2  # products of fp8 a second, by those of 16 bits


@dataclass(frozen=True)
class LogitsShape:
    """Sizes of one call.

    Attributes:
        kind: the wrapper.
        requests: of the batch; 1 over flat keys.
        s_q: query tokens a request.
        num_heads: of the indexer.
        keys: of each request; the last query token sees all of them, each before it one less.
    """

    kind: str
    requests: int
    s_q: int
    num_heads: int
    keys: int

    @property
    def family(self) -> str:
        """The one family of these shapes."""
        return "mqa_logits"

    @property
    def tokens(self) -> int:
        """Query tokens of the call."""
        return self.requests * self.s_q

    @property
    def pairs(self) -> int:
        """Pairs of a query token and a key that it sees."""
        return self.tokens * self.keys - self.requests * self.s_q * (self.s_q - 1) // 2

    def __str__(self) -> str:
        return f"{self.kind} {self.requests} x {self.s_q} x h{self.num_heads}, kv {self.keys >> 10}K"


@dataclass(frozen=True)
class LogitsInputs:
    """Tensors of one call.

    Attributes:
        layout: of a key.
        q: values [tokens, heads, any], and their scales; None for fp8.
        weights: f32 [tokens, heads].
        keys: pages uint8 [pages, page_bytes], or values and scales of flat keys.
        start, end: i32 [tokens], the keys that tokens see; of paged calls lengths i32 [requests, s_q] as end.
        block_table: i32 [requests, pages of a request]; None: keys are flat.
        size: keys a page.
        context: keys of a request.
    """

    layout: CacheLayout
    q: tuple[torch.Tensor, torch.Tensor | None]
    weights: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    start: torch.Tensor | None
    end: torch.Tensor
    block_table: torch.Tensor | None
    size: int
    context: int

    @property
    def cache(self) -> torch.Tensor:
        """Pages as DeepGEMM's callers hold them, uint8 [pages, size, 1, row]."""
        return rows_of(self.layout, self.keys[0], self.size, torch.uint8)[:, :, None]

    @cached_property
    def expected(self) -> torch.Tensor:
        """Logits of all tokens, f32 [tokens, context] of float64 sums; -inf where a token sees no key."""
        (values, scales), tokens = self.q, len(self.weights)
        found = torch.full((tokens, self.context), -torch.inf, device=values.device)
        each = tokens if self.block_table is None else self.end.shape[1]
        ends = self.end.flatten()
        for first in range(0, tokens, each):
            k = self._keys(first // each)  # f64 [keys, columns]
            key = torch.arange(len(k), device=k.device)
            for part in in_chunks(each, 2 * values.shape[1] * k.shape[0] * k.itemsize):
                some = slice(first + part.start, first + part.stop)
                q = values[some].flatten(0, 1)
                rows = q.double() if scales is None else _decoded(self.layout, q, scales[some].flatten(0, 1))
                scores = (rows @ k.T).relu_().view(-1, values.shape[1], len(k))  # [tokens, heads, keys]
                sums = torch.bmm(self.weights[some, None].double(), scores)[:, 0]
                found[some, : len(k)] = sums.masked_fill_(key >= ends[some, None], -torch.inf)
        return found

    def _keys(self, request: int) -> torch.Tensor:
        """Keys of a request, or flat ones, f64 [keys, columns]."""
        if self.block_table is None:
            return _decoded(self.layout, self.keys[0][: self.context], self.keys[1][: self.context])
        slots = slots_of(self.block_table[request], int(self.end[request].max()), self.size)
        return read(self.layout, self.keys[0], self.size, slots).double()


def _decoded(layout: CacheLayout, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows f64 of stored values and scales."""
    (field,) = layout.data
    found = layout.scales_of(field)
    assert found is not None
    planes = tuple(values.new_zeros(len(values), width, dtype=torch.uint8) for width in layout.plane_bytes)
    for one, stored in ((field, values), (found, scales)):
        planes[one.plane][:, one.offset : one.offset + one.nbytes] = stored.reshape(len(stored), -1).view(torch.uint8)
    return decode(layout, planes).double()


def _encoded(layout: CacheLayout, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored values and scales of rows, as callers hold them."""
    (field,) = layout.data
    scales = layout.scales_of(field)
    assert scales is not None
    planes = encode(layout, rows)
    values, found = (planes[one.plane][:, one.offset : one.offset + one.nbytes].contiguous() for one in (field, scales))
    if field.dtype == "e2m1":
        return values.view(torch.int8), found
    return values.view(DTYPES[field.dtype]), found.view(torch.float32)[:, 0]


def layout_of(package: BenchPackage) -> CacheLayout:
    """The layout of the indexer's keys."""
    layout = indexer_layout_of(package.spec)
    assert layout is not None
    return layout


def logits_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[LogitsShape]:
    """Shapes that a package's logits are measured at: those of the wrapper that takes pairs, or of the other one."""
    found: list[LogitsShape] = []
    if not package.spec.get("indexer"):
        return found
    count = package.spec["indexer"]["num_heads"]
    for pair, alone in ((FLAT, "fp8_mqa_logits"), (PAGED, "fp8_paged_mqa_logits")):
        wrapper = next((name for name in (pair, alone) if package.has(name)), None)
        if wrapper is None or (pair == PAGED and not package.has(SCHEDULE)):
            continue
        if pair == FLAT:
            found += [LogitsShape(wrapper, 1, PREFILL_TOKENS, count, keys) for keys in PREFILL_KEYS]
        else:
            found += [LogitsShape(wrapper, requests, s_q, count, keys) for requests, s_q, keys in DECODES]
    return found


def _query(layout: CacheLayout, shape: LogitsShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q of a call; keys' layout says how it is stored."""
    rows = torch.randn(shape.tokens * shape.num_heads, layout.columns, device=device)
    values, scales = _encoded(layout, rows)
    view = (shape.tokens, shape.num_heads, -1)
    return values.view(view), scales.view(view) if scales.dtype == torch.uint8 else None


def make_flat_inputs(shape: LogitsShape, layout: CacheLayout, device: torch.device, sets: int) -> list[LogitsInputs]:
    """Rotating input sets over flat keys of their own."""
    start = torch.zeros(shape.tokens, dtype=torch.int32, device=device)
    end = torch.arange(shape.keys - shape.tokens + 1, shape.keys + 1, dtype=torch.int32, device=device)
    found = []
    for _ in range(sets):
        keys = _encoded(layout, torch.randn(shape.keys, layout.columns, device=device))
        weights = torch.randn(shape.tokens, shape.num_heads, device=device)
        found.append(
            LogitsInputs(layout, _query(layout, shape, device), weights, keys, start, end, None, 0, shape.keys)
        )
    return found


def make_paged_inputs(
    shape: LogitsShape, layout: CacheLayout, size: int, device: torch.device, sets: int
) -> list[LogitsInputs]:
    """Rotating input sets over pages of one cache, no two of a set the same."""
    each = -(-shape.keys // size)
    tables = shuffled_pages(sets, shape.requests, each, device=device)
    pages = empty_cache(layout, sets * shape.requests * each, size, device)
    fill(layout, pages, size)
    behind = torch.arange(shape.s_q - 1, -1, -1, device=device)
    lengths = (shape.keys - behind).int().expand(shape.requests, -1).contiguous()
    found = []
    for table in tables:
        q, weights = _query(layout, shape, device), torch.randn(shape.tokens, shape.num_heads, device=device)
        found.append(LogitsInputs(layout, q, weights, (pages,), None, lengths, table, size, shape.keys))
    return found


def schedule_of(make: Callable[..., Any], lengths: torch.Tensor, size: int) -> Any:
    """The schedule of paged logits, which engines make once for all layers of a step."""
    return make(lengths, size, torch.cuda.get_device_properties(lengths.device).multi_processor_count)


def logits_call(
    kind: str, function: Callable[..., Any], schedule: Callable[..., Any] | None, inputs: LogitsInputs
) -> Call:
    """A call of our wrapper, or of a peer with its signature; the schedule is made outside, as engines do."""
    q: Any = inputs.q[0] if kind in FP8 else inputs.q
    if inputs.block_table is None:
        bounds = (inputs.start, inputs.end)
        return lambda: function(q, inputs.keys, inputs.weights, *bounds, clean_logits=False)
    assert schedule is not None
    shape = inputs.end.shape
    values, scales = (None if part is None else part.view(*shape, *part.shape[1:]) for part in inputs.q)
    q = values if kind in FP8 else (values, scales)
    metadata = schedule_of(schedule, inputs.end, inputs.size)
    pages = (inputs.cache, inputs.weights, inputs.end, inputs.block_table, metadata, inputs.context)
    return lambda: function(q, *pages, clean_logits=False)


def logits_error(inputs: LogitsInputs, call: Call) -> float:
    """Relative error of the worst token's logits. A first call's result is poisoned, and its memory is reused."""
    call().fill_(float("nan"))
    got = call()
    worst = 0.0
    for some in in_chunks(len(got), 4 * inputs.context * 8):
        expected = inputs.expected[some].double()
        seen = expected > -torch.inf
        wrong = (got[some, : inputs.context].double() - expected).where(seen, 0.0).norm(dim=1)
        share = wrong / expected.where(seen, 0.0).norm(dim=1)
        worst = max(worst, float(share.nan_to_num(nan=torch.inf, posinf=torch.inf).max()))
    return worst


def roof_of_logits(setting: Setting) -> Roof:
    """The ceilings of the package's logits: products of fp8 are twice as many a second."""
    roof = setting.roof
    if layout_of(setting.package).data[0].dtype not in DTYPES:
        return roof
    return replace(roof, flops_per_s=FP8_FACTOR * roof.flops_per_s, origin=f"{roof.origin}; twice that in fp8")


def logits_trials(setting: Setting) -> Callable[[LogitsShape], Trial[LogitsInputs]]:
    """Makes calls of the logits ready."""
    package, device = setting.package, setting.device
    layout, roof = layout_of(package), roof_of_logits(setting)
    size = package.spec["indexer_cache"].get("block_size") or BLOCK_SIZE

    def trial(shape: LogitsShape) -> Trial[LogitsInputs]:
        flat = shape.kind in (FLAT, "fp8_mqa_logits")
        q_bytes = shape.tokens * shape.num_heads * layout.row_bytes
        read_bytes = q_bytes + shape.requests * shape.keys * layout.row_bytes
        sets = sets_needed(read_bytes, setting.l2_bytes)
        if flat:
            inputs = make_flat_inputs(shape, layout, device, sets)
        else:
            inputs = make_paged_inputs(shape, layout, size, device, sets)
        schedule = None if flat else package.wrapper(SCHEDULE)
        call = partial(logits_call, shape.kind, package.wrapper(shape.kind), schedule)
        return Trial(
            inputs=inputs,
            entrants=[Entrant(OURS, call)],
            error_of=partial(logits_error, inputs[0]),
            error_limit=ERROR_LIMIT,
            flops=logits_flops(shape.num_heads, shape.pairs, layout.columns),
            bytes_moved=logits_bytes(read_bytes, shape.tokens * shape.num_heads, shape.pairs),
            roof=roof,
            launch_bound=shape.tokens == 1,
        )

    return trial


BENCHMARKS = {"mqa_logits": Family(logits_shapes, logits_trials, ("mqa_logits",))}
