"""Latents of groups of tokens, and their insertion into attention's cache: the family `latents`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from mlagen.bench.check import relative_error
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import (
    BLOCK_SIZE,
    TENSOR_SCALE,
    Batch,
    batches,
    empty_cache,
    rotation,
    rows_of,
    shuffled_pages,
    slots_of,
)
from mlagen.bench.trial import OURS, Call, Entrant, Family, Setting, Trial
from mlagen.layout.codec import decode, encode, read
from mlagen.verify.latents.reference import Groups, pooled
from mlagen.verify.latents.side import INSERT, POOL, LatentsSide, side_of
from mlagen.verify.paged.rope import rotate
from mlagen.work import insert_bytes, latents_bytes

CONTEXT = 32768  # tokens of the request after the call
CAPACITY = 8  # places of a ring, vLLM's smallest
EPS = 1e-6
POISON = 255  # a byte that makes any row NaN or far from right
TOLERANCE = 1.1  # times the reference's error
ERROR_LIMIT = 0.004  # of a latent that is rounded once
CHECKED = 64  # tokens that are compared
EAGER_TOKENS = 1


class Kind(NamedTuple):
    """A call that is measured: the wrapper, and tokens of a group."""

    wrapper: str
    ratio: int


KINDS = {f"{wrapper} of {ratio}": Kind(wrapper, ratio) for wrapper in (POOL, INSERT) for ratio in (1, 2)}


@dataclass(frozen=True)
class LatentsInputs:
    """Tensors of a call.

    Attributes:
        kv_score: fp32 [T, columns or, with scores, 2 * columns].
        positions, slots: of the tokens.
        states, starts, requests, rings: the ring, and where tokens are in it.
        weight: of the norm.
        latents: results of POOL, and the rows that INSERT takes.
        angles: fp32 [CONTEXT, rope].
        cache: uint8 [pages, page_bytes].
        scale: f32 [1], the tensor's.
    """

    kv_score: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    states: torch.Tensor
    starts: torch.Tensor
    requests: torch.Tensor
    rings: torch.Tensor
    weight: torch.Tensor
    latents: torch.Tensor
    angles: torch.Tensor
    cache: torch.Tensor
    scale: torch.Tensor


def _block_size(package: BenchPackage) -> int:
    """Rows a page of the cache that latents go to."""
    cache = package.spec.get("extra_cache") or package.spec["cache"]
    return cache["block_size"] or BLOCK_SIZE


def latents_call(function: Callable[..., Any], package: BenchPackage, kind: Kind, inputs: LatentsInputs) -> Call:
    """A call, ours or a peer's."""
    side = side_of(package.spec)
    assert side is not None
    if kind.wrapper == POOL:
        ring: tuple[torch.Tensor | None, ...] = (None, inputs.slots, None, None)
        if kind.ratio > 1:
            ring = (inputs.states, inputs.rings, inputs.starts, inputs.requests)
        first = (inputs.kv_score, inputs.positions, *ring, inputs.weight, EPS, kind.ratio, inputs.latents)
        return lambda: function(*first)
    cache = rows_of(side.layout, inputs.cache, _block_size(package), package.dtype)
    named = {"fp8_scale": inputs.scale} if side.layout.tensor_scale else {}
    given = (inputs.latents, inputs.positions, inputs.angles, cache, inputs.slots, kind.ratio)
    return lambda: function(*given, **named)


def latents_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[Batch]:
    """Batches that latents are measured at: the last tokens of a request."""
    found: list[Batch] = []
    for name, kind in KINDS.items():
        if package.has(kind.wrapper) and side_of(package.spec) is not None:
            found += [batch for batch in batches("latents", name) if batch.requests == 1]
    return found


def make_latents_inputs(
    batch: Batch, package: BenchPackage, side: LatentsSide, device: torch.device, sets: int
) -> list[LatentsInputs]:
    """Rotating input sets: each has states, latents and rows of its own."""
    kind, tokens, size = KINDS[batch.kind], batch.tokens, _block_size(package)
    made = -(-tokens // kind.ratio)
    row_pages = -(-made // size)
    cache = empty_cache(side.layout, sets * row_pages, size, device)
    pages = shuffled_pages(sets, row_pages, device=device)
    positions = torch.arange(CONTEXT - tokens, CONTEXT, device=device)
    works = (positions + 1) % kind.ratio == 0
    angle = torch.rand(CONTEXT, side.rope // 2, device=device) * 6.28
    found = []
    for one in range(sets):
        slots = torch.full((tokens,), -1, device=device)
        slots[works] = slots_of(pages[one], int(works.sum()), size)
        found.append(
            LatentsInputs(
                kv_score=torch.randn(tokens, side.columns * (2 if kind.ratio > 1 else 1), device=device),
                positions=positions,
                slots=slots,
                states=torch.randn(1, CAPACITY, 2 * side.columns, device=device),
                starts=torch.tensor([0, tokens], dtype=torch.int32, device=device),
                requests=torch.zeros(tokens, dtype=torch.int32, device=device),
                rings=positions % CAPACITY,
                weight=torch.rand(side.columns, device=device).to(package.dtype) + 0.5,
                latents=torch.randn(tokens, side.columns, device=device).to(package.dtype),
                angles=torch.cat([angle.cos(), angle.sin()], 1),
                cache=cache,
                scale=torch.full((1,), TENSOR_SCALE, device=device),
            )
        )
    return found


def latents_error(package: BenchPackage, kind: Kind, inputs: LatentsInputs, call: Call) -> float:
    """Error of latents, or of rows relative to that of their own quantisation."""
    side = side_of(package.spec)
    assert side is not None
    some = slice(max(0, len(inputs.positions) - CHECKED), None)
    if kind.wrapper == POOL:
        pools = kind.ratio > 1
        states = inputs.states.cpu().clone() if pools else None
        inputs.latents.fill_(float("nan"))
        call()
        places = (inputs.rings if pools else inputs.slots)[some].tolist()
        starts, requests = ([0, len(places)], [0] * len(places)) if pools else ([], [])
        values, positions = inputs.kv_score[some].cpu(), inputs.positions[some].tolist()
        groups = Groups(values, positions, places, kind.ratio, states, starts, requests)
        ends, want, _ = pooled(groups, inputs.weight.cpu(), EPS)
        return relative_error(inputs.latents[some].cpu()[ends], want)
    inputs.cache.fill_(POISON)
    call()
    ends = torch.nonzero(inputs.slots[some] >= 0)[:, 0]
    slots, at = inputs.slots[some][ends], inputs.positions[some][ends]
    angles = inputs.angles[at // kind.ratio * kind.ratio].double().cpu()
    wide = rotate(side, inputs.latents[some][ends].double().cpu(), angles)
    row = wide.to(package.dtype)
    kept = relative_error(decode(side.layout, encode(side.layout, row, TENSOR_SCALE), TENSOR_SCALE), wide)
    got = read(side.layout, inputs.cache, _block_size(package), slots, TENSOR_SCALE)
    return relative_error(got.cpu(), wide) / (TOLERANCE * kept)


def latents_trials(setting: Setting) -> Callable[[Batch], Trial[LatentsInputs]]:
    """Makes batches of latents ready."""
    package, device = setting.package, setting.device

    def ours(kind: Kind, inputs: LatentsInputs) -> Call:
        return latents_call(package.wrapper(kind.wrapper), package, kind, inputs)

    def trial(batch: Batch) -> Trial[LatentsInputs]:
        kind, side = KINDS[batch.kind], side_of(package.spec)
        assert side is not None
        groups = -(-batch.tokens // kind.ratio)
        if kind.wrapper == POOL:
            saved = min(batch.tokens, CAPACITY) if kind.ratio > 1 else 0
            moved = latents_bytes(batch.tokens, groups, kind.ratio, side.columns, saved)
        else:
            moved = insert_bytes(batch.tokens, groups, side.columns, side.layout.row_bytes, 4 * side.rope)
        inputs = make_latents_inputs(batch, package, side, device, rotation(moved, setting.l2_bytes))
        return Trial(
            inputs=inputs,
            entrants=[Entrant(OURS, partial(ours, kind))],
            error_of=partial(latents_error, package, kind, inputs[0]),
            error_limit=ERROR_LIMIT if kind.wrapper == POOL else 1.0,
            flops=0,
            bytes_moved=moved,
            roof=setting.copy_roof,
            graph_only=True,
            launch_bound=batch.tokens <= EAGER_TOKENS,
        )

    return trial


BENCHMARKS = {"latents": Family(latents_shapes, latents_trials, ("latents",))}
