"""Peers of pools of keys: vLLM's, in Triton, with the same arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mlagen.bench.families.kpool import KpoolInputs, kpool_call, pools_of
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import VLLM_TRITON, triton_op
from mlagen.bench.shapes import Batch
from mlagen.bench.trial import Call, Entrant
from mlagen.verify.kpool.side import EXPAND, SEED

OPS = "vllm.models.glm5next.nvidia.ops.kpool_compress"
LAYOUT = "indexer_fp8"


def kpool_peers(package: BenchPackage, batch: Batch, inputs: Sequence[KpoolInputs]) -> Iterator[Entrant[KpoolInputs]]:
    """Others' functions at a batch of the family."""
    side = pools_of(package).side

    def prepare(given: KpoolInputs) -> Call:
        return kpool_call(triton_op(batch.kind, OPS), given)

    unknown = None if package.dtype == torch.bfloat16 else "bf16 rows only"
    if batch.kind not in (EXPAND, SEED) and (side is None or side.layout.name != LAYOUT):
        unknown = f"layout {LAYOUT} only"
    yield Entrant(VLLM_TRITON, prepare, unknown)


BENCHMARKS = {"kpool": kpool_peers}
