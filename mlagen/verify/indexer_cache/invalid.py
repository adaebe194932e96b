"""Arguments that the kernels around the indexer's keys must refuse."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.indexer_cache.side import (
    CACHE_ARGUMENT,
    GATHER,
    KEYS_QUERY,
    NAME,
    NORMALISE,
    QUERY,
    SHORT,
    SLOTS_ARGUMENT,
    WRITE,
    IndexerSide,
    takes_ratio,
)


def _restrided(page: int | None, row: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same cache with pages, its own or so many bytes apart, and rows so many."""
    return lambda cache: cache.as_strided(cache.shape, (cache.stride(0) if page is None else page, row, 1))


def _pages(side: IndexerSide, wrapper: str) -> Iterator[Invalid]:
    layout, argument = side.layout, CACHE_ARGUMENT[wrapper]
    row, name = layout.row_bytes, layout.name
    yield from invalid.tensor(argument, torch.float32)
    yield Invalid(argument, "wider rows", invalid.wider(16), name)
    yield Invalid(argument, "narrower rows", lambda cache: cache[..., :-1].contiguous(), name)
    yield Invalid(argument, "rows that overlap", _restrided(None, row - 1), name)
    yield Invalid(argument, "pages that overlap", _restrided(3 * row, row), name)  # of four keys
    yield Invalid(argument, "two heads", lambda cache: cache[:, :, None].repeat(1, 1, 2, 1), name)
    if layout.planar:
        apart = _restrided(2 * layout.page_bytes(4), row + 4)
        yield Invalid(argument, "rows apart", lambda cache: apart(cache.repeat(3, 1, 1)[:2]), name)
    if side.alignment > 1:
        yield Invalid(argument, "a begin off its values", invalid.byte_late, name)


def _slots(wrapper: str) -> Iterator[Invalid]:
    argument = SLOTS_ARGUMENT[wrapper]
    yield from invalid.tensor(argument, torch.int32)
    yield Invalid(argument, "longer than the keys", lambda slots: slots.repeat(3))


def _write(side: IndexerSide) -> Iterator[Invalid]:
    yield from invalid.tensor("k", torch.float32, first=True)
    yield Invalid("k", "wider than a key", invalid.wider(16))
    yield from _scaling(side)
    yield from _slots(WRITE)


def _scaling(side: IndexerSide) -> Iterator[Invalid]:
    """Descriptions of another layout's scales."""
    tile = side.scales.tile if side.scales.count > 1 else side.layout.columns
    for size in (tile + 1, 0, None):
        yield Invalid("quant_block_size", str(size), invalid.constant(size), side.layout.name)
    rounds = side.scales.rule.rounding == "power_of_two"
    yield Invalid("scale_fmt", "the other", invalid.constant(None if rounds else "ue8m0"), side.layout.name)


def _angles(argument: str, rope: int) -> Iterator[Invalid]:
    yield from invalid.tensor(argument, torch.float64)
    yield Invalid(argument, "wider", invalid.wider(2))
    yield Invalid(argument, "no position", lambda table: table[:0])
    yield Invalid(argument, "None", invalid.constant(None))


def _normalise(side: IndexerSide) -> Iterator[Invalid]:
    yield from invalid.tensor("k_pre", torch.float32, first=True)
    yield Invalid("k_pre", "wider than a key", invalid.wider(16))
    yield from invalid.tensor("positions", torch.int32)
    yield Invalid(
        "kv_slot_mapping", "longer than the positions", lambda p: p[:-1], changes="positions", like="positions"
    )
    if side.rope:
        yield from _angles("cos_sin_cache", side.rope)
    yield from invalid.tensor("rms_norm_weight", torch.float64)
    yield Invalid("rms_norm_weight", "longer than a key", invalid.longer)
    for value in ("1", None, True):
        yield Invalid("rms_norm_eps", repr(value), invalid.constant(value))
    yield Invalid("use_fp4_cache", "the other", invalid.constant(not side.packed), side.layout.name)
    yield from _slots(NORMALISE)


def _query(side: IndexerSide) -> Iterator[Invalid]:
    yield from invalid.tensor("index_q", torch.float32, first=True)
    yield Invalid("index_q", "wider than a head", invalid.wider(16))
    yield from invalid.tensor("positions", torch.int32)
    yield Invalid("positions", "one short", lambda positions: positions[:-1])
    if side.rope:
        yield from _angles("index_q_cos_sin_cache", side.rope)
    yield from invalid.tensor("index_weights", torch.float64)
    yield Invalid("index_weights", "a token short", lambda weights: weights[1:])
    yield Invalid("index_weights", "a head too many", invalid.wider(1))
    for argument in ("index_weights_softmax_scale", "index_weights_head_scale"):
        for value in ("1", None, True):
            yield Invalid(argument, repr(value), invalid.constant(value))
        yield Invalid(argument, "a tensor", lambda q: q.new_ones(()), like="index_q")
    yield Invalid("use_fp4", "the other", invalid.constant(not side.packed), side.layout.name)
    yield Invalid("weights_out_dtype", "bf16", invalid.constant(torch.bfloat16))


def _gather(side: IndexerSide) -> Iterator[Invalid]:
    for argument in ("dst_k", "dst_scale"):
        yield from invalid.tensor(argument, torch.float64, first=argument == "dst_k")
        yield Invalid(argument, "wider", invalid.wider(1))
        yield Invalid(argument, "rows that overlap", lambda out: out[:1].expand(len(out), -1))
    yield Invalid("dst_scale", "a row short", lambda out: out[1:])
    yield from invalid.tensor("block_table", torch.int64)
    yield from invalid.tensor("cu_seq_lens", torch.int64)
    yield Invalid("cu_seq_lens", "more requests than block_table", lambda bounds: torch.cat([bounds, bounds, bounds]))
    yield Invalid("cu_seq_lens", "no entry", lambda bounds: bounds[:0])


def _both(side: IndexerSide) -> Iterator[Invalid]:
    yield from invalid.tensor("q", torch.float32, first=True)
    yield Invalid("q", "wider than a head", invalid.wider(16))
    outputs = ["q_out", *(["q_scale_out"] if side.packed else [])]
    for argument in (*outputs, "weights_out"):
        yield from invalid.tensor(argument, torch.float64)
        yield Invalid(argument, "a token short", lambda out: out[1:])
        yield Invalid(argument, "wider", invalid.wider(1))
        yield Invalid(argument, "not contiguous", lambda out: torch.cat([out, out], -1)[..., ::2])
        yield Invalid(argument, "tokens apart", lambda out: torch.cat([out, out], 1)[:, : out.shape[1]])
    yield from invalid.tensor("weights", torch.float64)
    yield Invalid("weights", "a head too many", invalid.wider(1))
    yield from invalid.tensor("k", torch.float32)
    yield Invalid("k", "a token short", lambda k: k[1:])
    yield Invalid("k", "wider than a key", invalid.wider(16))
    yield from _slots(KEYS_QUERY)
    for argument in ("norm_weight", "norm_bias"):
        yield from invalid.tensor(argument, torch.float64)
        yield Invalid(argument, "longer than a key", invalid.longer)
    yield Invalid("norm_weight", "None", invalid.constant(None))
    yield Invalid("norm_bias", "of another dtype", lambda bias: bias.float())
    yield from invalid.tensor("positions", torch.int32)
    yield Invalid("positions", "one short", lambda positions: positions[:3])
    for argument in ("cos_cache", "sin_cache"):
        yield from _angles(argument, side.rope)
        yield Invalid(argument, "two tables", lambda table: torch.stack([table, table], 1))
    yield Invalid("sin_cache", "a position short", lambda table: table[1:])
    yield Invalid("sin_cache", "of another dtype", lambda table: table.float())
    for argument in ("epsilon", "weights_scale"):
        for value in ("1", None, True):
            yield Invalid(argument, repr(value), invalid.constant(value))
    yield from _scaling(side)
    yield Invalid("preshuffle", "True", invalid.constant(True))
    yield Invalid("is_neox", "the other", invalid.constant(not side.neox))


def _ratios() -> Iterator[Invalid]:
    for ratio in (0, -1, 2.5, None, True, 2**31):
        yield Invalid("compress_ratio", str(ratio), invalid.constant(ratio))


def refused(side: IndexerSide, wrapper: str, wrappers: Collection[str]) -> Iterator[RefusedCase]:
    """A case for each invalid argument of a wrapper, in a package with these wrappers."""
    own = {WRITE: _write, NORMALISE: _normalise, QUERY: _query, GATHER: _gather, KEYS_QUERY: _both}[wrapper]
    found = [*own(side), *(_pages(side, wrapper) if wrapper in CACHE_ARGUMENT else ())]
    if wrapper == NORMALISE or (wrapper == KEYS_QUERY and takes_ratio(side, wrappers)):
        found += _ratios()
    return invalid.refused_cases(NAME, {wrapper: SHORT[wrapper]}, found)
