"""Arguments that attention's prologues must refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.prologue.side import (
    CACHE_ARGUMENT,
    CONCAT,
    NAME,
    PADDED,
    POSITIONS_ARGUMENT,
    Q_ARGUMENT,
    SHORT,
    PrologueSide,
)


def _restrided(page: int | None, row: int, closer: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same cache with pages, its own or so many elements apart but for `closer`, and rows so many."""
    return lambda cache: cache.as_strided(cache.shape, ((cache.stride(0) if page is None else page) - closer, row, 1))


def _pages(side: PrologueSide, wrapper: str) -> Iterator[Invalid]:
    layout, unit, argument = side.layout, side.unit, CACHE_ARGUMENT[wrapper]
    row, name = layout.row_bytes // unit, layout.name
    yield from invalid.tensor(argument, torch.float32)
    yield Invalid(argument, "wider rows", invalid.wider(16), name)
    yield Invalid(argument, "rows that overlap", _restrided(None, row - 1), name)
    yield Invalid(argument, "pages that overlap", _restrided(None, row, closer=row), name)
    if side.alignment > unit:
        yield Invalid(argument, "a begin off its values", invalid.byte_late, name)


def _tokens(wrapper: str) -> Iterator[Invalid]:
    q, positions = Q_ARGUMENT[wrapper], POSITIONS_ARGUMENT[wrapper]
    yield from invalid.tensor(q, torch.float32, first=True)
    yield Invalid(q, "wider than a head", invalid.wider(16))
    yield from invalid.tensor("slot_mapping", torch.int32)
    yield Invalid("slot_mapping", "longer than the tokens", lambda slots: slots.repeat(3))
    yield from invalid.tensor(positions, torch.int32)
    yield Invalid(positions, "one short", lambda tensor: tensor[:-1])
    yield from invalid.tensor("cos_sin_cache", torch.float64)
    yield Invalid("cos_sin_cache", "wider", invalid.wider(2))
    yield Invalid("cos_sin_cache", "no position", lambda table: table[:0])
    yield from invalid.tensor("kv_norm_weight", torch.float64)
    yield Invalid("kv_norm_weight", "longer than a row", invalid.longer)
    for value in ("1", None, True):
        yield Invalid("eps", repr(value), invalid.constant(value))


def _heads(side: PrologueSide, wrapper: str) -> Iterator[Invalid]:
    yield from invalid.tensor("kv", torch.float32)
    yield Invalid("kv", "wider than a row", invalid.wider(16))
    yield Invalid("kv", "a token short", lambda kv: kv[1:])
    yield from invalid.tensor("q_norm_weight", torch.float64)
    block_size = "cache_block_size" if wrapper == PADDED else "block_size"
    for value in (0, -1, 2.5, None):
        yield Invalid(block_size, str(value), invalid.constant(value))
    row = side.layout.row_bytes // side.unit
    argument = CACHE_ARGUMENT[wrapper]
    yield Invalid(argument, "pages too small", lambda cache: cache.new_zeros(cache.shape[0], 4 * row - 1), "layout")
    yield Invalid(argument, "another block size", lambda cache: cache.new_zeros(3, 5, row), "block_size")
    if wrapper == PADDED:
        for padded in (1, -1, 2.5, None, 1 << 31):
            yield Invalid("q_head_padded", str(padded), invalid.constant(padded))
        yield Invalid("out", "another number of heads", lambda q: q.new_zeros(len(q), 5, q.shape[2]), like="q_in")
        yield Invalid("out", "heads that overlap", lambda q: q[:, :1].expand(-1, 2, -1), like="q_in")
    else:
        yield Invalid("q", "heads that overlap", lambda q: q[:, :1].expand(-1, 2, -1))


def _parts(side: PrologueSide) -> Iterator[Invalid]:
    for argument in ("k_pe", "kv_c"):
        yield from invalid.tensor(argument, torch.float32)
        yield Invalid(argument, "wider", invalid.wider(16))
        yield Invalid(argument, "a token short", lambda rows: rows[1:])
        yield Invalid(argument, "rows that overlap", lambda rows: rows[:1].expand(len(rows), -1))
    yield Invalid("q_pe", "heads that overlap", lambda q: q[:, :1].expand(-1, 2, -1))
    for value in (not side.neox, None, 1):
        yield Invalid("is_neox", repr(value), invalid.constant(value))
    yield Invalid("kv_cache_dtype", "of another layout", invalid.constant("fp8_of_another_kind"), side.layout.name)


def _scale(argument: str) -> Iterator[Invalid]:
    yield Invalid(argument, "missing", invalid.constant(None))
    yield Invalid(argument, "a number", invalid.constant(1.0))
    yield Invalid(argument, "two of them", lambda scale: scale.repeat(2))


def refused(side: PrologueSide, wrapper: str) -> Iterator[RefusedCase]:
    """A case for each invalid argument of a wrapper."""
    found = [*_tokens(wrapper), *_pages(side, wrapper)]
    found += _parts(side) if wrapper == CONCAT else _heads(side, wrapper)
    if side.layout.tensor_scale:
        found += _scale("kv_cache_scale" if wrapper == CONCAT else "scale")
    return invalid.refused_cases(NAME, {wrapper: SHORT[wrapper]}, found, prefix="prologue ")
