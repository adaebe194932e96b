"""Peers of cache writers and gathers: vLLM's, in Triton, as its modules hold them, and in CUDA, by their torch ops."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from mlagen.bench.families.cache import GatherInputs, WriteInputs, side_of
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import VLLM_CUDA, VLLM_TRITON, load_vllm_operators, triton_op
from mlagen.bench.shapes import Batch, rows_of
from mlagen.bench.trial import Call, Entrant
from mlagen.layout import CacheLayout

# vLLM's names of the layouts that its CUDA kernels know.
CUDA_DTYPES = {"bf16": "auto", "fp8_per_tensor": "fp8", "fp8_ds_mla": "fp8_ds_mla"}
V4 = "ue8m0_v4"
GATHERED_COLUMNS = (512 + 64, 256 + 64)  # rows that its CUDA gather knows


def _cuda(name: str) -> Callable[..., Any]:
    """One of vLLM's CUDA ops. Raises ImportError where its library is not installed."""
    load_vllm_operators()
    return getattr(torch.ops._C_cache_ops, name)  # type: ignore[no-any-return]


def _unknown(layout: CacheLayout, known: Collection[str], dtype: torch.dtype) -> str | None:
    """Why a kernel that knows some layouts cannot run on this one; None if it can."""
    if layout.name not in known:
        return f"layout {' or '.join(known)} only"
    return None if dtype == torch.bfloat16 else "bf16 rows only"


def writers(kind: str, layout: CacheLayout, block_size: int, dtype: torch.dtype) -> Iterator[Entrant[WriteInputs]]:
    """Peers of a cache writer."""

    def quantize(inputs: WriteInputs) -> Call:
        write = triton_op("quantize_and_insert_k_cache")
        return lambda: write(inputs.rows, inputs.cache, inputs.slots, block_size)

    def concat(inputs: WriteInputs) -> Call:
        write = _cuda("concat_and_cache_mla")
        cache = rows_of(layout, inputs.cache, block_size, dtype)
        arguments = (inputs.latent, inputs.rope, cache, inputs.slots, CUDA_DTYPES[layout.name], inputs.scale)
        return lambda: write(*arguments)

    if kind == "quantize_and_insert_k_cache":
        yield Entrant(VLLM_TRITON, quantize, _unknown(layout, (V4,), dtype))
    else:
        unknown = _unknown(layout, CUDA_DTYPES, dtype)
        yield Entrant(VLLM_CUDA, concat, unknown or (None if _has_rope(layout) else "rows with RoPE columns only"))


def gathers(kind: str, layout: CacheLayout, block_size: int, dtype: torch.dtype) -> Iterator[Entrant[GatherInputs]]:
    """Peers of a gather."""

    def dequantize(inputs: GatherInputs) -> Call:
        gather = triton_op("dequantize_and_gather_k_cache_triton")
        out = inputs.out.view(inputs.lengths.shape[0], -1, inputs.out.shape[1])
        return lambda: gather(out, inputs.cache, inputs.lengths, None, inputs.block_table, block_size, 0)

    def gather(inputs: GatherInputs) -> Call:
        op = _cuda("gather_and_maybe_dequant_cache")
        cache = rows_of(layout, inputs.cache, block_size, dtype)
        arguments = (cache, inputs.out, inputs.block_table, inputs.starts, inputs.token_to_request)
        return lambda: op(*arguments, inputs.out.shape[0], CUDA_DTYPES[layout.name], inputs.scale, None)

    def upconvert(inputs: GatherInputs) -> Call:
        op = _cuda("cp_gather_and_upconvert_fp8_kv_cache")
        cache = rows_of(layout, inputs.cache, block_size, dtype)
        requests = inputs.lengths.shape[0]
        starts = inputs.starts[:requests].contiguous()
        return lambda: op(cache, inputs.out, inputs.block_table, inputs.lengths, starts, requests)

    if kind == "dequantize_and_gather_k_cache":
        yield Entrant(VLLM_TRITON, dequantize, _unknown(layout, (V4,), dtype))
        return
    unknown = _unknown(layout, CUDA_DTYPES, dtype)
    if unknown is None and layout.columns not in GATHERED_COLUMNS:
        unknown = f"rows of {' or '.join(map(str, GATHERED_COLUMNS))} columns only"
    # vLLM gathers rows with scales of their own by a kernel of its own.
    yield Entrant(VLLM_CUDA, upconvert if layout.name == "fp8_ds_mla" else gather, unknown)


def _has_rope(layout: CacheLayout) -> bool:
    """Whether RoPE columns are stored, apart from the latent or with it."""
    return any(field.name in ("rope", "row") for field in layout.data)


def writer_peers(package: BenchPackage, batch: Batch, inputs: Sequence[WriteInputs]) -> Iterator[Entrant[WriteInputs]]:
    """Others' kernels at a batch of the family `cache`."""
    side, name = side_of(package, batch.kind)
    return writers(name, side.layout, side.block_size, package.dtype)


def gather_peers(
    package: BenchPackage, batch: Batch, inputs: Sequence[GatherInputs]
) -> Iterator[Entrant[GatherInputs]]:
    """Others' kernels at a batch of the family `gather`."""
    side, name = side_of(package, batch.kind)
    return gathers(name, side.layout, side.block_size, package.dtype)


BENCHMARKS = {"cache": writer_peers, "gather": gather_peers}
