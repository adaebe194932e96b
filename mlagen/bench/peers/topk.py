"""Peers of top-k: vLLM's three operators, in CUDA, and torch.topk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from mlagen.bench.families.topk import DECODE, TopkInputs, TopkShape, call_of
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import load_vllm_operators
from mlagen.bench.trial import Call, Entrant

WORKSPACE = 1 << 20  # bytes
WORKSPACE_PICKS = (512, 1024, 2048)
COOPERATIVE_ROWS = 32


def cuda_operator(name: str) -> Callable[..., Any]:
    """One of vLLM's CUDA ops. Raises ImportError where they are not installed."""
    load_vllm_operators()
    return getattr(torch.ops._C, name)  # type: ignore[no-any-return]


def _per_row(kind: str, inputs: TopkInputs) -> Call:
    return call_of(kind, cuda_operator(kind), inputs)


def _with_workspace(name: str, inputs: TopkInputs) -> Call:
    function, (_, columns) = cuda_operator(name), inputs.logits.shape
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=inputs.logits.device)

    def call() -> torch.Tensor:
        function(inputs.logits, inputs.ends, inputs.indices, workspace, inputs.indices.shape[1], columns)
        return inputs.indices

    return call


def _torch(inputs: TopkInputs) -> Call:
    k = inputs.indices.shape[1]
    return lambda: torch.topk(inputs.logits, k, dim=1, sorted=False).indices


def topk_peers(package: BenchPackage, shape: TopkShape, inputs: Sequence[Any]) -> Iterator[Entrant[Any]]:
    """Others' kernels at a shape of the family; torch.topk knows no rows of different lengths."""
    yield Entrant("vLLM per row", partial(_per_row, shape.kind))
    if shape.kind != DECODE:
        return
    picks = None if shape.topk in WORKSPACE_PICKS else f"topk {', '.join(map(str, WORKSPACE_PICKS))} only"
    yield Entrant("vLLM persistent", partial(_with_workspace, "persistent_topk"), picks)
    few = picks or (None if shape.tokens <= COOPERATIVE_ROWS else f"{COOPERATIVE_ROWS} rows at most")
    yield Entrant("vLLM cooperative", partial(_with_workspace, "cooperative_topk"), few)
    yield Entrant("torch.topk", _torch)


BENCHMARKS = {"topk": topk_peers}
