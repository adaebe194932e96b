"""Peers of dense decode over a paged cache: FlashMLA, FlashAttention-3, FlashInfer and vLLM's kernel in Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import triton

from mlagen.bench.families.dense_decode import E4M3_P_ERROR_LIMIT, Q_SCALE, DenseDecodeInputs, DenseDecodeShape
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import (
    D_C,
    D_ROPE,
    FLASH_ATTENTION_3,
    FLASH_MLA,
    FLASH_MLA_HEADS,
    FLASH_MLA_MODULES,
    VLLM_TRITON,
    first_module,
    flash_attention_3_call,
    flashinfer_call,
    load_packed_library,
    pad_heads,
)
from mlagen.bench.trial import Call, Entrant
from mlagen.verify.call.facts import Facts

TRITON_MODULES = ("vllm.v1.attention.ops.triton_decode_attention",)
FLASH_MLA_BLOCK = 64  # tokens a page
SPLIT_KEYS = 512  # vLLM's rule for splits: so many keys each, a power of two, at most two a multiprocessor
SPLITS_A_MULTIPROCESSOR = 2
TENSOR_SCALED = "fp8_per_tensor"
INT32 = 1 << 31
FP8_LIBRARY = "_flashmla_extension_C"
FP8_ERROR_LIMITS = {"e4m3": E4M3_P_ERROR_LIMIT, "model": 6e-2}  # its P is e4m3; a rounded q costs 4e-2


class DenseDecodePeer(Protocol):
    """Dense attention over a cache, of someone else's.

    Attributes:
        name: as reports show it.
    """

    name: str

    def unsupported(self, facts: Facts, inputs: DenseDecodeInputs) -> str | None:
        """Why it cannot run a call of a package, in one line; None if it can."""

    def prepare(self, inputs: DenseDecodeInputs) -> Call:
        """A call that gives out [..., num_heads, d_v] of all tokens in order.

        Raises:
            ImportError: the peer is not there.
        """


def _plain_rows(facts: Facts, inputs: DenseDecodeInputs) -> str | None:
    """Why kernels that know DeepSeek's unquantised rows alone cannot run a package's, in one line."""
    if inputs.layout.quantised:
        return "unquantised rows only"
    if (facts.d_c, facts.d_rope, facts.d_v, facts.dtype) != (D_C, D_ROPE, D_C, "bfloat16"):
        return f"bf16 rows of {D_C} + {D_ROPE} columns only"
    return None


class FlashMlaDenseDecode:
    """FlashMLA from vLLM or its own package; heads are padded, and the plan is made, outside the timing."""

    name = FLASH_MLA

    def unsupported(self, facts: Facts, inputs: DenseDecodeInputs) -> str | None:
        """It knows pages of 64 tokens and no window."""
        if inputs.block_size != FLASH_MLA_BLOCK:
            return f"pages of {FLASH_MLA_BLOCK} tokens only"
        if inputs.window is not None:
            return "no sliding window"
        if inputs.q.shape[2] > FLASH_MLA_HEADS[-1]:
            return f"at most {FLASH_MLA_HEADS[-1]} heads"
        return _plain_rows(facts, inputs)

    def prepare(self, inputs: DenseDecodeInputs) -> Call:
        """Pads q; the first call fills the metadata."""
        module = first_module(FLASH_MLA_MODULES)
        heads = inputs.q.shape[2]
        q, _ = pad_heads(inputs.q)
        metadata, _ = module.get_mla_metadata()
        arguments = (q, inputs.cache, inputs.block_table, inputs.lengths, inputs.d_v, metadata)
        options = {"softmax_scale": inputs.sm_scale, "causal": inputs.causal}

        def call() -> torch.Tensor:
            out, _ = module.flash_mla_with_kvcache(*arguments, **options)
            assert isinstance(out, torch.Tensor)
            return out[:, :, :heads]

        call()
        return call


class FlashAttention3DenseDecode:
    """FlashAttention-3's paged MLA decode; its schedule is made outside the timing."""

    name = FLASH_ATTENTION_3

    def unsupported(self, facts: Facts, inputs: DenseDecodeInputs) -> str | None:
        """It knows rows of 512 + 64 columns."""
        return _plain_rows(facts, inputs)

    def prepare(self, inputs: DenseDecodeInputs) -> Call:
        """Makes the scheduler's metadata."""
        sizes = (inputs.lengths, inputs.context, inputs.sm_scale, inputs.window)
        return flash_attention_3_call(inputs.q, inputs.cache, inputs.block_table, *sizes)


class FlashInferDenseDecode:
    """FlashInfer's paged MLA attention; its plan is made outside the timing."""

    name = "FlashInfer"

    def unsupported(self, facts: Facts, inputs: DenseDecodeInputs) -> str | None:
        """It knows no window."""
        return "no sliding window" if inputs.window is not None else _plain_rows(facts, inputs)

    def prepare(self, inputs: DenseDecodeInputs) -> Call:
        """Makes its plan."""
        cache = inputs.cache[:, :, 0]
        return flashinfer_call(
            inputs.q, cache, inputs.block_table, inputs.lengths, inputs.sm_scale, causal=inputs.causal
        )


class VllmTritonDenseDecode:
    """vLLM's decode kernel in Triton; room for its results and splits is made outside the timing."""

    name = VLLM_TRITON

    def unsupported(self, facts: Facts, inputs: DenseDecodeInputs) -> str | None:
        """It knows one query token a request and no window, and computes addresses of a cache in 32 bits."""
        if inputs.layout.quantised and inputs.layout.name != TENSOR_SCALED:
            return f"unquantised rows and {TENSOR_SCALED} only"
        if facts.d_v != facts.d_c or facts.d_v & (facts.d_v - 1):
            return "a power of two of columns that are V and all of the latent only"
        if inputs.q.shape[1] > 1:
            return "one query token a request only"
        if inputs.window is not None:
            return "no sliding window"
        return "its addresses are 32 bits wide" if inputs.cache.numel() > INT32 else None

    def prepare(self, inputs: DenseDecodeInputs) -> Call:
        """Makes room for the result and for as many splits as vLLM asks for."""
        attention = first_module(TRITON_MODULES).decode_attention_fwd
        q, cache, d_v = inputs.q[:, 0], inputs.cache, inputs.d_v
        if inputs.layout.quantised:
            cache = cache.view(torch.float8_e4m3fn)
        scale = inputs.k_scale if inputs.layout.tensor_scale else torch.ones_like(inputs.k_scale)
        requests, heads, _ = q.shape
        most = SPLITS_A_MULTIPROCESSOR * torch.cuda.get_device_properties(q.device).multi_processor_count
        splits = min(triton.next_power_of_2(max(1, inputs.context // SPLIT_KEYS)), most)
        out = torch.empty(requests, heads, d_v, dtype=q.dtype, device=q.device)
        lse = torch.empty(requests, heads, dtype=torch.float32, device=q.device)
        parts = torch.empty(requests, heads, splits, d_v + 1, dtype=torch.float32, device=q.device)
        positions = (q, cache, cache[..., :d_v], out, lse, inputs.block_table, inputs.lengths, parts, splits)
        options = {"page_size": inputs.block_size, "k_scale": scale, "v_scale": scale, "is_mla": True}

        def call() -> torch.Tensor:
            attention(*positions, inputs.sm_scale, **options)
            return out

        return call


class FlashMlaFp8DenseDecode:
    """FlashMLA's kernel over e4m3, which multiplies a q and probabilities of e4m3.

    Heads are padded, q is rounded to e4m3 and the plan is made outside the timing.
    """

    name = f"{FLASH_MLA} fp8"

    def unsupported(self, facts: Facts, inputs: DenseDecodeInputs) -> str | None:
        """It knows one scale a tensor, rows of 512 + 64 columns, pages of 64 tokens and no window."""
        if inputs.layout.name != TENSOR_SCALED:
            return f"{TENSOR_SCALED} only"
        if (facts.d_c, facts.d_rope, facts.d_v, facts.dtype) != (D_C, D_ROPE, D_C, "bfloat16"):
            return f"bf16 models with rows of {D_C} + {D_ROPE} columns only"
        if inputs.block_size != FLASH_MLA_BLOCK:
            return f"pages of {FLASH_MLA_BLOCK} tokens only"
        if inputs.window is not None:
            return "no sliding window"
        return None if inputs.q.shape[2] <= FLASH_MLA_HEADS[-1] else f"at most {FLASH_MLA_HEADS[-1]} heads"

    def prepare(self, inputs: DenseDecodeInputs) -> Call:
        """Rounds and pads q, and makes the plan."""
        load_packed_library("vllm", FP8_LIBRARY)
        operators = torch.ops._flashmla_extension_C
        narrow = inputs.q_e4m3
        if narrow is None:
            narrow = (inputs.q / Q_SCALE).to(torch.float8_e4m3fn)
        heads = inputs.q.shape[2]
        q, _ = pad_heads(narrow.view(torch.uint8))  # zeros are zeros in either
        plan = operators.get_mla_decoding_metadata_dense_fp8(inputs.lengths, q.shape[1] * q.shape[2], 1)
        scale = torch.full((1,), Q_SCALE, device=q.device)
        cache = inputs.cache.view(torch.float8_e4m3fn)
        sizes = (inputs.d_v, inputs.lengths, inputs.block_table, inputs.sm_scale, inputs.causal)
        arguments = (q.view(torch.float8_e4m3fn), cache, *sizes, *plan, scale, inputs.k_scale)

        def call() -> torch.Tensor:
            out = operators.fwd_kvcache_mla_fp8(*arguments)[0]
            assert isinstance(out, torch.Tensor)
            return out[:, :, :heads]

        return call


PEERS: tuple[DenseDecodePeer, ...] = (
    FlashMlaDenseDecode(),
    FlashMlaFp8DenseDecode(),
    FlashAttention3DenseDecode(),
    FlashInferDenseDecode(),
    VllmTritonDenseDecode(),
)


def dense_decode_peers(
    package: BenchPackage, shape: DenseDecodeShape, inputs: Sequence[DenseDecodeInputs]
) -> Iterator[Entrant[DenseDecodeInputs]]:
    """Others' kernels at a shape of the family."""
    for peer in PEERS:
        limit = FP8_ERROR_LIMITS[shape.q] if isinstance(peer, FlashMlaFp8DenseDecode) else None
        yield Entrant(peer.name, peer.prepare, peer.unsupported(package.facts, inputs[0]), limit)


BENCHMARKS = {"dense_decode": dense_decode_peers}
