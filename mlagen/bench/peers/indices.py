"""Peers of the index kernels: vLLM's in Triton, with the signatures of the wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from mlagen.bench.families.indices import CALLS, CONVERT
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import TRITON_OPS, VLLM_TRITON, triton_op
from mlagen.bench.shapes import Batch
from mlagen.bench.trial import Call, Entrant

CONVERT_OPS = "vllm.v1.attention.backends.mla.sparse_utils"


def prepare(kind: str, inputs: Any) -> Call:
    """A call of vLLM's kernel of that name. Raises ImportError where it is not installed."""
    return CALLS[kind](triton_op(kind, CONVERT_OPS if kind == CONVERT else TRITON_OPS), inputs)


def indices_peers(package: BenchPackage, batch: Batch, inputs: Sequence[Any]) -> Iterator[Entrant[Any]]:
    """Others' kernels at a batch of the family."""
    yield Entrant(VLLM_TRITON, partial(prepare, batch.kind))


BENCHMARKS = {"indices": indices_peers}
