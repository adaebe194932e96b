"""A valid call of each wrapper: by `alone.py`, and here of latents and over a cache in two tensors."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from alone import arguments, decode_arguments

Call = dict[str, Any]


def latents_calls(package: ModuleType) -> dict[str, Call]:
    """Calls of DeepSeek V4.1's compressor: two tokens of one request, which end a group."""
    if not hasattr(package, "latents"):
        return {}
    layout = package.latents._layout
    size = package.SPEC["spec"]["extra_cache"]["block_size"]
    rows = layout.ROW_BYTES * size
    page = -(-rows // getattr(layout, "PAGE_MULTIPLE", 1)) * getattr(layout, "PAGE_MULTIPLE", 1)
    cache = torch.zeros(2 * page, dtype=torch.uint8)
    tokens = {"positions": torch.arange(2), "slot_mapping": torch.arange(2), "compress_ratio": 2}
    return {
        "fused_save_compress_norm": {
            "kv_score": torch.randn(2, 1024),
            "state_cache": torch.zeros(1, 8, 1024),
            "query_start_loc": torch.tensor([0, 2], dtype=torch.int32),
            "token_to_req_indices": torch.zeros(2, dtype=torch.int32),
            "rms_norm_weight": torch.ones(512, dtype=torch.bfloat16),
            "rms_norm_eps": 1e-6,
            "latent_out": torch.zeros(2, 512, dtype=torch.bfloat16),
            **tokens,
        },
        "rope_quant_insert": {
            "latent": torch.randn(2, 512).bfloat16(),
            "cos_sin_cache": torch.ones(4, 64),
            "kv_cache": cache.as_strided((2, size, layout.ROW_BYTES), (page, layout.ROW_BYTES, 1)),
            **tokens,
        },
    }


def two_tensor_calls(package: ModuleType) -> dict[str, Call]:
    """Calls over latent and RoPE columns in tensors of their own: two requests of two tokens each."""
    ckv, kpe = torch.zeros(4, 64, 512).bfloat16(), torch.zeros(4, 64, 64).bfloat16()
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    lengths = torch.tensor([5, 9], dtype=torch.int32)
    metadata, _ = package.get_mla_metadata()
    return {
        "flash_mla_with_kvcache": {
            "q": torch.randn(2, 1, 3, 576).bfloat16(),
            "k_cache": ckv[:, :, None],
            "block_table": table,
            "cache_seqlens": lengths,
            "head_dim_v": 512,
            "tile_scheduler_metadata": metadata,
            "kpe_cache": kpe,
        },
        "decode_attention_fwd": {
            **decode_arguments(torch.randn(2, 3, 576).bfloat16(), ckv, 512),
            "kpe_cache": kpe,
        },
        "concat_and_cache_mla": {
            "kv_c": torch.randn(2, 512).bfloat16(),
            "k_pe": torch.randn(2, 64).bfloat16(),
            "kv_cache": ckv,
            "slot_mapping": torch.arange(2),
            "kpe_cache": kpe,
        },
        "gather_and_maybe_dequant_cache": {
            "src_cache": ckv,
            "dst": torch.zeros(4, 576).bfloat16(),
            "block_table": table,
            "cu_seq_lens": torch.tensor([0, 2, 4], dtype=torch.int32),
            "token_to_seq": torch.tensor([0, 0, 1, 1], dtype=torch.int32),
            "num_tokens": 4,
            "kpe_cache": kpe,
        },
    }


def calls_of(package: ModuleType) -> Iterator[tuple[str, Call]]:
    """A valid call of each wrapper, by name."""
    said = package.SPEC
    fields = said["spec"]["cache"]["layout"]["fields"] if said["spec"]["cache"] else ()
    several = any(field.get("tensor") for field in fields)
    calls = two_tensor_calls(package) if several else {**arguments(package), **latents_calls(package)}
    assert {*calls} == {*said["spec"]["wrappers"]}
    for name, call in calls.items():
        if said.get("layout") == "fp8_per_tensor" and "cache" in name and "with" not in name:
            call["scale"] = torch.ones(1)
        yield name, call
