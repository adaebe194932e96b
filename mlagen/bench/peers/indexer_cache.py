"""Peers of the functions around the indexer's keys: vLLM's, in CUDA by their torch ops, and in Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mlagen.bench.families.indexer_cache import CALLS, KeyInputs, Keys, keys_of
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import VLLM_CUDA, VLLM_TRITON, load_vllm_operators, triton_op
from mlagen.bench.shapes import Batch
from mlagen.bench.trial import Call, Entrant
from mlagen.verify.indexer_cache.side import GATHER, KEYS_QUERY, QUERY, WRITE

V4_OPS, V41_OPS = "vllm.models.deepseek_v4.common.ops", "vllm.models.deepseek_v41.common.ops"


def _op(kind: str) -> Callable[..., Any]:
    """One of vLLM's functions. Raises ImportError where it is not installed."""
    if kind in (WRITE, GATHER):
        load_vllm_operators()
        return getattr(torch.ops._C_cache_ops, kind)  # type: ignore[no-any-return]
    return triton_op(kind, V4_OPS if kind == QUERY else V41_OPS)


def _unknown(kind: str, keys: Keys) -> str | None:
    """Why vLLM's function cannot run on these keys; None if it can."""
    side, named = keys.side, ("indexer_fp8",) if kind in (WRITE, GATHER) else ("indexer_fp8", "indexer_mxfp4")
    if keys.layout.name not in named or keys.layout.columns != 128:
        return f"layout {' or '.join(named)} on 128 columns only"
    if kind not in (WRITE, GATHER) and (side.neox or side.first != 64 or side.rope != 64):
        return "RoPE in pairs on the last 64 columns only"
    return None if keys.package.dtype == torch.bfloat16 else "bf16 rows only"


def indexer_cache_peers(
    package: BenchPackage, batch: Batch, inputs: Sequence[KeyInputs]
) -> Iterator[Entrant[KeyInputs]]:
    """Others' functions at a batch of the family."""
    keys, kind = keys_of(package), batch.kind
    if kind == KEYS_QUERY:  # AITER's, which has AMD's order of bytes
        return

    def prepare(given: KeyInputs) -> Call:
        return CALLS[kind](_op(kind), keys, given)

    yield Entrant(VLLM_CUDA if kind in (WRITE, GATHER) else VLLM_TRITON, prepare, _unknown(kind, keys))


BENCHMARKS = {"indexer_cache": indexer_cache_peers}
