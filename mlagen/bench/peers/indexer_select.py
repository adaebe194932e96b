"""Peers of scores and their top-k: DeepGEMM's logits, and then one of vLLM's three operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from mlagen.bench.families.indexer_select import PAGED, PickInputs, PickShape, by_rows, chain
from mlagen.bench.families.topk import DECODE, PREFILL
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers import mqa_logits
from mlagen.bench.peers.libraries import DEEP_GEMM
from mlagen.bench.peers.topk import COOPERATIVE_ROWS, WORKSPACE, WORKSPACE_PICKS, cuda_operator
from mlagen.bench.trial import Call, Entrant


def _per_row(shape: PickShape, inputs: PickInputs) -> Call:
    select = partial(by_rows, cuda_operator(PREFILL), cuda_operator(DECODE))
    return chain(inputs, mqa_logits.prepare(shape.logits.kind, inputs.logits), select)


def _with_workspace(name: str, shape: PickShape, inputs: PickInputs) -> Call:
    function, lens = cuda_operator(name), inputs.logits.end[:, 0].contiguous()
    space = torch.zeros(WORKSPACE, dtype=torch.uint8, device=lens.device)

    def select(scores: torch.Tensor, one: PickInputs) -> Any:
        function(scores, lens, one.indices, space, shape.topk, one.logits.context)

    return chain(inputs, mqa_logits.prepare(shape.logits.kind, inputs.logits), select)


def indexer_select_peers(
    package: BenchPackage, shape: PickShape, inputs: Sequence[PickInputs]
) -> Iterator[Entrant[PickInputs]]:
    """Others' kernels at a shape of the family."""
    off = mqa_logits.unsupported(shape.logits, inputs[0].logits)
    yield Entrant(f"{DEEP_GEMM}, vLLM per row", partial(_per_row, shape), off)
    if shape.kind != PAGED:
        return
    picks = None if shape.topk in WORKSPACE_PICKS else f"topk {', '.join(map(str, WORKSPACE_PICKS))} only"
    yield Entrant(f"{DEEP_GEMM}, vLLM persistent", partial(_with_workspace, "persistent_topk", shape), off or picks)
    few = picks or (None if shape.tokens <= COOPERATIVE_ROWS else f"{COOPERATIVE_ROWS} rows at most")
    yield Entrant(f"{DEEP_GEMM}, vLLM cooperative", partial(_with_workspace, "cooperative_topk", shape), off or few)


BENCHMARKS = {"indexer_select": indexer_select_peers}
