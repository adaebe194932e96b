"""Peer of the quantisation of attention's output: vLLM's function for DeepSeek V4, in Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mlagen.bench.families.out_quant import KINDS, OutQuantInputs, out_quant_call
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import VLLM_TRITON, triton_op
from mlagen.bench.shapes import Batch
from mlagen.bench.trial import Call, Entrant
from mlagen.verify.out_quant.side import WRAPPER, side_of

MODULE = "vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant"


def out_quant_peers(
    package: BenchPackage, batch: Batch, inputs: Sequence[OutQuantInputs]
) -> Iterator[Entrant[OutQuantInputs]]:
    """Others' functions at a batch of the family."""
    side = side_of(package.spec)
    assert side is not None

    def prepare(given: OutQuantInputs) -> Call:
        return out_quant_call(triton_op(WRAPPER, MODULE), KINDS[batch.kind], given)

    known = package.dtype == torch.bfloat16 and (side.columns, side.rope) == (512, 64)
    yield Entrant(VLLM_TRITON, prepare, None if known else "bf16 heads of 512 columns with 64 of RoPE only")


BENCHMARKS = {"out_quant": out_quant_peers}
