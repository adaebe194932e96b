"""Calls SGLang's plugins with SGLang's shapes, in Triton's interpreter; prints the result of each as JSON.

    python sglang_calls.py FOLDER

FOLDER holds plugins, as `render_plugin` makes them, each with its package.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Iterator
from types import ModuleType

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, sys.argv[1])

import numpy as np
import torch

from mlagen.verify import interpreter

SCALE = 576**-0.5


def plugin(spec: str) -> tuple[ModuleType, ModuleType]:
    """A plugin and its package, which plans as for an A100."""
    found = importlib.import_module(f"mlagen_sglang_{spec}")
    package = getattr(found, spec)
    facts = package._launch.facts_of("sm80")
    package._launch.device_facts = lambda device: facts
    return found, package


def attention(q, rows, scale, d_v=512):
    """Output and natural LSE of q [heads, d] over rows [keys, d], in float64."""
    logits = q.double() @ rows.double().T * scale
    return logits.softmax(-1) @ rows[:, :d_v].double(), logits.logsumexp(-1)


def worst(found, wanted) -> float:
    return (found.double() - wanted).abs().max().item()


def sparse_prefill(spec: str) -> Iterator[tuple[str, float]]:
    """As dsa_backend calls it: heads padded with zeros to 64, one list of indices a token."""
    found, _ = plugin(spec)
    q = torch.zeros(3, 64, 576, dtype=torch.bfloat16)
    q[:, :8] = torch.randn(3, 8, 576)
    kv = torch.randn(96, 1, 576).bfloat16()
    indices = torch.stack([torch.randperm(96)[:64] for _ in range(3)]).to(torch.int32).unsqueeze(1)
    length = torch.tensor([64, 7, 33], dtype=torch.int32)
    given = {"q": q, "kv": kv, "indices": indices, "sm_scale": SCALE, "d_v": 512, "attn_sink": None}
    for legacy, factor in ((True, math.log2(math.e)), (False, 1.0)):
        out, max_logits, lse = found.flash_mla_sparse_fwd(**given, topk_length=length, use_legacy=legacy)
        errors = []
        for token in range(3):
            rows = kv[indices[token, 0, : length[token]].long(), 0]
            wanted, wanted_lse = attention(q[token], rows, SCALE)
            best = (q[token].double() @ rows.double().T * SCALE).max(-1).values
            errors += [worst(out[token], wanted), worst(lse[token], wanted_lse * factor)]
            errors.append(worst(max_logits[token], best * factor))
        yield f"{spec}: sparse_fwd, use_legacy {legacy}", max(errors)


def sparse_decode() -> Iterator[tuple[str, float]]:
    """As dsa_backend calls it: metadata as tensors, pages of 64, an empty block table, a name for the layout."""
    found, package = plugin("dsv32_fp8")
    cache = torch.zeros(3, 64, 656, dtype=torch.uint8)
    slots = torch.arange(3 * 64)
    package.concat_and_cache_mla(
        torch.randn(192, 512).bfloat16(), torch.randn(192, 64).bfloat16(), cache, slots, "fp8_ds_mla", torch.ones(1)
    )
    rows = torch.empty(192, 576, dtype=torch.bfloat16)
    table = torch.arange(3, dtype=torch.int32)[None]
    cu_seqlens, tokens = torch.tensor([0, 192], dtype=torch.int32), torch.zeros(192, dtype=torch.int32)
    package.gather_and_maybe_dequant_cache(cache, rows, table, cu_seqlens, tokens, 192, "fp8_ds_mla", torch.ones(1))
    q = torch.randn(2, 1, 64, 576).bfloat16()
    indices = torch.stack([torch.randperm(192)[:64] for _ in range(2)]).to(torch.int32).unsqueeze(1)
    out, lse = found.flash_mla_with_kvcache(
        q=q,
        k_cache=cache.view(-1, 64, 1, 656),
        cache_seqlens=torch.tensor([64, 64], dtype=torch.int32),
        head_dim_v=512,
        tile_scheduler_metadata=torch.zeros(132, 8, dtype=torch.int32),
        num_splits=torch.zeros(3, dtype=torch.int32),
        softmax_scale=SCALE,
        indices=indices,
        block_table=torch.empty(2, 0, dtype=torch.int32),
        is_fp8_kvcache=True,
        kv_format="V32",
    )
    errors = []
    for request in range(2):
        wanted, wanted_lse = attention(q[request, 0], rows[indices[request, 0].long()], SCALE)
        errors += [worst(out[request, 0], wanted), worst(lse[request, :, 0], wanted_lse)]
    yield "dsv32_fp8: with_kvcache", max(errors)


def two_caches() -> Iterator[tuple[str, float]]:
    """As deepseek_v4_backend calls it: a window's cache of pages of 256 and a compressed one, with a sink."""
    found, package = plugin("dsv4_flash")
    pages, rows = {}, {}
    for name, page_size, count in (("main", 256, 256), ("extra", 64, 128)):
        page_bytes = -(-page_size * 584 // 576) * 576  # rounded up, as the layout has it
        cache = torch.zeros(count // page_size, page_bytes, dtype=torch.uint8)
        package.quantize_and_insert_k_cache(torch.randn(count, 512).bfloat16(), cache, torch.arange(count), page_size)
        dense = torch.empty(1, count, 512, dtype=torch.bfloat16)
        table = torch.arange(count // page_size, dtype=torch.int32)[None]
        lengths = torch.tensor([count], dtype=torch.int32)
        package.dequantize_and_gather_k_cache(dense, cache, lengths, None, table, page_size, 0)
        pages[name] = cache.as_strided((count // page_size, page_size, 1, 584), (cache.stride(0), 584, 584, 1))
        rows[name] = dense[0]
    q = torch.randn(2, 1, 64, 512).bfloat16()
    sink = torch.randn(64)
    main, extra = torch.randint(0, 256, (2, 1, 128)).int(), torch.randint(0, 128, (2, 1, 64)).int()
    length, extra_length = torch.tensor([128, 5], dtype=torch.int32), torch.tensor([64, 0], dtype=torch.int32)
    out = found.flash_mla_with_kvcache(
        q=q,
        k_cache=pages["main"],
        head_dim_v=512,
        block_table=None,
        cache_seqlens=None,
        tile_scheduler_metadata=object(),
        softmax_scale=512**-0.5,
        is_fp8_kvcache=True,
        indices=main,
        topk_length=length,
        attn_sink=sink,
        extra_k_cache=pages["extra"],
        extra_indices_in_kvcache=extra,
        extra_topk_length=extra_length,
        use_legacy=True,
    )[0]
    errors = []
    for request in range(2):
        seen = [rows["main"][main[request, 0, : length[request]].long()]]
        seen.append(rows["extra"][extra[request, 0, : extra_length[request]].long()])
        wanted, lse = attention(q[request, 0], torch.cat(seen), 512**-0.5)
        errors.append(worst(out[request, 0], wanted * torch.sigmoid(lse - sink)[:, None]))
    yield "dsv4_flash: with_kvcache", max(errors)


def dense(spec: str) -> Iterator[tuple[str, float]]:
    """As flashmla_backend calls it: pages of 64, metadata as tensors; with an e4m3 cache an e4m3 q, and scales."""
    found, _ = plugin(spec)
    q, cache = torch.randn(2, 1, 16, 576).bfloat16(), torch.randn(3, 64, 1, 576).bfloat16()
    scales = {}
    wide_q, wide = q, cache
    if spec == "dsv3_fp8":
        scales = {"descale_q": torch.tensor([0.5]), "descale_k": torch.tensor([0.25])}
        q, cache = q.to(torch.float8_e4m3fn), cache.to(torch.float8_e4m3fn)
        wide_q, wide = q.float() * 0.5, cache.float() * 0.25
    table, lengths = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32), torch.tensor([70, 9], dtype=torch.int32)
    out, lse = found.flash_mla_with_kvcache(
        q=q,
        k_cache=cache,
        block_table=table,
        cache_seqlens=lengths,
        head_dim_v=512,
        tile_scheduler_metadata=torch.zeros(132, 8, dtype=torch.int32),
        num_splits=torch.zeros(3, dtype=torch.int32),
        softmax_scale=SCALE,
        causal=True,
        **scales,
    )
    errors = []
    for request in range(2):
        rows = wide[table[request].long(), :, 0].flatten(0, 1)[: lengths[request]]
        wanted, wanted_lse = attention(wide_q[request, 0], rows, SCALE)
        errors += [worst(out[request, 0], wanted), worst(lse[request, :, 0], wanted_lse)]
    yield f"{spec}: with_kvcache", max(errors)


def refusals() -> Iterator[tuple[str, str]]:
    """Arguments of SGLang that a package cannot take."""
    q, cache = torch.zeros(1, 1, 4, 512).bfloat16(), torch.zeros(1, 64, 1, 584, dtype=torch.uint8)
    fp8_q, scale = torch.zeros(1, 1, 4, 576).to(torch.float8_e4m3fn), torch.ones(1)
    for spec, tensor, changed in (
        ("dsv32_fp8", q, {"kv_format": "V32_NO_ROPE"}),
        ("dsv4_flash", q, {"kv_format": "V32"}),
        ("dsv4_flash", q, {"use_legacy": False}),
        ("dsv4_flash", q, {"descale_k": scale}),
        ("dsv3_fp8", fp8_q, {}),
        ("dsv3_fp8", fp8_q, {"descale_k": scale}),
        ("dsv3_fp8", q, {"descale_q": scale, "descale_k": scale}),
    ):
        found, _ = plugin(spec)
        try:
            found.flash_mla_with_kvcache(tensor, cache, None, None, 512, None, **changed)
            yield f"{spec}: {sorted(changed)}", "taken"
        except ValueError as error:
            yield f"{spec}: {sorted(changed)}", str(error)


def main() -> None:
    """Prints the worst error of each call, and each refusal."""
    np.seterr(all="ignore")
    interpreter.install()
    torch.manual_seed(0)
    calls = [*sparse_prefill("dsv32_fp8"), *sparse_prefill("base2"), *sparse_decode(), *two_caches()]
    calls += [*dense("dsv3"), *dense("dsv3_fp8")]
    print(json.dumps({"errors": dict(calls), "refused": dict(refusals())}))


if __name__ == "__main__":
    main()
