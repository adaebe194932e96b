"""Arguments that writers and gathers must refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mlagen.verify.cache.sides import CACHE_ARGUMENT, CONCAT, INSERT, NAME, REQUESTS, SHORT, TOKENS
from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.paged.side import Side


def _restrided(page: int | None, row: int, closer: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same cache with pages, its own or so many elements apart but for `closer`, and rows so many."""
    return lambda cache: cache.as_strided(cache.shape, ((cache.stride(0) if page is None else page) - closer, row, 1))


def _invalid_pages(side: Side, wrapper: str) -> Iterator[Invalid]:
    """Invalid caches; errors of a cache's bytes name the layout."""
    layout, unit, argument = side.layout, side.unit, CACHE_ARGUMENT[wrapper]
    main = layout.parts[0]
    row, page, name = main.row_bytes // unit, main.page_bytes(4) // unit, layout.name
    yield from invalid.tensor(argument, torch.float32)
    yield Invalid(argument, "wider rows", invalid.wider(16), name)
    yield Invalid(argument, "narrower rows", lambda cache: cache[..., :-1].contiguous(), name)
    yield Invalid(argument, "rows that overlap", _restrided(None, row - 1), name)
    yield Invalid(argument, "pages that overlap", _restrided(None, row, closer=row), name)
    yield Invalid(argument, "pages of stride 0", _restrided(0, row), name)
    if layout.planar:
        apart = _restrided(2 * page, row + 2)
        yield Invalid(argument, "rows apart", lambda cache: apart(cache.repeat(3, 1, 1)[:2]), name)
    if side.alignment > unit:
        yield Invalid(argument, "a begin off its values", invalid.byte_late, name)
    if wrapper in (INSERT, REQUESTS):
        yield Invalid(argument, "pages too small", lambda cache: cache.new_zeros(cache.shape[0], 4 * row - 1), name)
        yield Invalid(argument, "another block size", lambda cache: cache.new_zeros(3, 5, row), "block_size")


def _invalid_written(side: Side, wrapper: str) -> Iterator[Invalid]:
    facts = side.facts
    if wrapper == INSERT:
        yield from invalid.tensor("k", torch.float32, first=True)
        yield Invalid("k", "wider than a row", invalid.wider(16))
        yield Invalid("is_ue8m0", "the other", lambda value: not value, side.layout.name)
    else:
        yield from invalid.tensor("kv_c", torch.float32, first=True)
        yield Invalid("kv_c", "wider than the latent", invalid.wider(16))
        if facts.d_rope:
            yield from invalid.tensor("k_pe", torch.float32, strided=facts.d_rope > 1)
            yield Invalid("k_pe", "missing", invalid.constant(None))
            yield Invalid("k_pe", "wider than the rope", invalid.wider(16))
            yield Invalid("k_pe", "more tokens than kv_c", invalid.longer)
        else:
            yield Invalid("k_pe", "given to a spec without rope", invalid.constant(torch.zeros(4, 8, dtype=side.dtype)))
    yield from invalid.tensor("slot_mapping", torch.int32)
    yield Invalid("slot_mapping", "longer than the rows", lambda slots: slots.repeat(3))


def _invalid_gathered(wrapper: str) -> Iterator[Invalid]:
    out = "out" if wrapper == REQUESTS else "dst"
    yield from invalid.tensor(out, torch.float32, first=True)
    yield Invalid(out, "wider than a row", invalid.wider(16))
    if wrapper == REQUESTS:
        yield Invalid("out", "fewer requests than seq_lens", lambda tensor: tensor[:1])
        for name in ("seq_lens", "gather_lens", "block_table"):
            yield from invalid.tensor(name, torch.int64, strided=name == "block_table")
        yield Invalid("gather_lens", "a request too many", invalid.longer)
        yield Invalid("block_table", "fewer requests than seq_lens", lambda table: table[:1])
        for how, offset in (("negative", -1), ("past the end", 1000), ("None", None)):
            yield Invalid("offset", how, invalid.constant(offset))
        return
    for name in ("cu_seq_lens", "token_to_seq", "seq_starts", "block_table"):
        yield from invalid.tensor(name, torch.int64, strided=name == "block_table")
    yield Invalid("cu_seq_lens", "more requests than block_table", lambda starts: torch.cat([starts, starts, starts]))
    yield Invalid("cu_seq_lens", "no entry", lambda starts: starts[:0])
    yield Invalid("seq_starts", "a request too many", invalid.longer)
    for how, count in (("more than dst has", 1000), ("a float", 2.5), ("None", None)):
        yield Invalid("num_tokens", how, invalid.constant(count))


def _invalid(side: Side, wrapper: str) -> Iterator[Invalid]:
    yield from _invalid_written(side, wrapper) if wrapper in (CONCAT, INSERT) else _invalid_gathered(wrapper)
    if wrapper in (INSERT, REQUESTS):
        for value in (0, -1, 2.5, None):
            yield Invalid("block_size", str(value), invalid.constant(value))
        for how, value in (("the other", not side.fnuz), ("None", None)):
            yield Invalid("use_fnuz", how, invalid.constant(value), side.layout.name)
    if wrapper == INSERT:
        for size in (side.layout.row_bytes + 1, 0, None):
            yield Invalid("bytes_per_token", str(size), invalid.constant(size), side.layout.name)
    if wrapper == REQUESTS:
        for most in (-1, 2.5, True):
            yield Invalid("max_gather_len", str(most), invalid.constant(most))
    if wrapper == CONCAT and side.layout.tensor_scale:
        yield Invalid("skip_scale", "True", invalid.constant(True), side.layout.name)
    if wrapper in (CONCAT, TOKENS):
        yield Invalid("kv_cache_dtype", "of another layout", invalid.constant("fp8_of_another_kind"), side.layout.name)
    if side.layout.tensor_scale:
        yield Invalid("scale", "missing", invalid.constant(None))
        yield Invalid("scale", "a number", invalid.constant(1.0))
        yield Invalid("scale", "two of them", lambda scale: scale.repeat(2))
        yield Invalid("scale", "dtype float64", torch.Tensor.double)
    yield from _invalid_pages(side, wrapper)
    yield from invalid.tensors(side.layout)


def refused(side: Side, wrapper: str) -> Iterator[RefusedCase]:
    """A case for each invalid argument of a wrapper."""
    names = {wrapper: SHORT[wrapper]}
    return invalid.refused_cases(NAME, names, _invalid(side, wrapper), prefix=side.prefix, module=side.module)
