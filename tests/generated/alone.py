"""Imports a generated package where the generator and all it needs cannot be imported, and calls its wrappers.

    python -I -W error alone.py {run|refuse} PACKAGE_DIR...

`run` calls each wrapper on Triton's interpreter, checks its result and prints its name; `refuse` calls each with a
wrong argument and on a CPU, and prints its errors. Lines begin with the package's name.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

GENERATOR = {"click", "jinja2", "mlagen", "pydantic", "pydantic_core", "rich", "yaml"}


class Refuse(importlib.abc.MetaPathFinder):
    """Finds nothing of the generator's."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in GENERATOR:
            raise ImportError(f"{name} is not to be imported here")


def import_package(folder):
    spec = importlib.util.spec_from_file_location(
        folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = sys.modules[folder.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


def page_bytes(package):
    """Bytes of a page of as many tokens as the spec says, or of one, in a quantised cache."""
    layout = package.cache._layout
    rows = (package.SPEC["spec"]["cache"]["block_size"] or 1) * layout.ROW_BYTES
    return -(-rows // getattr(layout, "PAGE_MULTIPLE", 1)) * getattr(layout, "PAGE_MULTIPLE", 1)


def make_cache(package, pages):
    """A cache of zeros, pages x tokens x bytes of a token, or columns if it is not quantised."""
    import torch

    said = package.SPEC["spec"]
    model, tokens = said["model"], said["cache"]["block_size"] or 1
    columns = model["kv_lora_rank"] + model["qk_rope_head_dim"]
    if package.SPEC["layout"] in ("bf16", "fp16"):
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[model["dtype"]]
        return torch.zeros(pages, tokens, columns, dtype=dtype)
    page, row = page_bytes(package), package.SPEC["row_bytes"]
    return torch.zeros(pages * page, dtype=torch.uint8).as_strided((pages, tokens, row), (page, row, 1))


def prologue_arguments(package, dtype):
    """Small arguments of prologues, over caches of their own."""
    import torch

    said = package.SPEC["spec"]
    model, tokens = said["model"], said["cache"]["block_size"] or 1
    d_c, d_rope = model["kv_lora_rank"], model["qk_rope_head_dim"]
    heads, kv = torch.randn(2, 3, d_c + d_rope).to(dtype), torch.randn(2, d_c + d_rope).to(dtype)
    slots, positions, angles = torch.tensor([5, -1]), torch.tensor([3, 4]), torch.randn(8, max(d_rope, 1))
    quantised = package.SPEC["layout"] not in ("bf16", "fp16")
    return {
        "fused_deepseek_v4_qnorm_rope_kv_insert": {
            "q": heads.clone(),
            "kv": kv,
            "k_cache": make_cache(package, 12),
            "slot_mapping": slots,
            "positions": positions,
            "cos_sin_cache": angles,
            "eps": 1e-6,
            "block_size": tokens,
        },
        "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": {
            "q_in": heads,
            "kv": kv,
            "k_cache": make_cache(package, 12),
            "slot_mapping": slots,
            "position_ids": positions,
            "cos_sin_cache": angles,
            "q_head_padded": 4,
            "eps": 1e-6,
            "cache_block_size": tokens,
        },
        "concat_and_cache_mla_rope_fused": {
            "positions": positions,
            "q_pe": heads[..., d_c:].clone(),
            "k_pe": kv[:, d_c:].clone(),
            "kv_c": kv[:, :d_c].clone(),
            "cos_sin_cache": angles,
            "is_neox": model["rope"] == "neox",
            "slot_mapping": slots,
            "kv_cache": make_cache(package, 12),
            "kv_cache_dtype": package.SPEC["layout"] if quantised else "auto",
        },
    }


def compressor_arguments(package, dtype):
    """Small arguments of the compressor, and of the output's quantisation. The first token of two ends its four."""
    import torch

    model, d_rope = package.SPEC["spec"]["model"], package.SPEC["spec"]["model"]["qk_rope_head_dim"]
    columns, positions, slots = model["kv_lora_rank"] + d_rope, torch.tensor([3, 4]), torch.tensor([5, -1])
    states, angles = torch.zeros(2, 4, 4 * columns), torch.randn(8, max(d_rope, 1))
    output = {"o": torch.randn(2, 4, model["v_head_dim"]).to(dtype), "n_groups": 2, "heads_per_group": 2}
    return {
        "fused_inv_rope_fp8_quant": output | {"positions": positions, "cos_sin_cache": angles},
        "save_partial_states": {
            "kv": torch.randn(2, 2 * columns),
            "score": torch.randn(2, 2 * columns),
            "ape": torch.randn(4, 2 * columns),
            "positions": positions,
            "state_cache": states,
            "slot_mapping": slots,
            "block_size": 4,
            "state_width": 2 * columns,
            "compress_ratio": 4,
        },
        "compress_norm_rope_store": {
            "state_cache": states,
            "num_actual": 2,
            "token_to_req_indices": torch.zeros(2, dtype=torch.int32),
            "positions": positions,
            "slot_mapping": slots,
            "block_table": torch.zeros(1, 2, dtype=torch.int32),
            "block_size": 4,
            "state_width": 2 * columns,
            "cos_sin_cache": angles,
            "kv_cache": make_cache(package, 12),
            "k_cache_metadata": slots,
            "pdl_kwargs": None,
            "head_dim": columns,
            "rope_head_dim": d_rope,
            "compress_ratio": 4,
            "overlap": True,
            "use_fp4_cache": False,
            "rms_norm_weight": torch.ones(columns, dtype=dtype),
            "rms_norm_eps": 1e-6,
        },
    }


def required_arguments(attention, heads, d_rope):
    """Arguments of attention of two tokens that some specs require."""
    import torch

    vectors = {"attn_sink": torch.zeros(heads), "topk_length": torch.full((2,), 4, dtype=torch.int32)}
    angles = {"positions": torch.tensor([3, 4]), "cos_sin_cache": torch.randn(8, max(d_rope, 1))}
    required = {name: one for name, one in vectors.items() if attention.get(name) == "required"}
    return required | (angles if attention.get("out_rope") else {})


def arguments(package):
    """Small arguments of each wrapper, by name: two tokens, and unquantised rows that are NaN past the first page."""
    import torch

    said = package.SPEC["spec"]
    if said["cache"] is None:
        return dense_fwd_arguments(package)
    model, cache, sparse = said["model"], said["cache"], said["attention"]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[model["dtype"]]
    d_c, d_rope = model["kv_lora_rank"], model["qk_rope_head_dim"]
    quantised = package.SPEC["layout"] not in ("bf16", "fp16")
    page, heads = 1 if quantised else cache["block_size"] or 1, sparse.get("out_quant", {}).get("heads_per_group", 3)
    torch.manual_seed(0)
    kv = torch.full((64 // page + 2, page, d_c + d_rope), float("nan")).to(dtype)
    kv.view(-1, d_c + d_rope)[:8] = torch.randn(8, d_c + d_rope).to(dtype)
    attention = {
        "q": torch.randn(2, heads, d_c + d_rope).to(dtype),
        "kv": kv,
        "indices": torch.tensor([[[0, 7, -1, 3]], [[5, 5, 1 << 30, -9]]], dtype=torch.int32),
        "sm_scale": 0.25,
    }
    written, tokens = make_cache(package, 12), cache["block_size"] or 1
    k = torch.randn(2, d_c + d_rope).to(dtype)
    over_cache = {
        "q": attention["q"][:, None],
        "k_cache": written[:, :, None],
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": model["v_head_dim"],
        "tile_scheduler_metadata": package.get_mla_metadata()[0] if hasattr(package, "get_mla_metadata") else None,
        "softmax_scale": 0.25,
        "is_fp8_kvcache": quantised,
        "indices": attention["indices"],
    }
    if sparse["kind"] == "dense":
        del over_cache["indices"]
        over_cache |= {"block_table": torch.zeros(2, 12).int(), "cache_seqlens": torch.tensor([3, 0]).int()}
    attention |= (required := required_arguments(sparse, heads, d_rope))
    over_cache |= required
    table, one = torch.arange(12, dtype=torch.int32)[None], torch.ones(1, dtype=torch.int32)
    calls = (
        indexer_arguments(package, dtype)
        | merge_arguments(dtype, model["v_head_dim"])
        | prologue_arguments(package, dtype)
        | compressor_arguments(package, dtype)
    )
    calls |= {
        "flash_mla_sparse_fwd": attention,
        "triton_mla_sparse_attention": attention,
        "flash_mla_with_kvcache": over_cache,
        "concat_and_cache_mla": {
            "kv_c": k[:, :d_c],
            "k_pe": k[:, d_c:] if d_rope else None,
            "kv_cache": written,
            "slot_mapping": torch.tensor([5, -1]),
            "kv_cache_dtype": package.SPEC["layout"] if quantised else "auto",
        },
        "quantize_and_insert_k_cache": {
            "k": k,
            "k_cache": written,
            "slot_mapping": torch.tensor([5, -1]),
            "block_size": tokens,
            "is_ue8m0": said["name"] != "odd_fp8",
        },
        "dequantize_and_gather_k_cache": {
            "out": torch.full((1, 8, d_c + d_rope), float("nan")).to(dtype),
            "k_cache": written,
            "seq_lens": 6 * one,
            "gather_lens": one,
            "block_table": table,
            "block_size": tokens,
            "offset": 2,
        },
        "gather_and_maybe_dequant_cache": {
            "src_cache": written,
            "dst": torch.full((1, d_c + d_rope), float("nan")).to(dtype),
            "block_table": table,
            "cu_seq_lens": torch.tensor([0, 1], dtype=torch.int32),
            "token_to_seq": 0 * one,
            "num_tokens": 1,
            "kv_cache_dtype": package.SPEC["layout"] if quantised else "auto",
            "seq_starts": 5 * one,
        },
        "compute_global_topk_indices_and_lens": {
            "topk_indices": attention["indices"][:, 0],
            "token_to_req": torch.zeros(2, dtype=torch.int32),
            "block_table": table,
            "block_size": 1,
            "is_valid_token": torch.tensor([True, False]),
        },
        "combine_topk_swa_indices": {
            "topk_indices": attention["indices"][:, 0],
            "query_start_loc": torch.tensor([0, 2], dtype=torch.int32),
            "seq_lens": 9 * one,
            "gather_lens": 9 * one,
            "window_size": 3,
            "compress_ratio": 4,
            "topk": 4,
            "M": 20,
            "N": 10,
        },
        "triton_convert_req_index_to_global_index": {
            "req_id": torch.zeros(2, dtype=torch.int32),
            "block_table": table,
            "token_indices": attention["indices"][:, 0],
            "BLOCK_SIZE": 1,
            "NUM_TOPK_TOKENS": 4,
        },
    }
    calls["decode_attention_fwd"] = decode_arguments(attention["q"], written, model["v_head_dim"])
    if package.SPEC["layout"] == "fp8_per_tensor":
        for name in ("flash_mla_with_kvcache", "decode_attention_fwd"):
            calls[name]["k_scale"] = torch.ones(1)
    return {name: calls[name] for name in said["wrappers"] if name in calls}


def decode_arguments(q, written, columns):
    """Small arguments of decode over pages, with V of so many columns: one request has 3 keys, the other none."""
    import torch

    return {
        "q": q,
        "k_buffer": written[:, :, None],
        "v_buffer": written[:, :, None, :columns],
        "o": torch.empty(2, 3, columns, dtype=q.dtype),
        "lse": torch.empty(2, 3),
        "req_to_token": torch.zeros(2, 12, dtype=torch.int32),
        "b_seq_len": torch.tensor([3, 0], dtype=torch.int32),
        "attn_logits": torch.empty(2, 3, 1, columns + 1),
        "num_kv_splits": 1,
        "sm_scale": 0.25,
        "page_size": written.shape[1],
        "is_mla": True,
    }


def indexer_arguments(package, dtype):
    """Small arguments of the indexer's wrappers, of a package with one: two tokens, two keys, and a page of zeros."""
    import torch

    if not package.SPEC["spec"].get("indexer"):
        return {}
    indexer, tokens = package.SPEC["spec"]["indexer"], package.SPEC["spec"]["indexer_cache"]["block_size"]
    heads, columns, half = indexer["num_heads"], indexer["head_dim"], indexer["rope_head_dim"] // 2
    positions, slots, two = torch.tensor([0, 1]), torch.tensor([3, -1]), torch.tensor([1, 2], dtype=torch.int32)
    k, weights, angles = torch.zeros(2, columns, dtype=dtype), torch.zeros(2, heads), torch.zeros(4, 2 * half)
    cache = torch.zeros(1, tokens, package.SPEC["indexer_row_bytes"], dtype=torch.uint8)
    stored = torch.zeros(2, columns).to(torch.float8_e4m3fn)
    q = torch.zeros(2, heads, columns).to(torch.float8_e4m3fn)
    seen = {"weights": weights, "cu_seq_len_k_start": 0 * two, "cu_seq_len_k_end": two}
    flat = {**seen, "kv": (stored, torch.ones(2))}
    paged = {"weights": weights, "kv_cache": cache[:, :, None], "context_lens": two, "block_table": 0 * two[:, None]}
    paged |= {"schedule_meta": torch.zeros(5, 2, dtype=torch.int32), "max_context_len": 8}
    logits, indices = torch.zeros(2, 8), torch.zeros(2, 4, dtype=torch.int32)
    rows = {"logits": logits, "indices": indices, "num_rows": 2, "stride0": 8, "stride1": 1, "topk": 4}
    of_lengths = {"logits": logits, "lengths": two, "indices": indices, "workspace": None, "k": 4, "max_seq_len": 8}
    rotated = {"positions": positions, "index_q": q.to(dtype), "index_q_cos_sin_cache": angles}
    rotated |= {"index_weights": weights, "index_weights_softmax_scale": 1.0, "index_weights_head_scale": 1.0}
    normed = {"k_pre": k, "positions": positions, "cos_sin_cache": angles, "rms_norm_weight": torch.ones(columns)}
    both = {"q": q.to(dtype), "q_out": q.clone(), "weights": weights, "weights_out": torch.zeros(2, heads), "k": k}
    both |= {"kv_cache": cache, "slot_mapping": slots, "norm_weight": torch.ones(columns), "norm_bias": None}
    both |= {"positions": positions, "cos_cache": angles[:, :half], "sin_cache": angles[:, half:], "epsilon": 1e-6}
    both |= {"quant_block_size": columns, "scale_fmt": "ue8m0", "weights_scale": 1.0}
    gathered = {"dst_k": stored.view(torch.uint8), "dst_scale": torch.zeros(2, 4, dtype=torch.uint8)}
    return {
        "indexer_k_quant_and_cache": {"k": k, "kv_cache": cache, "slot_mapping": slots},
        "indexer_k_norm_rope_store": {**normed, "rms_norm_eps": 1e-6, "k_cache": cache, "kv_slot_mapping": slots},
        "fused_indexer_q_rope_quant": rotated,
        "indexer_qk_rope_quant_and_cache": {**both, "is_neox": indexer["rope"] == "neox"},
        "cp_gather_indexer_k_quant_cache": {
            "kv_cache": cache,
            **gathered,
            "block_table": 0 * two[None],
            "cu_seq_lens": 2 * two - 2,
        },
        "fp8_mqa_logits": {**flat, "q": q},
        "fp8_fp4_mqa_logits": {**flat, "q": (q, None)},
        "get_paged_mqa_logits_metadata": {"context_lens": two, "block_kv": tokens, "num_sms": 4},
        "fp8_paged_mqa_logits": {**paged, "q": q[:, None]},
        "fp8_fp4_paged_mqa_logits": {**paged, "q": (q[:, None], None)},
        "top_k_per_row_prefill": {**rows, "row_starts": 0 * two, "row_ends": two},
        "top_k_per_row_decode": {**rows, "next_n": 1, "seq_lens": two},
        "persistent_topk": of_lengths,
        "top_k_page_table_transform": {"input": logits, "src_page_table": indices, "lengths": two, "k": 4},
        "topk_merge": {"scores": logits, "ids": torch.zeros(2, 8, dtype=torch.int32), "k": 4},
        "indexer_topk": {**flat, "q": (q, None), "topk": 4},
        "paged_indexer_topk": {**paged, "q": (q[:, None], None), "topk": 4},
        **candidate_arguments(flat, paged, q, 0 * two[:, None], logits),
        **kpool_arguments(cache, dtype),
    }


def candidate_arguments(flat, paged, q, blocks, logits):
    """Small arguments of the functions around candidate blocks: a block a token."""
    flat = {**flat, "q": (q, None), "candidate_blocks": blocks}
    pages = {name: paged[name] for name in ("kv_cache", "weights", "context_lens", "block_table")}
    pages |= {"q": (q[:, None], None), "candidate_blocks": blocks}
    rows = {"logits": logits, "row_ks": None, "row_ke": paged["context_lens"], "topk_blocks": 1, "block_size": 8}
    return {
        "select_candidate_blocks": {**rows, "out": blocks},
        "candidate_mqa_logits": flat,
        "paged_candidate_mqa_logits": pages,
        "candidate_indexer_topk": {**flat, "topk": 4},
        "paged_candidate_indexer_topk": {**pages, "topk": 4},
    }


def kpool_arguments(cache, dtype):
    """Small arguments of the functions around pools of keys: two pools of four tokens, and rings of one request."""
    import torch

    tail, slots = torch.zeros(1, 2, 4, 128, dtype=dtype), torch.tensor([3, -1])
    tokens = torch.randn(2, 4, 128).to(dtype)
    caches = {"kv_cache": cache, "tail_kv_cache": tail}
    step = {"key": tokens[:1, :2], "slot_score": tokens[1:, :2], "ape": torch.zeros(4, 128)}
    seed = {"key": tokens[0, :2], "tail_kv_cache": tail, "gate_score": tokens[1, :2], "tslot": slots, "kpool": 4}
    picked = {"pool_ids": torch.tensor([[1, -1]]), "seq_lens": torch.tensor([9], dtype=torch.int32), "pool_size": 4}
    integers = {"tail_slot_mapping": slots[None], "slot_mapping": slots[None], "positions": slots[None].int()}
    return {
        "fwht128_quant_fp8": {"q": tokens[0]},
        "kpool_compress_and_write_cache": {
            "slot_k": tokens,
            "kv_cache": cache,
            "slot_score": tokens.clone(),
            "ape": torch.zeros(4, 128),
            "loc": slots,
            "pool_size": 4,
        },
        "kpool_seed_tail_cache": seed,
        "kpool_decode_update_and_maybe_write_cache_batched": {**step, **caches, **integers, "pool_size": 4},
        "expand_pools_and_append_tail": picked,
    }


def merge_arguments(dtype, columns):
    """Small arguments of merges of values of so many columns: two parts of the same weight."""
    import torch

    (part, other, out), lse = torch.randn(3, 2, 4, columns).to(dtype), torch.zeros(4, 2)
    states = {"output": out, "prefix_output": part, "prefix_lse": lse, "suffix_output": other, "suffix_lse": lse}
    parts = {"outputs": torch.stack([part, other]), "lses": torch.stack([lse, lse])}
    return {"merge_attn_states": states, "merge_attn_parts": parts}


def dense_fwd_arguments(package):
    """Small arguments of the wrappers of a package without latent rows: two rows that see the first and both keys."""
    import torch

    said = package.SPEC["spec"]
    heads = said["multi_head"]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[said["model"]["dtype"]]
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 4, heads["qk_head_dim"]).to(dtype)
    v = torch.randn(2, 4, heads["v_head_dim"]).to(dtype)
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
    calls = {
        "flash_attn_varlen_func": {
            "q": q,
            "k": k,
            "v": v,
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": 2,
            "max_seqlen_k": 2,
            "causal": True,
        },
        **merge_arguments(dtype, heads["v_head_dim"]),
    }
    return {name: calls[name] for name in said["wrappers"] if name in calls}


def check_heads(name, call, result):
    """Compares results of the wrappers of multi-head attention with those of plain torch."""
    import torch

    if name == "flash_attn_varlen_func":
        q, k, v = (call[one].double().transpose(0, 1) for one in ("q", "k", "v"))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~torch.ones(2, 2).tril().bool(), -torch.inf)
        expected, got = (torch.softmax(scores, -1) @ v).transpose(0, 1), result[0]
    else:
        parts = call["outputs"] if "outputs" in call else torch.stack([call["prefix_output"], call["suffix_output"]])
        expected, got = parts.double().mean(0), call["output"] if result is None else result[0]
    torch.testing.assert_close(got.double(), expected, atol=4e-3, rtol=4e-3)


def check_attention(call, out):
    """Compares an output with that of plain torch."""
    import torch

    q, rows = call["q"].double(), call["kv"].double().flatten(0, 1)
    for token, indices in enumerate(call["indices"][:, 0].tolist()):
        k = rows[[index for index in indices if 0 <= index < len(rows)]]
        weights = torch.softmax(q[token] @ k.T * call["sm_scale"], -1)
        torch.testing.assert_close(out[token].double(), weights @ k[:, : out.shape[2]], atol=4e-3, rtol=4e-3)


def run(package):
    """Calls each wrapper on the interpreter, with tensors on the CPU."""
    import torch

    facts = package._launch.DeviceFacts(package.SPEC["spec"]["targets"][0], 4)
    package._launch.device_facts = lambda device: facts
    row = None
    for name, call in sorted(arguments(package).items(), key=lambda item: "gather" in item[0]):
        result = getattr(package, name)(**call)
        if name == "concat_and_cache_mla" and package.SPEC["layout"] in ("bf16", "fp16"):
            written = call["kv_cache"].flatten(0, 1)
            assert written[5].tolist() == [*call["kv_c"][0].tolist(), *call["k_pe"][0].tolist()]
            assert written.count_nonzero() == written[5].count_nonzero()
        elif name in ("concat_and_cache_mla", "quantize_and_insert_k_cache"):
            row = call["k"][0] if "k" in call else torch.cat([call["kv_c"][0], call["k_pe"][0]])
        elif name == "dequantize_and_gather_k_cache":
            torch.testing.assert_close(call["out"][0, 2], row, atol=0.5, rtol=0.2)
        elif name == "gather_and_maybe_dequant_cache":
            torch.testing.assert_close(call["dst"][0], row, atol=0.5, rtol=0.2)
        elif "sparse" in name:
            check_attention(call, result[0] if isinstance(result, tuple) else result)
        elif package.SPEC["spec"]["cache"] is None or name.startswith("merge"):
            check_heads(name, call, result)
        print(f"{package.__name__} {name}")


def refuse(package):
    """Calls each wrapper with its first argument of another dtype, then without it, then on a CPU."""
    import torch

    for name, call in arguments(package).items():
        wrong = next(iter(call))
        other = call[wrong].to(torch.float64)
        for changed in ({**call, wrong: other}, {**call, wrong: None}, call):
            try:
                getattr(package, name)(**changed)
            except (TypeError, ValueError) as error:
                print(f"{package.__name__} {name}: {error}")


def main():
    sys.meta_path.insert(0, Refuse())
    for folder in sys.argv[2:]:
        {"run": run, "refuse": refuse}[sys.argv[1]](import_package(Path(folder)))
    assert GENERATOR.isdisjoint(sys.modules)


if __name__ == "__main__":
    main()
