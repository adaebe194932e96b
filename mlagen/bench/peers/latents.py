"""Peers of latents: vLLM's functions of V4.1, in Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mlagen.bench.families.latents import KINDS, LatentsInputs, latents_call
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import VLLM_TRITON, triton_op
from mlagen.bench.shapes import Batch
from mlagen.bench.trial import Call, Entrant
from mlagen.verify.latents.side import INSERT, side_of

MODULE = "vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache"
LAYOUTS = ("ue8m0_v4", "mxfp8_v41", "nvfp4_v41")  # that vLLM inserts


def latents_peers(
    package: BenchPackage, batch: Batch, inputs: Sequence[LatentsInputs]
) -> Iterator[Entrant[LatentsInputs]]:
    """Others' functions at a batch of the family."""
    kind, side = KINDS[batch.kind], side_of(package.spec)
    assert side is not None

    def prepare(given: LatentsInputs) -> Call:
        return latents_call(triton_op(kind.wrapper, MODULE), package, kind, given)

    unknown = None if package.dtype == torch.bfloat16 and side.columns == 512 else "bf16 latents of 512 columns only"
    if kind.wrapper == INSERT and side.layout.name not in LAYOUTS:
        unknown = f"layout {' or '.join(LAYOUTS)} only"
    yield Entrant(VLLM_TRITON, prepare, unknown)


BENCHMARKS = {"latents": latents_peers}
