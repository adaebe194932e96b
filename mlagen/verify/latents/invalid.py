"""Arguments that the wrappers of latents must refuse."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.latents.side import NAME, POOL, SHORT, LatentsSide


def _tokens() -> Iterator[Invalid]:
    yield from invalid.tensor("positions", torch.int32)
    yield Invalid("positions", "one short", lambda tensor: tensor[:-1])
    yield from invalid.tensor("slot_mapping", torch.int32)
    yield Invalid("slot_mapping", "longer than the tokens", lambda slots: slots.repeat(3))
    for value in (0, -1, 2.5, None, True, 2**31):
        yield Invalid("compress_ratio", str(value), invalid.constant(value))


def _pools() -> Iterator[Invalid]:
    yield from invalid.tensor("kv_score", torch.float64, first=True)
    yield Invalid("kv_score", "of a group of one token", lambda tensor: tensor[:, : tensor.shape[1] // 2])
    yield from invalid.tensor("state_cache", torch.float64)
    yield Invalid("state_cache", "missing", invalid.constant(None))
    yield Invalid("state_cache", "other columns", invalid.wider(2))
    yield Invalid("state_cache", "rings shorter than a group", lambda states: states[:, :1])
    yield Invalid(
        "state_cache",
        "states that overlap",
        lambda states: states.as_strided(states.shape, (states.stride(0), states.stride(1) - 1, 1)),
    )
    yield from invalid.tensor("query_start_loc", torch.int64)
    yield Invalid("query_start_loc", "empty", lambda starts: starts[:0])
    yield from invalid.tensor("token_to_req_indices", torch.int64)
    yield Invalid("token_to_req_indices", "one short", lambda tensor: tensor[:-1])
    yield from invalid.tensor("rms_norm_weight", torch.float64)
    yield Invalid("rms_norm_weight", "longer than a latent", invalid.longer)
    yield from invalid.tensor("latent_out", torch.float64)
    yield Invalid("latent_out", "a token short", lambda latents: latents[1:])
    yield Invalid("latent_out", "wider", invalid.wider(8))
    yield Invalid("latent_out", "rows that overlap", lambda latents: latents[:1].expand(len(latents), -1))
    yield Invalid("rms_norm_eps", "'1'", invalid.constant("1"))
    yield Invalid("prev_rows", "given", lambda rows: rows, like="kv_score")
    yield Invalid("prev_row_indices", "given", lambda starts: starts, like="query_start_loc")


def _inserts(side: LatentsSide) -> Iterator[Invalid]:
    layout = side.layout
    yield from invalid.tensor("latent", torch.float64, first=True)
    yield Invalid("latent", "wider", invalid.wider(8))
    yield from invalid.tensor("cos_sin_cache", torch.float64)
    yield Invalid("cos_sin_cache", "wider", invalid.wider(2))
    yield from invalid.tensor("kv_cache", torch.float32)
    yield Invalid("kv_cache", "wider rows", invalid.wider(16), layout.name)
    if layout.tensor_scale:
        yield Invalid("fp8_scale", "missing", invalid.constant(None))
        yield Invalid("fp8_scale", "a number", invalid.constant(1.0))
        yield Invalid("fp8_scale", "two of them", lambda scale: scale.repeat(2))


def refused(side: LatentsSide, wrapper: str) -> Iterator[RefusedCase]:
    """A case for each invalid argument of a wrapper."""
    found = [*_tokens(), *(_pools() if wrapper == POOL else _inserts(side))]
    yield from invalid.refused_cases(NAME, {wrapper: SHORT[wrapper]}, found, prefix="latents ")
