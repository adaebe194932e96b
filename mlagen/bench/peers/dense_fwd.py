"""Peers of multi-head attention: FlashAttention-3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlagen.bench.families.dense_fwd import DenseFwdInputs, DenseFwdShape
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import FLASH_ATTENTION_3, flash_attention_3_interface
from mlagen.bench.trial import Call, Entrant


def flash_attention_3(inputs: DenseFwdInputs) -> Call:
    """A call of FlashAttention-3's varlen prefill. It also computes the LSE, and returns only out."""
    attention = flash_attention_3_interface().flash_attn_varlen_func
    arguments = {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "cu_seqlens_q": inputs.cu_seqlens,
        "cu_seqlens_k": inputs.cu_seqlens,
        "max_seqlen_q": inputs.longest,
        "max_seqlen_k": inputs.longest,
        "softmax_scale": inputs.scale,
        "causal": True,
        "fa_version": 3,
    }
    return lambda: attention(**arguments)


def dense_fwd_peers(
    package: BenchPackage, shape: DenseFwdShape, inputs: Sequence[DenseFwdInputs]
) -> Iterator[Entrant[DenseFwdInputs]]:
    """Others' kernels at a shape of the family."""
    yield Entrant(FLASH_ATTENTION_3, flash_attention_3)


BENCHMARKS = {"dense_fwd": dense_fwd_peers}
