"""Sparse attention over rows as the model computes them: the families `prefill`, `decode` and `shared`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mlagen.bench.check import Reference, error_limit
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.sparse_fwd import PEERS
from mlagen.bench.shapes import (
    PREFILL_S_KV,
    PREFILL_TOKENS,
    SHARES,
    Inputs,
    Shape,
    SharedShape,
    default_shapes,
    make_inputs,
)
from mlagen.bench.trial import APART, BATCH_INVARIANT, OURS, Entrant, Setting, Trial

WRAPPERS = ("triton_mla_sparse_attention", "flash_mla_sparse_fwd")  # the one that gives out alone first
EAGER_TOKENS = 1  # a call of so few tokens is bound by its launch, which is what eager time shows


def shapes_of(kind: str, package: BenchPackage, heads: Sequence[int] | None) -> list[Shape]:
    """Shapes that a package's sparse attention is measured at."""
    if not any(package.has(wrapper) for wrapper in WRAPPERS):
        return []
    return default_shapes(package.facts, (kind,), heads)


def shared_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[Shape]:
    """Prefills whose neighbouring tokens share indices; none if the package's load each its own rows."""
    group = package.facts.shared_indices
    if group is None:
        return []
    return [
        SharedShape("shared", PREFILL_TOKENS, num_heads, s_kv, package.facts.topk, share)
        for num_heads in heads or (package.module("sparse_fwd").GROUP_HEADS,)
        for s_kv in PREFILL_S_KV
        if s_kv >= package.facts.topk
        for share in SHARES
    ]


def call_of(package: BenchPackage, inputs: Inputs, *, batch_invariant: bool = False) -> Callable[[], torch.Tensor]:
    """A call of the plainest wrapper there is; the wrapper allocates out and workspace each time."""
    attention = package.wrapper(next(name for name in WRAPPERS if package.has(name)))
    options: dict[str, Any] = {"enable_batch_invariant": batch_invariant}
    if inputs.attn_sink is not None:
        options["attn_sink"] = inputs.attn_sink
    if inputs.topk_length is not None:
        options["topk_length"] = inputs.topk_length

    def call() -> torch.Tensor:
        result = attention(inputs.q, inputs.kv, inputs.indices, inputs.sm_scale, **options)
        out = result[0] if isinstance(result, tuple) else result
        assert isinstance(out, torch.Tensor)
        return out

    return call


def call_apart(package: BenchPackage, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """As `call_of`, with each token loading its own rows."""
    module = package.module("sparse_fwd")
    call = call_of(package, inputs)
    own = module._schedule

    def apart(*arguments: Any) -> Any:
        return own(*arguments[:-1], False)  # the last one says whether rows may be shared

    def run() -> torch.Tensor:
        module._schedule = apart
        try:
            return call()
        finally:
            module._schedule = own

    return run


def trials(setting: Setting) -> Callable[[Shape], Trial[Inputs]]:
    """Makes shapes ready."""
    package = setting.package
    facts = package.facts
    peers = PEERS if setting.peers else ()

    def trial(shape: Shape) -> Trial[Inputs]:
        inputs = make_inputs(shape, facts, setting.device, setting.l2_bytes)
        entrants = [
            Entrant(OURS, partial(call_of, package)),
            Entrant(APART, partial(call_apart, package))
            if isinstance(shape, SharedShape)
            else Entrant(BATCH_INVARIANT, partial(call_of, package, batch_invariant=True)),
            *(Entrant(peer.name, peer.prepare, peer.unsupported(shape, facts)) for peer in peers),
        ]
        return Trial(
            inputs=inputs,
            entrants=entrants,
            error_of=Reference(inputs[0], facts).error_of,
            error_limit=error_limit(inputs[0].q.dtype, facts.partials),
            flops=shape.flops(facts),
            bytes_moved=shape.bytes_moved(facts, package.row_bytes),
            roof=setting.roof,
            launch_bound=shape.tokens <= EAGER_TOKENS,
        )

    return trial
