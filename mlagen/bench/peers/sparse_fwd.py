"""Peers of sparse attention over rows: vLLM's kernel in Triton, FlashMLA, FlashAttention-3 and FlashInfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Protocol

import torch

from mlagen.bench.families.sparse_fwd import SparseFwdInputs, SparseFwdShape
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import (
    D_C,
    D_ROPE,
    FLASH_MLA,
    FLASH_MLA_HEADS,
    FLASH_MLA_MODULES,
    VLLM_TRITON,
    first_module,
    flash_attention_3_call,
    flashinfer_call,
    pad_heads,
)
from mlagen.bench.rotation import rotated_after
from mlagen.bench.trial import Call, Entrant
from mlagen.verify.call.facts import Facts


class SparseFwdPeer(Protocol):
    """A kernel of someone else's.

    Attributes:
        name: as reports show it.
    """

    name: str

    def unsupported(self, shape: SparseFwdShape, facts: Facts) -> str | None:
        """Why the peer cannot run a shape of a spec, in one line; None if it can."""

    def prepare(self, inputs: SparseFwdInputs) -> Call:
        """A call that returns [tokens, num_heads, d_v]. Work that engines do once (padding, plans) is done here.

        Raises:
            ImportError: the peer is not there.
        """


class VllmTriton:
    """vLLM's Triton sparse MLA kernel, as module `seed_sparse` or where vLLM keeps it."""

    name = VLLM_TRITON
    modules = ("seed_sparse", "vllm.v1.attention.ops.triton_mla_sparse")

    def unsupported(self, shape: SparseFwdShape, facts: Facts) -> str | None:
        """It knows rows of 512 + 64 bf16 columns, flat, without sink or lengths."""
        if (facts.d_qk, facts.d_v, facts.dtype) != (576, 512, "bfloat16"):
            return "bf16 rows of 512 + 64 columns only"
        if facts.block_size is not None or "required" in (facts.sink, facts.length):
            return "flat rows without sink or lengths only"
        return "topk must be a multiple of 16" if shape.topk % 16 else None

    def prepare(self, inputs: SparseFwdInputs) -> Call:
        """A plain call: it plans nothing ahead."""
        attention = first_module(self.modules).triton_mla_sparse_attention
        return lambda: attention(inputs.q, inputs.kv, inputs.indices, inputs.sm_scale)


class FlashMla:
    """FlashMLA's sparse prefill kernel, from vLLM or its own package. Heads are padded to 64 or 128 before timing."""

    name = FLASH_MLA

    def unsupported(self, shape: SparseFwdShape, facts: Facts) -> str | None:
        """It knows bf16 rows of 576 or 512 columns, flat."""
        if facts.d_qk not in (512, 576) or (facts.d_v, facts.dtype) != (512, "bfloat16"):
            return "bf16 rows of 512 or 576 columns only"
        if facts.block_size is not None:
            return "flat rows only"
        if shape.num_heads > FLASH_MLA_HEADS[-1]:
            return f"at most {FLASH_MLA_HEADS[-1]} heads"
        return "topk must be a multiple of 64" if shape.topk % 64 else None

    def prepare(self, inputs: SparseFwdInputs) -> Call:
        """Pads q, and the sink with it."""
        attention = first_module(FLASH_MLA_MODULES).flash_mla_sparse_fwd
        heads = inputs.q.shape[1]
        q, sink = pad_heads(inputs.q, inputs.attn_sink)
        arguments = (q, inputs.kv, inputs.indices, inputs.sm_scale, D_C, sink, inputs.topk_length)
        return lambda: attention(*arguments)[0][:, :heads]


def _pages_of_one_row(shape: SparseFwdShape, facts: Facts) -> str | None:
    """Why a paged kernel that takes indices for a block table of pages of one row cannot run a shape, in one line."""
    if (facts.d_c, facts.d_rope, facts.d_v) != (D_C, D_ROPE, D_C):
        return f"rows of {D_C} + {D_ROPE} columns only"
    if facts.block_size is not None or facts.sink == "required":
        return "flat rows without sink only"
    return "absent indices are not supported" if shape.topk > shape.s_kv else None


def _lengths(inputs: SparseFwdInputs) -> torch.Tensor:
    """int32 [tokens]: indices of each query token, all of them where it has no length."""
    if inputs.topk_length is not None:
        return inputs.topk_length
    tokens, _, topk = inputs.indices.shape
    return torch.full((tokens,), topk, dtype=torch.int32, device=inputs.q.device)


class FlashAttention3:
    """FlashAttention-3's paged MLA decode: with pages of one row and the indices as block table it is sparse MLA."""

    name = "FA3 p1"

    def unsupported(self, shape: SparseFwdShape, facts: Facts) -> str | None:
        """It knows 512 + 64 columns, flat, without sink; every index must be valid."""
        return _pages_of_one_row(shape, facts)

    def prepare(self, inputs: SparseFwdInputs) -> Call:
        """Makes the scheduler's metadata."""
        q, cache, indices = inputs.q[:, None], inputs.kv[:, :, None], inputs.indices[:, 0]  # each token a request
        return flash_attention_3_call(q, cache, indices, _lengths(inputs), indices.shape[1], inputs.sm_scale)


class FlashInfer:
    """FlashInfer's paged MLA attention, with pages of one row as FlashAttention-3.

    Its first plan compiles a kernel, and requires nvcc and ninja.
    """

    name = "FlashInfer p1"

    def unsupported(self, shape: SparseFwdShape, facts: Facts) -> str | None:
        """It knows 512 + 64 columns, flat, without sink; every index must be valid."""
        return _pages_of_one_row(shape, facts)

    def prepare(self, inputs: SparseFwdInputs) -> Call:
        """Makes its plan."""
        q = inputs.q[:, None]  # each token a request
        return flashinfer_call(q, inputs.kv, inputs.indices[:, 0], _lengths(inputs), inputs.sm_scale, causal=False)


PEERS: tuple[SparseFwdPeer, ...] = (VllmTriton(), FlashMla(), FlashAttention3(), FlashInfer())


def sparse_fwd_peers(
    package: BenchPackage, shape: SparseFwdShape, inputs: Sequence[SparseFwdInputs]
) -> Iterator[Entrant[SparseFwdInputs]]:
    """Others' kernels at a shape of the family; the rotation of the output is a launch behind them."""
    for peer in PEERS:
        prepare = partial(rotated_after, peer.prepare, attrgetter("angles"))
        yield Entrant(peer.name, prepare, peer.unsupported(shape, package.facts))


BENCHMARKS = dict.fromkeys(("prefill", "decode", "ordered", "shared"), sparse_fwd_peers)
