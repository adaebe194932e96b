"""Peers of attention's prologue: vLLM's, in CUDA by their torch ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mlagen.bench.families.prologue import PrologueInputs, concat_call, padded_call, rows_in
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import VLLM_CUDA, load_vllm_operators
from mlagen.bench.shapes import Batch
from mlagen.bench.trial import Call, Entrant
from mlagen.verify.prologue.side import PADDED

CUDA_DTYPES = {"bf16": "auto", "fp8_per_tensor": "fp8"}  # vLLM's names of the layouts that its MLA function knows
V4 = "ue8m0_v4"


def prologue_peers(
    package: BenchPackage, batch: Batch, inputs: Sequence[PrologueInputs]
) -> Iterator[Entrant[PrologueInputs]]:
    """Others' functions at a batch of the family."""
    rows, whole = rows_in(package), batch.kind == PADDED
    layout = rows.side.layout

    def prepare(given: PrologueInputs) -> Call:
        load_vllm_operators()
        if whole:
            return padded_call(torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert, rows, given)
        function = torch.ops._C_cache_ops.concat_and_cache_mla_rope_fused
        return concat_call(function, rows, given, CUDA_DTYPES[layout.name])

    unknown = None if package.dtype == torch.bfloat16 else "bf16 rows only"
    if whole and (layout.name != V4 or rows.side.neox):
        unknown = f"layout {V4} with RoPE in pairs only"
    elif not whole and layout.name not in CUDA_DTYPES:
        unknown = f"layout {' or '.join(CUDA_DTYPES)} only"
    yield Entrant(VLLM_CUDA, prepare, unknown)


BENCHMARKS = {"prologue": prologue_peers}
