"""Peers of the compressor: vLLM's, in Triton. Its CuTe DSL kernels for attention's rows take the same arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mlagen.bench.families.compressor import KINDS, CompressorInputs, compress_call, rows_in, save_call
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import VLLM_TRITON, triton_op
from mlagen.bench.shapes import Batch
from mlagen.bench.trial import Call, Entrant
from mlagen.verify.compressor.side import SAVE

OPS = "vllm.models.deepseek_v4.common.ops"
# Of the layouts that vLLM knows: columns a scale, bytes of a row's values, and bytes of its scales.
SIZES = {"ue8m0_v4": (64, 576, 8), "indexer_fp8": (128, 128, 4), "indexer_mxfp4": (32, 64, 4)}


def compressor_peers(
    package: BenchPackage, batch: Batch, inputs: Sequence[CompressorInputs]
) -> Iterator[Entrant[CompressorInputs]]:
    """Others' functions at a batch of the family."""
    rows = rows_in(package, KINDS[batch.kind])
    assert rows is not None
    sizes = SIZES.get(rows.side.layout.name)

    def prepare(given: CompressorInputs) -> Call:
        if rows.kind.wrapper == SAVE:
            return save_call(triton_op("save_partial_states", f"{OPS}.save_partial_states"), rows, given)
        function = triton_op("compress_norm_rope_store_triton", f"{OPS}.fused_compress_quant_cache")
        return compress_call(function, rows, given, *(sizes or ()), metadata=True)

    unknown = None if package.dtype == torch.bfloat16 else "bf16 rows only"
    if rows.kind.wrapper != SAVE and sizes is None:
        unknown = f"layout {' or '.join(SIZES)} only"
    yield Entrant(VLLM_TRITON, prepare, unknown)


BENCHMARKS = {"compressor": compressor_peers}
