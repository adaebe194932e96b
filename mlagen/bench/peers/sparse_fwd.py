"""Kernels that a package is measured against; none is required: what cannot be imported is absent, with a reason."""

from __future__ import annotations

import functools
import importlib
import lzma
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from mlagen.bench.shapes import Inputs, Shape
from mlagen.bench.tune.progress import one_line
from mlagen.verify.facts import Facts

FA3_MODULES = ("vllm.vllm_flash_attn.flash_attn_interface",)
FLASHINFER_MODULES = ("flashinfer.mla",)
FLASHINFER_WORKSPACE = 128 << 20  # bytes; what its documentation starts with
D_C, D_ROPE = 512, 64  # DeepSeek's rows, which FlashAttention-3 and FlashInfer know
TensorCall = Callable[[], torch.Tensor]


class Peer(Protocol):
    """A kernel of someone else's.

    Attributes:
        name: as reports show it.
    """

    name: str

    def unsupported(self, shape: Shape, facts: Facts) -> str | None:
        """Why the peer cannot run a shape of a spec, in one line; None if it can."""

    def prepare(self, inputs: Inputs) -> TensorCall:
        """A call that gives out [tokens, num_heads, d_v]; what engines do once (padding, plans) is done here.

        Raises:
            ImportError: the peer is not there.
        """


def absence(error: BaseException) -> str:
    """Why a peer is absent, in one line."""
    return f"not installed ({one_line(error)})" if isinstance(error, ImportError) else one_line(error)


class VllmTriton:
    """vLLM's Triton sparse MLA kernel, as module `seed_sparse` or where vLLM keeps it."""

    name = "vLLM Triton"
    modules = ("seed_sparse", "vllm.v1.attention.ops.triton_mla_sparse")

    def unsupported(self, shape: Shape, facts: Facts) -> str | None:
        """It knows rows of 512 + 64 bf16 lanes, flat, without sink or lengths."""
        if (facts.d_qk, facts.d_v, facts.dtype) != (576, 512, "bfloat16"):
            return "bf16 rows of 512 + 64 lanes only"
        if facts.block_size is not None or "required" in (facts.sink, facts.length):
            return "flat rows without sink or lengths only"
        return "topk must be a multiple of 16" if shape.topk % 16 else None

    def prepare(self, inputs: Inputs) -> TensorCall:
        """A plain call: it plans nothing ahead."""
        attention = first_module(self.modules).triton_mla_sparse_attention
        return lambda: _tensor(attention(inputs.q, inputs.kv, inputs.indices, inputs.sm_scale))


class FlashMla:
    """FlashMLA's sparse prefill kernel, as vLLM ships it or alone; heads are padded to 64 or 128 outside the timing."""

    name = "FlashMLA"
    modules = ("vllm.third_party.flashmla.flash_mla_interface", "flash_mla")

    def unsupported(self, shape: Shape, facts: Facts) -> str | None:
        """It knows bf16 rows of 576 or 512 lanes, flat."""
        if facts.d_qk not in (512, 576) or (facts.d_v, facts.dtype) != (512, "bfloat16"):
            return "bf16 rows of 512 or 576 lanes only"
        if facts.block_size is not None:
            return "flat rows only"
        return "topk must be a multiple of 64" if shape.topk % 64 else None

    def prepare(self, inputs: Inputs) -> TensorCall:
        """Pads q, and the sink with it."""
        attention = first_module(self.modules).flash_mla_sparse_fwd
        heads = inputs.q.shape[1]
        padding = (64 if heads <= 64 else 128) - heads
        q = torch.nn.functional.pad(inputs.q, (0, 0, 0, padding))
        sink = inputs.attn_sink
        if sink is not None:
            sink = torch.nn.functional.pad(sink, (0, padding))
        d_v = 512

        def call() -> torch.Tensor:
            out, *_ = attention(q, inputs.kv, inputs.indices, inputs.sm_scale, d_v, sink, inputs.topk_length)
            return _tensor(out)[:, :heads]

        return call


def _pages_of_one_row(shape: Shape, facts: Facts) -> str | None:
    """Why a paged kernel that takes indices for a block table of pages of one row cannot run a shape, in one line."""
    if (facts.d_c, facts.d_rope, facts.d_v) != (D_C, D_ROPE, D_C):
        return f"rows of {D_C} + {D_ROPE} lanes only"
    if facts.block_size is not None or facts.sink == "required":
        return "flat rows without sink only"
    return "absent indices are not supported" if shape.topk > shape.s_kv else None


def _lengths(inputs: Inputs) -> torch.Tensor:
    """int32 [tokens]: indices of each query token, all of them where it has no length."""
    if inputs.topk_length is not None:
        return inputs.topk_length
    tokens, _, topk = inputs.indices.shape
    return torch.full((tokens,), topk, dtype=torch.int32, device=inputs.q.device)


class FlashAttention3:
    """FlashAttention-3's paged MLA decode: with pages of one row and the indices as block table it is sparse MLA."""

    name = "FA3 p1"

    def unsupported(self, shape: Shape, facts: Facts) -> str | None:
        """It knows 512 + 64 lanes, flat, without sink; every index must be valid."""
        return _pages_of_one_row(shape, facts)

    def prepare(self, inputs: Inputs) -> TensorCall:
        """Makes the scheduler's metadata."""
        interface = flash_attention_3_interface()
        tokens, heads, _ = inputs.q.shape
        indices = inputs.indices[:, 0]
        topk = indices.shape[1]
        lengths = _lengths(inputs)
        starts = torch.arange(tokens + 1, dtype=torch.int32, device=inputs.q.device)
        latent, rope = inputs.kv[:, :, None, :D_C], inputs.kv[:, :, None, D_C:]
        metadata = interface.get_scheduler_metadata(
            batch_size=tokens,
            max_seqlen_q=1,
            max_seqlen_k=topk,
            num_heads_q=heads,
            num_heads_kv=1,
            headdim=D_ROPE,
            headdim_v=D_C,
            cache_seqlens=lengths,
            qkv_dtype=inputs.q.dtype,
            cu_seqlens_q=starts,
            page_size=1,
            causal=True,
            num_splits=0,
        )

        def call() -> torch.Tensor:
            return _tensor(
                interface.flash_attn_varlen_func(
                    q=inputs.q[:, :, D_C:],
                    k=rope,
                    v=latent,
                    q_v=inputs.q[:, :, :D_C],
                    max_seqlen_q=1,
                    cu_seqlens_q=starts,
                    max_seqlen_k=topk,
                    seqused_k=lengths,
                    block_table=indices,
                    softmax_scale=inputs.sm_scale,
                    causal=True,
                    fa_version=3,
                    scheduler_metadata=metadata,
                    num_splits=0,
                )
            )

        return call


class FlashInfer:
    """FlashInfer's paged MLA attention, with pages of one row as FlashAttention-3.

    Its first plan compiles a kernel, for which it asks for nvcc and ninja.
    """

    name = "FlashInfer p1"

    def unsupported(self, shape: Shape, facts: Facts) -> str | None:
        """It knows 512 + 64 lanes, flat, without sink; every index must be valid."""
        return _pages_of_one_row(shape, facts)

    def prepare(self, inputs: Inputs) -> TensorCall:
        """Makes its plan."""
        q = inputs.q[:, None]  # each token a request
        return flashinfer_call(q, inputs.kv, inputs.indices[:, 0], _lengths(inputs), inputs.sm_scale, causal=False)


@functools.cache
def _flashinfer_workspace(device: torch.device) -> torch.Tensor:
    """Room for the parts of split requests; calls of one stream share it."""
    return torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)


def flashinfer_call(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    sm_scale: float,
    *,
    causal: bool,
) -> TensorCall:
    """A planned call of FlashInfer's `BatchMLAPagedAttentionWrapper`, which gives out [requests * s_q, heads, 512].

    Its flat arguments are those that each version takes; 0.7 warns of them.

    Args:
        q: [requests, s_q, heads, 512 + 64].
        cache: [pages, block_size, 512 + 64].
        block_table: int32 [requests, pages a request].
        lengths: int32 [requests], keys of each.
        sm_scale: factor of the logits.
        causal: whether a query token sees no key behind its own.

    Raises:
        ImportError: FlashInfer is not there.
    """
    module = first_module(FLASHINFER_MODULES)
    requests, s_q, heads, _ = q.shape
    block_size = cache.shape[1]
    pages = (lengths + block_size - 1) // block_size
    kept = torch.arange(block_table.shape[1], device=q.device) < pages[:, None]
    wrapper = module.BatchMLAPagedAttentionWrapper(_flashinfer_workspace(q.device))
    wrapper.plan(
        qo_indptr=torch.arange(requests + 1, dtype=torch.int32, device=q.device) * s_q,
        kv_indptr=torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0)),
        kv_indices=block_table[kept],
        kv_len_arr=lengths,
        num_heads=heads,
        head_dim_ckv=D_C,
        head_dim_kpe=D_ROPE,
        page_size=block_size,
        causal=causal,
        sm_scale=sm_scale,
        q_data_type=q.dtype,
        kv_data_type=cache.dtype,
    )
    tokens = q.flatten(0, 1)
    operands = {
        "q_nope": tokens[:, :, :D_C],
        "q_pe": tokens[:, :, D_C:],
        "ckv_cache": cache[:, :, :D_C],
        "kpe_cache": cache[:, :, D_C:],
    }
    return lambda: _tensor(wrapper.run(**operands))


PEERS: tuple[Peer, ...] = (VllmTriton(), FlashMla(), FlashAttention3(), FlashInfer())

_unpacked: list[tempfile.TemporaryDirectory[str]] = []  # kept until the process ends: a library cannot be unloaded


def _unpack(packed: Path) -> Path:
    """Unpacks a library that was packed with xz; the path of the library, in a folder of its own."""
    _unpacked.append(tempfile.TemporaryDirectory(prefix="mlagen-peers-"))
    library = Path(_unpacked[-1].name) / packed.with_suffix("").name
    with lzma.open(packed) as source, library.open("wb") as target:
        shutil.copyfileobj(source, target)
    return library


def _unpack_fa3() -> None:
    """Makes FlashAttention-3's library importable where it lies packed with xz beside its Python half."""
    package: ModuleType = importlib.import_module("vllm.vllm_flash_attn")
    if len(package.__path__) > 1:  # it is unpacked
        return
    packed = next(iter(Path(package.__path__[0]).glob("_vllm_fa3_C*.so.xz")), None)
    if packed is not None and not packed.with_suffix("").exists():
        package.__path__.append(str(_unpack(packed).parent))


def flash_attention_3_interface() -> Any:
    """The module of FlashAttention-3's wrappers. Raises ImportError where it is not installed."""
    _unpack_fa3()
    interface = first_module(FA3_MODULES)
    if not getattr(interface, "FA3_AVAILABLE", True):
        raise ImportError(interface.FA3_UNAVAILABLE_REASON)
    return interface


@functools.cache
def load_packed_library(package: str, stem: str) -> None:
    """Loads a library of torch ops that lies in a package's folder, as it is or packed with xz.

    Raises:
        ImportError: the package or the library is not there.
    """
    folder = Path(importlib.import_module(package).__path__[0])
    library = next(iter(folder.glob(f"{stem}*.so")), None)
    if library is None:
        packed = next(iter(folder.glob(f"{stem}*.so.xz")), None)
        if packed is None:
            raise ImportError(f"{package} has no {stem}")
        library = _unpack(packed)
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]


def first_module(names: tuple[str, ...]) -> Any:
    """The first module that imports.

    Raises:
        ImportError: none does; the first one's reason.
    """
    failed: ImportError | None = None
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            failed = failed or error
    assert failed is not None
    raise failed


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value
