"""Libraries of peers. Each is imported if it is installed, and unpacked first if it is packed."""

from __future__ import annotations

import functools
import importlib
import lzma
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mlagen.bench.check import one_line
from mlagen.bench.trial import Call

VLLM_TRITON, VLLM_CUDA, FLASH_MLA, FLASH_ATTENTION_3 = "vLLM Triton", "vLLM CUDA", "FlashMLA", "FA3"
DEEP_GEMM = "DeepGEMM"
DEEP_GEMM_MODULES = ("deep_gemm", "vllm.third_party.deep_gemm")
FLASH_MLA_MODULES = ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface")  # one by itself was chosen
FA3_MODULES = ("vllm.vllm_flash_attn.flash_attn_interface",)
FLASHINFER_MODULES = ("flashinfer.mla",)
FLASHINFER_WORKSPACE = 128 << 20  # bytes; the size in its documentation's examples
TRITON_OPS = "vllm.models.deepseek_v4.common.ops.cache_utils"
CUDA_LIBRARIES = ("_C_stable_libtorch", "_C_sm90")  # vLLM's own, or its kernels of one architecture
D_C, D_ROPE = 512, 64  # DeepSeek's rows, which FlashAttention-3 and FlashInfer know
FLASH_MLA_HEADS = (64, 128)

_unpacked: list[tempfile.TemporaryDirectory[str]] = []  # kept until the process ends: a library cannot be unloaded


def _unpack(packed: Path) -> Path:
    """Unpacks a library that was packed with xz; the path of the library, in a folder of its own."""
    _unpacked.append(tempfile.TemporaryDirectory(prefix="mlagen-peers-"))
    library = Path(_unpacked[-1].name) / packed.with_suffix("").name
    with lzma.open(packed) as source, library.open("wb") as target:
        shutil.copyfileobj(source, target)
    return library


def _unpack_fa3() -> None:
    """Makes FlashAttention-3's library importable from the xz file next to its Python half."""
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


def load_vllm_operators() -> None:
    """Loads vLLM's operators in CUDA. Raises ImportError where they are not installed."""
    failed: ImportError | None = None
    for stem in CUDA_LIBRARIES:
        try:
            return load_packed_library("vllm", stem)
        except ImportError as error:
            failed = failed or error
    assert failed is not None
    raise failed


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


def triton_op(name: str, module: str = TRITON_OPS) -> Callable[..., Any]:
    """One of vLLM's Triton wrappers. Raises ImportError where it is not installed."""
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def absence(error: BaseException) -> str:
    """Why a peer is absent, in one line."""
    return f"not installed ({one_line(error)})" if isinstance(error, ImportError) else one_line(error)


def flash_attention_3_call(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    context: int,
    sm_scale: float,
    window: int | None = None,
) -> Call:
    """A call of FlashAttention-3's paged MLA decode, with the scheduler's metadata made; out [tokens, heads, 512].

    Args:
        q: [requests, s_q, heads, 512 + 64].
        cache: [pages, block_size, 1, 512 + 64].
        block_table: int32 [requests, pages a request].
        lengths: int32 [requests], keys of each.
        context: most of them.
        sm_scale: factor of the logits.
        window: keys that a query token sees; None: all.

    Raises:
        ImportError: FlashAttention-3 is not there.
    """
    interface = flash_attention_3_interface()
    requests, s_q, heads, _ = q.shape
    tokens = q.flatten(0, 1)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=q.device) * s_q
    bounds = [-1, -1] if window is None else [window - 1, 0]
    metadata = interface.get_scheduler_metadata(
        batch_size=requests,
        max_seqlen_q=s_q,
        max_seqlen_k=context,
        num_heads_q=heads,
        num_heads_kv=1,
        headdim=D_ROPE,
        headdim_v=D_C,
        cache_seqlens=lengths,
        qkv_dtype=q.dtype,
        cu_seqlens_q=starts,
        page_size=cache.shape[1],
        causal=True,
        window_size=bounds,
        num_splits=0,
    )
    arguments = {
        "q": tokens[:, :, D_C:],
        "k": cache[..., D_C:],
        "v": cache[..., :D_C],
        "q_v": tokens[:, :, :D_C],
        "max_seqlen_q": s_q,
        "cu_seqlens_q": starts,
        "max_seqlen_k": context,
        "seqused_k": lengths,
        "block_table": block_table,
        "softmax_scale": sm_scale,
        "causal": True,
        "window_size": bounds,
        "fa_version": 3,
        "scheduler_metadata": metadata,
        "num_splits": 0,
    }
    return lambda: interface.flash_attn_varlen_func(**arguments)


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
) -> Call:
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
    return lambda: wrapper.run(**operands)


def pad_heads(q: torch.Tensor, sink: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [..., num_heads, d_qk], and the sink [num_heads], with as many heads as FlashMLA takes."""
    heads = q.shape[-2]
    padding = next(count for count in FLASH_MLA_HEADS if heads <= count) - heads
    pad = torch.nn.functional.pad
    return pad(q, (0, 0, 0, padding)), None if sink is None else pad(sink, (0, padding))
