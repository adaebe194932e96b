"""vLLM's cache, gather and index kernels: in Triton, as its modules hold them, and in CUDA, by their torch ops."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from mlagen.bench.batches import rows_of
from mlagen.bench.peers.sparse_fwd import load_packed_library
from mlagen.bench.trial import Call, Entrant
from mlagen.layout import CacheLayout

TRITON, CUDA = "vLLM Triton", "vLLM CUDA"
TRITON_OPS = "vllm.models.deepseek_v4.common.ops.cache_utils"
CONVERT_OPS = "vllm.v1.attention.backends.mla.sparse_utils"
CUDA_LIBRARY = ("vllm", "_C_stable_libtorch")
COMBINED_MULTIPLE = 128  # indices; FlashMLA takes rows of such a length

# What vLLM calls the layouts that its CUDA kernels know.
CUDA_DTYPES = {"bf16": "auto", "fp8_per_tensor": "fp8", "fp8_ds_mla": "fp8_ds_mla"}
V4 = "ue8m0_v4"
GATHERED_LANES = (512 + 64, 256 + 64)  # rows that its CUDA gather knows


def combined_width(indices: int) -> int:
    """Columns of a row of so many combined indices."""
    return -(-indices // COMBINED_MULTIPLE) * COMBINED_MULTIPLE


def _triton(name: str, module: str = TRITON_OPS) -> Callable[..., Any]:
    """One of vLLM's Triton wrappers. Raises ImportError where it is not installed."""
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def _cuda(name: str) -> Callable[..., Any]:
    """One of vLLM's CUDA ops. Raises ImportError where its library is not installed."""
    load_packed_library(*CUDA_LIBRARY)
    return getattr(torch.ops._C_cache_ops, name)  # type: ignore[no-any-return]


def _unknown(layout: CacheLayout, known: Collection[str], dtype: torch.dtype) -> str | None:
    """Why a kernel that knows some layouts cannot run on this one; None if it can."""
    if layout.name not in known:
        return f"layout {' or '.join(known)} only"
    return None if dtype == torch.bfloat16 else "bf16 rows only"


def writers(kind: str, layout: CacheLayout, block_size: int, dtype: torch.dtype) -> Iterator[Entrant[Any]]:
    """Peers of a cache writer."""

    def quantize(inputs: Any) -> Call:
        write = _triton("quantize_and_insert_k_cache")
        return lambda: write(inputs.rows, inputs.cache, inputs.slots, block_size)

    def concat(inputs: Any) -> Call:
        write = _cuda("concat_and_cache_mla")
        cache = rows_of(layout, inputs.cache, block_size, dtype)
        arguments = (inputs.latent, inputs.rope, cache, inputs.slots, CUDA_DTYPES[layout.name], inputs.scale)
        return lambda: write(*arguments)

    if kind == "quantize_and_insert_k_cache":
        yield Entrant(TRITON, quantize, _unknown(layout, (V4,), dtype))
    else:
        unknown = _unknown(layout, CUDA_DTYPES, dtype)
        yield Entrant(CUDA, concat, unknown or (None if _has_rope(layout) else "rows with RoPE lanes only"))


def gathers(kind: str, layout: CacheLayout, block_size: int, dtype: torch.dtype) -> Iterator[Entrant[Any]]:
    """Peers of a gather."""

    def dequantize(inputs: Any) -> Call:
        gather = _triton("dequantize_and_gather_k_cache_triton")
        out = inputs.out.view(inputs.lengths.shape[0], -1, inputs.out.shape[1])
        return lambda: gather(out, inputs.cache, inputs.lengths, None, inputs.block_table, block_size, 0)

    def gather(inputs: Any) -> Call:
        op = _cuda("gather_and_maybe_dequant_cache")
        cache = rows_of(layout, inputs.cache, block_size, dtype)
        arguments = (cache, inputs.out, inputs.block_table, inputs.starts, inputs.token_to_request)
        return lambda: op(*arguments, inputs.out.shape[0], CUDA_DTYPES[layout.name], inputs.scale, None)

    def upconvert(inputs: Any) -> Call:
        op = _cuda("cp_gather_and_upconvert_fp8_kv_cache")
        cache = rows_of(layout, inputs.cache, block_size, dtype)
        requests = inputs.lengths.shape[0]
        starts = inputs.starts[:requests].contiguous()
        return lambda: op(cache, inputs.out, inputs.block_table, inputs.lengths, starts, requests)

    if kind == "dequantize_and_gather_k_cache":
        yield Entrant(TRITON, dequantize, _unknown(layout, (V4,), dtype))
        return
    unknown = _unknown(layout, CUDA_DTYPES, dtype)
    if unknown is None and layout.lanes not in GATHERED_LANES:
        unknown = f"rows of {' or '.join(map(str, GATHERED_LANES))} lanes only"
    # vLLM gathers rows with scales of their own by a kernel of its own.
    yield Entrant(CUDA, upconvert if layout.name == "fp8_ds_mla" else gather, unknown)


def indexers(kind: str, call_of: Callable[[Callable[..., Any], Any], Call]) -> Iterator[Entrant[Any]]:
    """Peers of an index kernel, which all have the wrapper's own signature."""
    module = CONVERT_OPS if kind == "triton_convert_req_index_to_global_index" else TRITON_OPS

    def prepare(inputs: Any) -> Call:
        return call_of(_triton(kind, module), inputs)

    yield Entrant(TRITON, prepare)


def _has_rope(layout: CacheLayout) -> bool:
    """Whether RoPE lanes are stored, beside the latent or with it."""
    return any(field.name in ("rope", "row") for field in layout.data)
