"""Peers of candidate blocks: vLLM's selection, and DeepGEMM's logits of all keys with vLLM's mask and top-k."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from mlagen.bench.families.candidates import SELECT, CandidateInputs, CandidateShape, select_call
from mlagen.bench.families.indexer_select import by_rows, chain
from mlagen.bench.families.topk import DECODE, PREFILL
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers import mqa_logits
from mlagen.bench.peers.libraries import DEEP_GEMM, VLLM_TRITON, triton_op
from mlagen.bench.peers.topk import cuda_operator
from mlagen.bench.trial import Call, Entrant

OPS = "vllm.model_executor.kernels.attention.dsa.candidate_blocks"


def _select(inputs: CandidateInputs) -> Call:
    return select_call(triton_op(SELECT, OPS), inputs)


def _masked(shape: CandidateShape, inputs: CandidateInputs) -> Call:
    """Logits of all keys, a mask of those outside the blocks, and a top-k of the rest, as vLLM does before sm100."""
    picks = inputs.picks
    assert picks is not None
    mask, ends = triton_op("apply_candidate_mask", OPS), picks.logits.end.flatten().contiguous()
    select = partial(by_rows, cuda_operator(PREFILL), cuda_operator(DECODE))

    def masked(scores: Any, one: Any) -> Any:
        mask(scores, picks.logits.start, ends, inputs.blocks, inputs.block)
        select(scores, one)

    return chain(picks, mqa_logits.prepare(shape.over_all_keys.logits.kind, picks.logits), masked)


def candidate_peers(
    package: BenchPackage, shape: CandidateShape, inputs: Sequence[CandidateInputs]
) -> Iterator[Entrant[CandidateInputs]]:
    """Others' kernels at a shape of the family."""
    if shape.kind == SELECT:
        yield Entrant(VLLM_TRITON, _select)
        return
    first = inputs[0].picks
    assert first is not None
    off = mqa_logits.unsupported(shape.over_all_keys.logits, first.logits)
    off = off or (None if shape.s_q == 1 or first.logits.block_table is None else "one query token a request only")
    yield Entrant(f"{DEEP_GEMM}, vLLM mask and per row", partial(_masked, shape), off)


BENCHMARKS = {"candidates": candidate_peers}
