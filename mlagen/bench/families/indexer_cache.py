"""Writers and the gather of the indexer's keys, and its query's quantisation: the family `indexer_cache`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mlagen.bench.check import relative_error, wrong_share
from mlagen.bench.families.cache import EAGER_TOKENS, POISON, WRITE_TOLERANCE
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import (
    BLOCK_SIZE,
    Batch,
    batches,
    empty_cache,
    fill,
    rotation,
    rows_of,
    shuffled_pages,
    slots_of,
)
from mlagen.bench.trial import OURS, Call, Entrant, Family, Setting, Trial
from mlagen.layout import CacheLayout
from mlagen.layout.codec import decode, encode, planes_of, read
from mlagen.verify.indexer_cache.reference import normalised_keys, quantise_query
from mlagen.verify.indexer_cache.side import (
    GATHER,
    KEYS_QUERY,
    NORMALISE,
    QUERY,
    WRITE,
    IndexerSide,
    side_of,
    takes_ratio,
)
from mlagen.verify.paged.rope import rotate
from mlagen.work import keys_bytes, normalise_bytes, query_bytes, write_bytes

POSITIONS = 1 << 16  # of a table of angles
EPS = 1e-6
CHECKED = 1 << 17  # rows of a query that are compared at a time
QUERY_LIMIT = 1e-3  # share of the query's bytes that another order of the same roundings may turn
SEPARATE = "separate launches"
KINDS = (WRITE, GATHER, QUERY, NORMALISE, KEYS_QUERY)


@dataclass(frozen=True)
class KeyInputs:
    """Tensors of one call of any of the family's functions.

    Attributes:
        k: [T, columns] keys.
        q: [T, heads, columns]; without tokens where the call has no query.
        positions: i64 [T].
        angles: f32 [positions, RoPE's columns], cosines then sines.
        weights: f32 [T, heads].
        norm_weight, norm_bias: [columns].
        weights_out: f32 [T, heads], a result of a call for keys and the query.
        cache: uint8 [pages, page_bytes], which all sets share.
        slots: i64 [T].
        block_table: i32 [R, pages of a request].
        starts: i32 [R + 1], where the keys of each request begin.
        values, scales: u8 [T, bytes], the gather's result.
        q_values, q_scales: u8 [T, heads, bytes], results of a call for keys and the query.
    """

    k: torch.Tensor
    q: torch.Tensor
    positions: torch.Tensor
    angles: torch.Tensor
    weights: torch.Tensor
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    starts: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor
    weights_out: torch.Tensor
    q_values: torch.Tensor
    q_scales: torch.Tensor


@dataclass(frozen=True)
class Keys:
    """A package's indexer.

    Attributes:
        package: the package.
        side: its keys and query.
        block_size: keys a page.
    """

    package: BenchPackage
    side: IndexerSide
    block_size: int

    @property
    def layout(self) -> CacheLayout:
        """Bytes of a key."""
        return self.side.layout

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """A cache [pages, page_bytes] as callers hold it."""
        return rows_of(self.layout, cache, self.block_size, self.package.dtype)


def keys_of(package: BenchPackage) -> Keys:
    """The indexer of a package that has one."""
    side = side_of(package.spec)
    assert side is not None
    return Keys(package, side, package.spec["indexer_cache"]["block_size"] or BLOCK_SIZE)


def write_call(function: Callable[..., Any], keys: Keys, inputs: KeyInputs) -> Call:
    """A call of `indexer_k_quant_and_cache`, ours or a peer's."""
    scales = keys.side.scales
    tile = scales.tile if scales.count > 1 else keys.layout.columns
    rounding = "ue8m0" if scales.rule.rounding == "power_of_two" else "fp32"
    arguments = (inputs.k, keys.rows(inputs.cache), inputs.slots, tile, rounding)
    return lambda: function(*arguments)


def gather_call(function: Callable[..., Any], keys: Keys, inputs: KeyInputs) -> Call:
    """A call of `cp_gather_indexer_k_quant_cache`, ours or a peer's."""
    arguments = (keys.rows(inputs.cache), inputs.values, inputs.scales, inputs.block_table, inputs.starts)
    return lambda: function(*arguments)


def query_arguments(keys: Keys, *tensors: torch.Tensor) -> tuple[Any, ...]:
    """Arguments of `fused_indexer_q_rope_quant`, behind its tensors: positions, q, angles and weights."""
    return (*tensors, keys.layout.columns**-0.5, keys.side.num_heads**-0.5, keys.side.packed)


def query_call(function: Callable[..., Any], keys: Keys, inputs: KeyInputs) -> Call:
    """A call of `fused_indexer_q_rope_quant`, ours or a peer's."""
    arguments = query_arguments(keys, inputs.positions, inputs.q, inputs.angles, inputs.weights)
    return lambda: function(*arguments)


def normalise_call(function: Callable[..., Any], keys: Keys, inputs: KeyInputs) -> Call:
    """A call of `indexer_k_norm_rope_store`, ours or a peer's."""
    table = (inputs.positions, inputs.angles, inputs.norm_weight, EPS)
    arguments = (inputs.k, *table, keys.rows(inputs.cache), inputs.slots, 1, keys.side.packed)
    return lambda: function(*arguments)


def keys_query_call(function: Callable[..., Any], keys: Keys, inputs: KeyInputs) -> Call:
    """A call of `indexer_qk_rope_quant_and_cache`, with a LayerNorm, or an RMSNorm where the model's keys have one."""
    side, half = keys.side, keys.side.rope // 2
    query = (inputs.q, inputs.q_values, inputs.weights, inputs.weights_out)
    norm = (inputs.norm_weight, None if normed(keys) else inputs.norm_bias)
    table = (inputs.positions, inputs.angles[:, :half], inputs.angles[:, half:], EPS)
    tile = side.scales.tile if side.scales.count > 1 else keys.layout.columns
    rounding = "ue8m0" if side.scales.rule.rounding == "power_of_two" else None
    named: dict[str, Any] = {"q_scale_out": inputs.q_scales} if side.packed else {}
    if takes_ratio(side, keys.package.spec["wrappers"]):
        named["compress_ratio"] = 1
    numbers = (tile, rounding, (keys.layout.columns * side.num_heads) ** -0.5, False, side.neox)
    arguments = (*query, inputs.k, keys.rows(inputs.cache), inputs.slots, *norm, *table, *numbers)
    return lambda: function(*arguments, **named)


def normed(keys: Keys) -> bool:
    """Whether the package writes keys with an RMSNorm in front, in a launch of their own."""
    return keys.package.has(NORMALISE)


def separate_call(keys: Keys, inputs: KeyInputs) -> Call:
    """The same by functions of keys and of the query: two launches, or torch's LayerNorm and RoPE in front of them."""
    package, columns = keys.package, keys.layout.columns
    query = query_call(package.wrapper(QUERY), keys, inputs)
    if normed(keys):
        first = normalise_call(package.wrapper(NORMALISE), keys, inputs)
        return lambda: (first(), query())
    write = package.wrapper(WRITE)

    def call() -> tuple[Any, Any]:
        k = torch.nn.functional.layer_norm(inputs.k, (columns,), inputs.norm_weight, inputs.norm_bias, EPS)
        k = rotate(keys.side, k.float(), inputs.angles[inputs.positions]).to(k.dtype)
        return write_call(write, keys, replace(inputs, k=k))(), query()

    return call


CALLS: Mapping[str, Callable[[Callable[..., Any], Keys, KeyInputs], Call]] = {
    WRITE: write_call,
    GATHER: gather_call,
    QUERY: query_call,
    NORMALISE: normalise_call,
    KEYS_QUERY: keys_query_call,
}


def indexer_cache_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[Batch]:
    """Batches that the package's functions around the indexer's keys are measured at."""
    return [batch for name in KINDS if package.has(name) for batch in batches("indexer_cache", name)]


def make_key_inputs(batch: Batch, keys: Keys, device: torch.device, sets: int) -> list[KeyInputs]:
    """Rotating input sets: each has keys, pages and outputs of its own in one cache."""
    side, layout, dtype = keys.side, keys.layout, keys.package.dtype
    pages = shuffled_pages(sets, batch.requests, batch.pages_each(keys.block_size), device=device)
    cache = empty_cache(layout, pages.numel(), keys.block_size, device)
    if batch.kind == GATHER:
        fill(layout, cache, keys.block_size)
    slots = slots_of(pages, batch.tokens_each, keys.block_size).view(sets, batch.tokens)
    k = torch.randn(sets, batch.tokens, layout.columns, dtype=dtype, device=device)
    tokens = batch.tokens if batch.kind in (QUERY, KEYS_QUERY) else 0
    q = torch.randn(sets, tokens, side.num_heads, layout.columns, dtype=dtype, device=device)
    weights = torch.randn(tokens, side.num_heads, device=device)
    angle = torch.rand(POSITIONS, side.rope // 2, device=device) * 6.28
    angles = torch.cat([angle.cos(), angle.sin()], 1)
    positions = torch.randint(0, POSITIONS, (batch.tokens,), device=device)
    norm_weight, norm_bias = torch.randn(2, layout.columns, dtype=dtype, device=device)
    starts = torch.arange(batch.requests + 1, dtype=torch.int32, device=device) * batch.tokens_each
    values, scales = (
        torch.empty(sets, batch.tokens, one.nbytes, dtype=torch.uint8, device=device)
        for one in (side.values, side.scales)
    )
    weights_out = torch.empty(sets, tokens, side.num_heads, device=device)
    q_values, q_scales = (
        torch.empty(sets, tokens, side.num_heads, nbytes, dtype=torch.uint8, device=device)
        for nbytes in (side.query.data[0].nbytes, side.query.plane_bytes[1])
    )
    table = (positions, angles, weights, norm_weight, norm_bias, cache)
    results = zip(values, scales, weights_out, q_values, q_scales, strict=True)
    return [
        KeyInputs(k[one], q[one], *table, slots[one], pages[one], starts, *result) for one, result in enumerate(results)
    ]


def written_error(
    keys: Keys, inputs: KeyInputs, normalised: bool, call: Call, bias: torch.Tensor | None = None
) -> float:
    """Relative error of the keys that are read back after a call; NaN where one was not written."""
    inputs.cache.fill_(POISON)
    call()
    rows = rows_written(keys, inputs, normalised, bias)
    return relative_error(read(keys.layout, inputs.cache, keys.block_size, inputs.slots), rows)


def rows_written(keys: Keys, inputs: KeyInputs, normalised: bool, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Keys [T, columns] that a call quantises."""
    table = (inputs.positions, inputs.angles, inputs.norm_weight)
    return normalised_keys(keys.side, inputs.k, *table, EPS, 1, bias)[0] if normalised else inputs.k


def written_limit(keys: Keys, rows: torch.Tensor) -> float:
    """Largest error of a correct writer: that of the reference's own quantisation, and a little."""
    return WRITE_TOLERANCE * relative_error(decode(keys.layout, encode(keys.layout, rows)), rows)


def gathered_error(keys: Keys, inputs: KeyInputs, call: Call) -> float:
    """Share of the gathered bytes that are wrong."""
    inputs.values.fill_(POISON)
    inputs.scales.fill_(POISON)
    call()
    size, side = keys.block_size, keys.side
    planes = planes_of(keys.layout, inputs.cache, size)
    found = []
    for out, one in ((inputs.values, side.values), (inputs.scales, side.scales)):
        rows = planes[one.plane][inputs.slots // size, inputs.slots % size]
        found.append(wrong_share(out, rows[:, one.offset : one.offset + one.nbytes]))
    return max(found)


def query_error(keys: Keys, inputs: KeyInputs, call: Call) -> float:
    """Share of the bytes of the quantised query that are wrong."""
    q, _ = call()
    values = (q[0] if isinstance(q, tuple) else q).view(torch.uint8)
    step, wrong = max(1, CHECKED // keys.side.num_heads), 0.0
    for first in range(0, len(values), step):
        some = slice(first, first + step)
        table = (inputs.positions[some], inputs.angles, inputs.weights[some], 1.0, 1.0)
        wanted, _, _ = quantise_query(keys.side, inputs.q[some], *table)
        wrong += wrong_share(values[some], wanted) * len(wanted)
    return wrong / len(values)


def keys_query_error(keys: Keys, inputs: KeyInputs, call: Call) -> float:
    """Error of the keys that are read back after a call, or the wrong share of the query, over its limit."""
    bias = None if normed(keys) else inputs.norm_bias
    written = written_error(keys, inputs, True, call, bias) / written_limit(
        keys, rows_written(keys, inputs, True, bias)
    )
    returned = call()
    query = returned[-1] if isinstance(returned, tuple) else (inputs.q_values, inputs.weights_out)
    return max(written, query_error(keys, inputs, lambda: query) / QUERY_LIMIT)


def indexer_cache_trials(setting: Setting) -> Callable[[Batch], Trial[KeyInputs]]:
    """Makes batches of the functions around the indexer's keys ready."""
    package, device = setting.package, setting.device
    keys = keys_of(package)
    side, layout = keys.side, keys.layout

    def moved_by(batch: Batch) -> int:
        tokens, columns, rope = batch.tokens, layout.columns, side.rope
        pages = batch.requests * batch.pages_each(keys.block_size)
        query = query_bytes(tokens, side.num_heads, columns, rope, side.query.row_bytes if side.packed else columns)
        return {
            WRITE: write_bytes(tokens, columns, layout.row_bytes),
            GATHER: keys_bytes(tokens, layout.row_bytes, pages, batch.requests),
            QUERY: query,
            NORMALISE: normalise_bytes(tokens, columns, rope, layout.row_bytes),
            KEYS_QUERY: write_bytes(tokens, columns, layout.row_bytes) + query,
        }[batch.kind]

    def trial(batch: Batch) -> Trial[KeyInputs]:
        moved = moved_by(batch)
        inputs = make_key_inputs(batch, keys, device, rotation(moved, setting.l2_bytes))
        first = inputs[0]
        errors: dict[str, tuple[Callable[[Call], float], Callable[[], float]]] = {
            WRITE: (partial(written_error, keys, first, False), lambda: written_limit(keys, first.k)),
            NORMALISE: (
                partial(written_error, keys, first, True),
                lambda: written_limit(keys, rows_written(keys, first, True)),
            ),
            GATHER: (partial(gathered_error, keys, first), lambda: 0.0),
            QUERY: (partial(query_error, keys, first), lambda: QUERY_LIMIT),
            KEYS_QUERY: (partial(keys_query_error, keys, first), lambda: 1.0),
        }
        error_of, limit = errors[batch.kind]
        entrants = [Entrant(OURS, partial(CALLS[batch.kind], package.wrapper(batch.kind), keys))]
        if batch.kind == KEYS_QUERY and package.has(QUERY) and (package.has(WRITE) or normed(keys)):
            entrants.append(Entrant(SEPARATE, partial(separate_call, keys)))
        return Trial(
            inputs=inputs,
            entrants=entrants,
            error_of=error_of,
            error_limit=limit(),
            flops=0,
            bytes_moved=moved,
            roof=setting.copy_roof,
            graph_only=True,
            launch_bound=batch.tokens <= EAGER_TOKENS,
        )

    return trial


BENCHMARKS = {"indexer_cache": Family(indexer_cache_shapes, indexer_cache_trials, ("indexer_cache",))}
