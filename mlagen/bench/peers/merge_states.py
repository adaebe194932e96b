"""Peers of merges: vLLM's kernels in Triton and in CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mlagen.bench.families.merge_states import STATES, MergeStatesInputs, MergeStatesShape, merge_call
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import VLLM_CUDA, VLLM_TRITON, first_module, load_vllm_operators
from mlagen.bench.trial import Entrant

MERGE_OPS = ("vllm.v1.attention.ops.triton_merge_attn_states",)


def triton_merge() -> Callable[..., Any]:
    """vLLM's merge in Triton. Raises ImportError where it is not installed."""
    return first_module(MERGE_OPS).merge_attn_states  # type: ignore[no-any-return]


def cuda_merge() -> Callable[..., Any]:
    """vLLM's merge in CUDA, with the signature of that in Triton. Raises ImportError where it is not installed."""
    load_vllm_operators()
    merge = getattr(torch.ops._C, "merge_attn_states", None)
    if merge is None:
        raise ImportError("vLLM's library has no merge_attn_states")

    def call(out: Any, prefix: Any, prefix_lse: Any, suffix: Any, suffix_lse: Any, out_lse: Any) -> None:
        merge(out, out_lse, prefix, prefix_lse, suffix, suffix_lse, None)  # None: all tokens have both parts

    return call


def merge_states_peers(
    package: BenchPackage, shape: MergeStatesShape, inputs: Sequence[MergeStatesInputs]
) -> Iterator[Entrant[MergeStatesInputs]]:
    """Others' kernels at a shape of the family, of two parts."""
    if shape.kind == STATES:
        yield Entrant(VLLM_TRITON, lambda each: merge_call(STATES, triton_merge(), each))
        yield Entrant(VLLM_CUDA, lambda each: merge_call(STATES, cuda_merge(), each))


BENCHMARKS = {"merge_states": merge_states_peers}
