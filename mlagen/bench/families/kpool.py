"""Pools of the indexer's keys: the family `kpool`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mlagen.bench.check import relative_error, wrong_share
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import BLOCK_SIZE, Batch, batches, empty_cache, rotation, rows_of, shuffled_pages, slots_of
from mlagen.bench.trial import OURS, Call, Entrant, Family, Setting, Trial
from mlagen.layout import CacheLayout
from mlagen.layout.codec import decode, encode, read
from mlagen.verify.call.memory import bits
from mlagen.verify.kpool.reference import expanded, pooled, transformed
from mlagen.verify.kpool.side import COLUMNS, COMPRESS, EXPAND, QUERY, SEED, UPDATE, KpoolSide, side_of
from mlagen.work import expand_bytes, pools_bytes, rotate_bytes, tail_bytes

POOL = 4  # tokens of a pool where the spec does not say it
TOPK = 2048  # tokens of picked pools where the spec has none
CONTEXT = 128 << 10  # tokens that rows of picked pools see
MOST_REQUESTS = 4096  # of a decode step
CHECKED = 16  # keys and rows that are compared
POISON = 255  # a byte that makes any key NaN or far from right
TOLERANCE = 1.1  # times the reference's error
EAGER_TOKENS = 1
KINDS = (QUERY, COMPRESS, SEED, UPDATE, EXPAND)


@dataclass(frozen=True)
class KpoolInputs:
    """Tensors of a call.

    Attributes:
        arguments: of the wrapper, by name.
        cache: uint8 [pages, page_bytes], if it writes keys.
    """

    arguments: dict[str, Any]
    cache: torch.Tensor | None = None


@dataclass(frozen=True)
class Pools:
    """Pools of a package.

    Attributes:
        package: the package.
        side: the cache of their keys; None in a package that only expands pools.
        size: tokens of a pool.
        block_size: keys a page.
    """

    package: BenchPackage
    side: KpoolSide | None
    size: int
    block_size: int

    @property
    def layout(self) -> CacheLayout:
        """The layout of their keys."""
        assert self.side is not None
        return self.side.layout


def pools_of(package: BenchPackage) -> Pools:
    """The pools of a package."""
    indexer, cache = package.spec.get("indexer"), package.spec.get("indexer_cache")
    size = indexer["compress_ratio"] if indexer and indexer["compress_ratio"] > 1 else POOL
    block_size = (cache and cache["block_size"]) or BLOCK_SIZE
    return Pools(package, side_of(package.spec), size, block_size)


def kpool_call(function: Callable[..., Any], inputs: KpoolInputs) -> Call:
    """A call of ours or of a peer's, which has the same arguments."""
    arguments = inputs.arguments
    return lambda: function(**arguments)


def kpool_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[Batch]:
    """Batches that the package's functions around pools are measured at; of UPDATE, tokens of as many requests."""
    found = [batch for name in KINDS if package.has(name) for batch in batches("kpool", name) if batch.requests == 1]
    return [batch for batch in found if batch.kind != UPDATE or batch.tokens <= MOST_REQUESTS]


def moved_bytes(batch: Batch, pools: Pools) -> int:
    """Fewest bytes of a batch."""
    tokens, size = batch.tokens, pools.size
    if batch.kind == EXPAND:
        return expand_bytes(tokens, _picked(pools), size)
    if batch.kind == QUERY:
        return rotate_bytes(tokens * _heads(pools), COLUMNS, pools.layout.row_bytes)
    if batch.kind == SEED:
        return tail_bytes(min(size, tokens), COLUMNS) + tokens * 8
    count = tokens if batch.kind == UPDATE else -(-tokens // size)
    moved = pools_bytes(count, size, COLUMNS, pools.layout.row_bytes)
    return moved + (tail_bytes(tokens, COLUMNS) if batch.kind == UPDATE else 0)


def _heads(pools: Pools) -> int:
    heads: int = pools.package.spec["indexer"]["num_heads"]
    return heads


def _picked(pools: Pools) -> int:
    indexer = pools.package.spec.get("indexer")
    topk: int = indexer["topk"] if indexer else TOPK
    return topk // pools.size


def make_kpool_inputs(batch: Batch, pools: Pools, device: torch.device, sets: int) -> list[KpoolInputs]:
    """Rotating input sets: each has tensors of its own."""
    make = {QUERY: _query, COMPRESS: _compress, SEED: _seed, UPDATE: _update, EXPAND: _expand}[batch.kind]
    return [make(batch.tokens, pools, device) for _ in range(sets)]


def _query(tokens: int, pools: Pools, device: torch.device) -> KpoolInputs:
    q = torch.randn(tokens * _heads(pools), COLUMNS, device=device)
    return KpoolInputs({"q": q.to(pools.package.dtype)})


def _cache(count: int, pools: Pools, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache, as it is and as callers hold it, and slots of so many keys."""
    pages = -(-count // pools.block_size)
    cache = empty_cache(pools.layout, pages, pools.block_size, device)
    slots = slots_of(shuffled_pages(pages, device=device), count, pools.block_size)
    return cache, rows_of(pools.layout, cache, pools.block_size, pools.package.dtype), slots


def _compress(tokens: int, pools: Pools, device: torch.device) -> KpoolInputs:
    count = -(-tokens // pools.size)
    cache, rows, slots = _cache(count, pools, device)
    k, score = torch.randn(2, count, pools.size, COLUMNS, device=device).to(pools.package.dtype)
    ape = torch.randn(pools.size, COLUMNS, device=device)
    given = {"kv_cache": rows, "slot_k": k, "slot_score": score, "ape": ape, "loc": slots, "pool_size": pools.size}
    return KpoolInputs(given, cache)


def _tail(blocks: int, pools: Pools, device: torch.device) -> torch.Tensor:
    return torch.randn(blocks, 2, pools.size, COLUMNS, device=device).to(pools.package.dtype)


def _seed(tokens: int, pools: Pools, device: torch.device) -> KpoolInputs:
    key, score = torch.randn(2, tokens, COLUMNS, device=device).to(pools.package.dtype)
    tslot = torch.arange(tokens, device=device) % pools.size
    tail = _tail(1, pools, device)
    given = {"tail_kv_cache": tail, "key": key, "gate_score": score, "tslot": tslot, "kpool": pools.size}
    return KpoolInputs(given)


def _update(tokens: int, pools: Pools, device: torch.device) -> KpoolInputs:
    """A step of one token of each request, which completes a pool."""
    cache, rows, slots = _cache(tokens, pools, device)
    key, score = torch.randn(2, tokens, 1, COLUMNS, device=device).to(pools.package.dtype)
    position = torch.full((tokens, 1), CONTEXT - 1, dtype=torch.int32, device=device)
    given = {
        "kv_cache": rows,
        "tail_kv_cache": _tail(tokens, pools, device),
        "tail_slot_mapping": torch.arange(tokens, device=device)[:, None] * pools.size + pools.size - 1,
        "key": key,
        "slot_score": score,
        "ape": torch.randn(pools.size, COLUMNS, device=device),
        "slot_mapping": slots[:, None],
        "positions": position,
        "pool_size": pools.size,
    }
    return KpoolInputs(given, cache)


def _expand(tokens: int, pools: Pools, device: torch.device) -> KpoolInputs:
    shape = (tokens, _picked(pools))
    ids = torch.randint(0, CONTEXT // pools.size, shape, dtype=torch.int32, device=device)
    lens = torch.full((tokens,), CONTEXT + pools.size - 1, dtype=torch.int32, device=device)
    return KpoolInputs({"pool_ids": ids, "seq_lens": lens, "pool_size": pools.size})


def _rows_error(layout: CacheLayout, got: torch.Tensor, rows: torch.Tensor) -> float:
    """Error of decoded rows, relative to that of their own quantisation."""
    kept = relative_error(decode(layout, encode(layout, rows)), rows)
    return relative_error(got.cpu(), rows) / (TOLERANCE * kept)


def _query_error(pools: Pools, inputs: KpoolInputs, call: Call) -> float:
    for one in call():
        bits(one).fill_(POISON)
    values, scales = (one[:CHECKED].cpu() for one in call())
    assert pools.side is not None
    layout, q = pools.side.query, inputs.arguments["q"][:CHECKED].cpu()
    got = decode(layout, (bits(values), scales.view(torch.uint8)))
    return _rows_error(layout, got, transformed(q, pools.package.dtype).float())


def _tail_error(pools: Pools, inputs: KpoolInputs, call: Call) -> float:
    given = inputs.arguments
    tail, count = given["tail_kv_cache"], len(given["tslot"])
    tail.fill_(float("nan"))
    call()
    last = torch.arange(max(0, count - pools.size), count, device=tail.device)
    got = tail[0][:, given["tslot"][last]]
    return wrong_share(got, torch.stack([given["key"][last], given["gate_score"][last]]))


def _indices_error(pools: Pools, inputs: KpoolInputs, call: Call) -> float:
    call().fill_(-2)
    ids, lens = (inputs.arguments[name][:CHECKED].cpu() for name in ("pool_ids", "seq_lens"))
    return wrong_share(call()[:CHECKED].cpu(), expanded(ids, lens, pools.size))


def _tokens(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and scores of the first pools that a call compresses, and the slots of their keys."""
    if "loc" in given:
        return given["slot_k"][:CHECKED].cpu(), given["slot_score"][:CHECKED].cpu(), given["loc"][:CHECKED]
    tail = given["tail_kv_cache"][:CHECKED, :, :-1]
    k = torch.cat([tail[:, 0], given["key"][:CHECKED]], 1).cpu()
    return k, torch.cat([tail[:, 1], given["slot_score"][:CHECKED]], 1).cpu(), given["slot_mapping"][:CHECKED, 0]


def _keys_error(pools: Pools, inputs: KpoolInputs, call: Call) -> float:
    assert inputs.cache is not None
    inputs.cache.fill_(POISON)
    k, score, slots = _tokens(inputs.arguments)
    call()
    ape, dtype = inputs.arguments["ape"].cpu(), pools.package.dtype
    rows = torch.stack([pooled(one, other, ape, dtype).row for one, other in zip(k, score, strict=True)])
    return _rows_error(pools.layout, read(pools.layout, inputs.cache, pools.block_size, slots), rows.float())


ERRORS = {QUERY: _query_error, COMPRESS: _keys_error, SEED: _tail_error, UPDATE: _keys_error, EXPAND: _indices_error}


def kpool_error(batch: Batch, pools: Pools, inputs: KpoolInputs, call: Call) -> float:
    """Error of keys and rows relative to that of their own quantisation; of tails and indices, the wrong share."""
    return ERRORS[batch.kind](pools, inputs, call)


def kpool_trials(setting: Setting) -> Callable[[Batch], Trial[KpoolInputs]]:
    """Makes batches of pools ready."""
    pools, device = pools_of(setting.package), setting.device

    def trial(batch: Batch) -> Trial[KpoolInputs]:
        moved = moved_bytes(batch, pools)
        inputs = make_kpool_inputs(batch, pools, device, rotation(moved, setting.l2_bytes))
        return Trial(
            inputs=inputs,
            entrants=[Entrant(OURS, partial(kpool_call, setting.package.wrapper(batch.kind)))],
            error_of=partial(kpool_error, batch, pools, inputs[0]),
            error_limit=0.0 if batch.kind in (SEED, EXPAND) else 1.0,
            flops=0,
            bytes_moved=moved,
            roof=setting.copy_roof,
            graph_only=True,
            launch_bound=batch.tokens <= EAGER_TOKENS,
        )

    return trial


BENCHMARKS = {"kpool": Family(kpool_shapes, kpool_trials, ("kpool",))}
