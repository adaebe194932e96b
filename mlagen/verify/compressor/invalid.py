"""Arguments that the compressor must refuse."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.compressor.side import COMPRESS, NAME, SAVE, CompressorSide


def _crowded(states: torch.Tensor) -> torch.Tensor:
    """The same states, each an element closer to the one before."""
    return states.as_strided(states.shape, (states.stride(0), states.stride(1) - 1, 1))


def _both() -> Iterator[Invalid]:
    yield from invalid.tensor("state_cache", torch.float64)
    yield Invalid("state_cache", "other columns", invalid.wider(2))
    yield Invalid("state_cache", "states that overlap", _crowded)
    yield from invalid.tensor("positions", torch.int32)
    yield Invalid("positions", "one short", lambda tensor: tensor[:-1])
    yield from invalid.tensor("slot_mapping", torch.int32)
    for argument in ("block_size", "state_width", "compress_ratio"):
        for value in (0, -1, 2.5, None, True, 2**31):
            yield Invalid(argument, str(value), invalid.constant(value))
    yield Invalid("state_cache", "another block size", lambda states: states[:, :-1])


def _saves() -> Iterator[Invalid]:
    yield from invalid.tensor("kv", torch.float64, first=True)
    yield from invalid.tensor("score", torch.float64)
    yield Invalid("score", "of another dtype", lambda score: score.half())
    yield Invalid("score", "a token short", lambda score: score[1:])
    yield from invalid.tensor("ape", torch.float64)
    yield Invalid("ape", "of another ratio", lambda ape: ape[1:])
    yield Invalid("slot_mapping", "longer than the tokens", lambda slots: slots.repeat(3))
    for argument in ("score", "ape"):
        yield Invalid(argument, "wider than kv", invalid.wider(4))


def _compresses(side: CompressorSide) -> Iterator[Invalid]:
    layout = side.layout
    yield from invalid.tensor("token_to_req_indices", torch.int64)
    yield Invalid("token_to_req_indices", "one short", lambda tensor: tensor[:-1])
    yield from invalid.tensor("block_table", torch.int64)
    yield from invalid.tensor("cos_sin_cache", torch.float64)
    yield Invalid("cos_sin_cache", "wider", invalid.wider(2))
    yield from invalid.tensor("kv_cache", torch.float32)
    yield Invalid("kv_cache", "wider rows", invalid.wider(16), layout.name)
    yield from invalid.tensor("k_cache_metadata", torch.int32)
    yield from invalid.tensor("rms_norm_weight", torch.float64)
    yield Invalid("rms_norm_weight", "longer than a row", invalid.longer)
    for argument in ("head_dim", "rope_head_dim"):
        for value in (3, None, "512"):
            yield Invalid(argument, repr(value), invalid.constant(value))
    for argument, value in (("use_fp4_cache", not side.packed), ("use_fp4_cache", None), ("rms_norm_eps", "1")):
        yield Invalid(argument, repr(value), invalid.constant(value))
    yield from (one for one in invalid.flag("overlap") if one.how != "a tensor")
    for count in (-1, 2.5, None, True):
        yield Invalid("num_actual", str(count), invalid.constant(count))
    yield Invalid("state_width", "narrower than a row", invalid.constant(8))
    if layout.tensor_scale:
        yield Invalid("fp8_scale", "missing", invalid.constant(None))
        yield Invalid("fp8_scale", "a number", invalid.constant(1.0))
        yield Invalid("fp8_scale", "two of them", lambda scale: scale.repeat(2))


def refused(side: CompressorSide, wrapper: str) -> Iterator[RefusedCase]:
    """A case for each invalid argument of a wrapper."""
    if wrapper == SAVE:
        yield from invalid.refused_cases(NAME, {SAVE: "save"}, [*_both(), *_saves()], prefix="compressor ")
    else:
        found = [one for one in _both() if not (one.argument == "state_cache" and one.how == "another device")]
        found = [*found, *_compresses(side)]
        yield from invalid.refused_cases(NAME, {COMPRESS: side.short}, found, prefix="compressor ")
