"""Arguments of the indexer's wrappers, which no committed package has, for packages that tests write."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan

SPEC = Path(__file__).parents[2] / "examples" / "indexer" / "dsv32_indexer.yaml"
QUERY = "  - fused_indexer_q_rope_quant\n"
NORMED = (QUERY, f"{QUERY}  - indexer_k_norm_rope_store\n  - indexer_qk_rope_quant_and_cache\n")
ROWS, KEYS, PAGE, PAGES = 2, 300, 64, 8


def write_package(folder: Path, layout: str) -> Path:
    """The example's package with the wrappers that it leaves out, and with this layout of the indexer's keys."""
    text = SPEC.read_text().replace(*NORMED).replace("layout: indexer_fp8", f"layout: {layout}")
    if layout != "indexer_fp8":  # its keys are no e4m3
        text = text.replace("  - fp8_mqa_logits\n", "").replace("  - fp8_paged_mqa_logits\n", "")
    spec = folder / f"{layout}.yaml"
    spec.write_text(text.replace("name: dsv32_indexer", f"name: {layout}"))
    apply(compare(render(load_plan(spec)), folder / layout))
    return folder / layout


def arguments(package: ModuleType) -> dict[str, dict[str, Any]]:
    """A valid call of each of the indexer's wrappers, by name."""
    heads, packed = package.SPEC["spec"]["indexer"]["num_heads"], package.__name__ == "indexer_mxfp4"
    calls = {**cache_calls(heads, packed), **logits_calls(heads, packed), **topk_calls()}
    return {name: call for name, call in calls.items() if hasattr(package, name)}


def make_cache(packed: bool) -> torch.Tensor:
    """A cache of keys, bytes [PAGES, PAGE, bytes of a key]."""
    return torch.zeros(PAGES, PAGE, 64 + 4 if packed else 128 + 4, dtype=torch.uint8)


def cache_calls(heads: int, packed: bool) -> dict[str, dict[str, Any]]:
    """Calls that write and gather keys, and quantise a query."""
    cache, angles = make_cache(packed), torch.zeros(32, 64)
    positions, slots = torch.zeros(2, ROWS, dtype=torch.int64)
    k = torch.zeros(ROWS, 128, dtype=torch.bfloat16)
    return {
        "indexer_k_quant_and_cache": {
            "k": k,
            "kv_cache": cache,
            "slot_mapping": slots,
            "quant_block_size": 32 if packed else 128,
            "scale_fmt": "ue8m0",
        },
        "indexer_k_norm_rope_store": {
            "k_pre": k,
            "positions": positions,
            "cos_sin_cache": angles,
            "rms_norm_weight": torch.zeros(128, dtype=torch.bfloat16),
            "rms_norm_eps": 1e-6,
            "k_cache": cache,
            "kv_slot_mapping": slots,
        },
        "indexer_qk_rope_quant_and_cache": {
            "q": torch.zeros(ROWS, heads, 128, dtype=torch.bfloat16),
            "q_out": torch.zeros(ROWS, heads, 64 if packed else 128, dtype=torch.uint8),
            "weights": torch.zeros(ROWS, heads),
            "weights_out": torch.zeros(ROWS, heads),
            "k": k,
            "kv_cache": cache,
            "slot_mapping": slots,
            "norm_weight": torch.zeros(128),
            "norm_bias": torch.zeros(128),
            "positions": positions,
            "cos_cache": angles[:, :32],
            "sin_cache": angles[:, 32:],
            "epsilon": 1e-6,
            "quant_block_size": 32 if packed else 128,
            "scale_fmt": "ue8m0",
            "weights_scale": 0.5,
            **({"q_scale_out": torch.zeros(ROWS, heads, 4, dtype=torch.uint8)} if packed else {}),
        },
        "cp_gather_indexer_k_quant_cache": {
            "kv_cache": cache,
            "dst_k": torch.zeros(ROWS, cache.shape[2] - 4, dtype=torch.uint8),
            "dst_scale": torch.zeros(ROWS, 4, dtype=torch.uint8),
            "block_table": torch.zeros(1, PAGES, dtype=torch.int32),
            "cu_seq_lens": torch.tensor([0, ROWS], dtype=torch.int32),
        },
        "fused_indexer_q_rope_quant": {
            "positions": positions,
            "index_q": torch.zeros(ROWS, heads, 128, dtype=torch.bfloat16),
            "index_q_cos_sin_cache": angles,
            "index_weights": torch.zeros(ROWS, heads, dtype=torch.bfloat16),
            "index_weights_softmax_scale": 0.5,
            "index_weights_head_scale": 0.25,
        },
    }


def logits_calls(heads: int, packed: bool) -> dict[str, dict[str, Any]]:
    """Calls that give logits over keys and over pages."""
    width, dtype = (64, torch.uint8) if packed else (128, torch.float8_e4m3fn)
    q = torch.zeros(ROWS, heads, width, dtype=torch.uint8).view(dtype)
    scales = torch.zeros(ROWS, heads, dtype=torch.int32) if packed else None
    k_scales = torch.zeros(KEYS, 4, dtype=torch.uint8) if packed else torch.zeros(KEYS)
    lens = torch.full((ROWS,), KEYS, dtype=torch.int32)
    flat = {
        "kv": (torch.zeros(KEYS, width, dtype=torch.uint8).view(dtype), k_scales),
        "weights": torch.zeros(ROWS, heads),
        "cu_seq_len_k_start": torch.zeros(ROWS, dtype=torch.int32),
        "cu_seq_len_k_end": lens,
        "clean_logits": True,
    }
    paged = {
        "kv_cache": make_cache(packed)[:, :, None],
        "weights": torch.zeros(ROWS, heads),
        "context_lens": lens,
        "block_table": torch.zeros(ROWS, PAGES, dtype=torch.int32),
        "schedule_meta": torch.zeros(5, 2, dtype=torch.int32),
        "max_context_len": 320,
    }
    pair = (q[:, None], None if scales is None else scales[:, None])
    picks = {
        "scores": torch.zeros(ROWS, 64),
        "slots": torch.zeros(ROWS, 64, dtype=torch.int32),
        "src_page_table": torch.zeros(ROWS, PAGES, dtype=torch.int32),
        "page_size": PAGE,
        "workspace": torch.zeros(ROWS * 512),
    }
    return {
        "fp8_mqa_logits": {"q": q, **flat},
        "fp8_fp4_mqa_logits": {"q": (q, scales), **flat},
        "fp8_paged_mqa_logits": {"q": pair[0], **paged},
        "fp8_fp4_paged_mqa_logits": {"q": pair, **paged},
        "get_paged_mqa_logits_metadata": {"context_lens": lens, "block_kv": PAGE, "num_sms": 4},
        "indexer_topk": {"q": (q, scales), **without_clean(flat), "topk": 64, **picks},
        "paged_indexer_topk": {"q": pair, **paged, "topk": 64, **picks},
    }


def without_clean(call: dict[str, Any]) -> dict[str, Any]:
    """A call of logits as those who pick of them pass it on."""
    return {name: one for name, one in call.items() if name != "clean_logits"}


def topk_calls() -> dict[str, dict[str, Any]]:
    """Calls that pick the top-k of rows of scores."""
    logits, lens = torch.zeros(ROWS, 4096), torch.full((ROWS,), KEYS, dtype=torch.int32)
    picked = torch.zeros(ROWS, 64, dtype=torch.int32)
    top = {"indices": picked, "num_rows": ROWS, "stride0": 4096, "stride1": 1, "topk": 64}
    return {
        "top_k_per_row_prefill": {"logits": logits, "row_starts": lens, "row_ends": lens.clone(), **top},
        "top_k_per_row_decode": {"logits": logits, "next_n": 1, "seq_lens": lens, **top},
        "persistent_topk": {
            "logits": logits,
            "lengths": lens,
            "indices": picked,
            "workspace": None,
            "k": 64,
            "max_seq_len": 4096,
        },
        "top_k_page_table_transform": {
            "input": logits,
            "src_page_table": torch.zeros(ROWS, 4096, dtype=torch.int32),
            "lengths": lens,
            "k": 64,
            "row_starts": lens.clone(),
        },
        "topk_merge": {"scores": torch.zeros(ROWS, 9000), "ids": torch.zeros(ROWS, 9000, dtype=torch.int32), "k": 64},
    }
