"""Arguments that the functions around pools of keys must refuse."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.kpool.side import COMPRESS, EXPAND, NAME, QUERY, SEED, SHORT, UPDATE, KpoolSide


def _sizes(*names: str) -> Iterator[Invalid]:
    for name in names:
        for value in (0, -1, 2.5, None, True, 2**31):
            yield Invalid(name, str(value), invalid.constant(value))


def _head_dim() -> Iterator[Invalid]:
    for value in (64, None, "128"):
        yield Invalid("head_dim", repr(value), invalid.constant(value))


def _crowded(tail: torch.Tensor) -> torch.Tensor:
    """The same tails, each ring an element closer to the one before."""
    return tail.as_strided(tail.shape, (*tail.stride()[:2], tail.stride(2) - 1, 1))


def _tail() -> Iterator[Invalid]:
    yield from invalid.tensor("tail_kv_cache", torch.float64)
    yield Invalid("tail_kv_cache", "wider", invalid.wider(8))
    yield Invalid("tail_kv_cache", "rings of 3 tokens", lambda tail: tail[:, :, :3])
    yield Invalid("tail_kv_cache", "rings that are no pools", lambda tail: tail.repeat(1, 1, 2, 1)[:, :, :6])
    yield Invalid("tail_kv_cache", "one half", lambda tail: tail[:, :1])
    yield Invalid("tail_kv_cache", "rows that overlap", _crowded)


def _integers(name: str) -> Iterator[Invalid]:
    yield from invalid.tensor(name, torch.int16)


def _keys(side: KpoolSide) -> Iterator[Invalid]:
    yield from invalid.tensor("kv_cache", torch.float32)
    yield Invalid("kv_cache", "wider rows", invalid.wider(16), side.layout.name)
    yield from invalid.tensor("ape", torch.float64)
    yield Invalid("ape", "a token short", lambda ape: ape[1:])
    yield from (one for one in invalid.flag("round_scale") if one.how != "a tensor")
    yield Invalid("round_scale", "the other", invalid.constant(not side.rounds))


def _of(side: KpoolSide | None, wrapper: str) -> Iterator[Invalid]:
    if wrapper == QUERY:
        yield from invalid.tensor("q", torch.float64, first=True)
        yield Invalid("q", "wider", invalid.wider(8))
    elif wrapper == EXPAND:
        yield from invalid.tensor("pool_ids", torch.int16, first=True)
        yield from invalid.tensor("seq_lens", torch.int64)
        yield Invalid("seq_lens", "one short", lambda lens: lens[1:])
        yield from _sizes("pool_size")
        yield Invalid("pool_ids", "too many tokens", invalid.constant((1 << 24) - 1), changes="pool_size")
    elif side is not None and wrapper == COMPRESS:
        yield from invalid.tensor("slot_k", torch.float64, first=True)
        yield Invalid("slot_k", "of another pool", lambda k: k[:, 1:])
        yield from invalid.tensor("slot_score", torch.float64)
        yield Invalid("slot_score", "a pool short", lambda score: score[1:])
        yield from invalid.tensor("loc", torch.int32)
        yield Invalid("loc", "one short", lambda loc: loc[1:])
        yield from invalid.tensor("write_mask", torch.uint8)
        yield from _head_dim()
        yield from _keys(side)
        for name, value in (("return_compressed", True), ("write_cache", False)):
            yield Invalid(name, str(value), invalid.constant(value))
            yield Invalid(name, "None", invalid.constant(None))
        yield from _sizes("pool_size")
    elif wrapper == SEED:
        yield from invalid.tensor("key", torch.float64, first=True)
        yield from invalid.tensor("gate_score", torch.float64)
        yield Invalid("gate_score", "one short", lambda score: score[1:])
        yield Invalid("key", "one short", lambda key: key[1:])
        yield from _integers("tslot")
        yield from _sizes("kpool")
        yield from _head_dim()
        yield from _tail()
    elif side is not None and wrapper == UPDATE:
        yield from invalid.tensor("key", torch.float64, first=True)
        yield from invalid.tensor("slot_score", torch.float64)
        yield Invalid("slot_score", "a request short", lambda score: score[1:])
        for name in ("tail_slot_mapping", "slot_mapping", "positions"):
            yield from _integers(name)
            yield Invalid(name, "a request short", lambda tensor: tensor[1:])
        yield from _head_dim()
        yield from _tail()
        yield from _keys(side)
        yield from _sizes("pool_size")


def refused(side: KpoolSide | None, wrapper: str) -> Iterator[RefusedCase]:
    """A case for each invalid argument of a wrapper."""
    yield from invalid.refused_cases(NAME, {wrapper: SHORT[wrapper]}, _of(side, wrapper), prefix="kpool ")
