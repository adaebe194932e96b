"""What a run is made of: models, engines, and the loads of each engine. `plan.py MODE...` prints the engines."""

from __future__ import annotations

import sys
from typing import Any

VOCABULARY = 2048
BLOCK = 64  # tokens a page of the cache
V4_BLOCK = 256  # of DeepSeek V4, whose caches hold as many tokens in pages of their own
LONGEST = 4096  # tokens of a prompt and its answer

KINDS = {  # the package, vLLM's own backend and its word for the cache
    "sparse": ("dsv32", "FLASHMLA_SPARSE", "auto"),
    "sparse_fp8": ("dsv32_fp8", "FLASHMLA_SPARSE", "fp8_ds_mla"),
    "dense": ("dsv3", "FLASHMLA", "auto"),
    "v4": ("dsv4_flash", "FLASHMLA_SPARSE_DSV4", "fp8"),
}
SIZES = [1, 2, 4, 8, 16, 32, 64]  # of batches that a graph is captured for
DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}
PIECES = {"mode": 3, "backend": "eager", "cudagraph_mode": "FULL_AND_PIECEWISE"}  # attention runs between the pieces
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}

# Engines by name, with what vLLM is told beside what all are told. Those that measure throughput come first.
ENGINES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": DECODE_GRAPHS},
    "mixed": {"compilation_config": DECODE_GRAPHS, "max_num_batched_tokens": 512, "enable_prefix_caching": True},
    "pieces": {
        "compilation_config": PIECES | {"cudagraph_capture_sizes": [*SIZES, 128, 256, 512]},
        "max_num_batched_tokens": 512,
    },
    "speculative": {
        "compilation_config": DECODE_GRAPHS,
        "speculative_config": DRAFTS,
        "logprobs_mode": "processed_logprobs",  # of the tokens that a request allows
    },
    # Which prefills go by multi-head attention depends on the whole batch, unless vLLM is told to send none there; and
    # its fused_add_rms_norm adds up in other orders from 256 tokens on, unless PyTorch's operators take its place.
    "invariant": {
        "enforce_eager": True,
        "max_num_batched_tokens": 16384,
        "attention_config": {"sparse_mla_force_mqa": True},
        "compilation_config": {"custom_ops": ["-rms_norm"]},
        "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
    },
}
MEASURED = ("eager", "graphs")
MODES = {  # the engine that serves each load; in this order where they share one
    "eager": "eager",
    "graphs": "graphs",
    "load": "graphs",
    "mixed": "mixed",
    "prefix": "mixed",
    "pieces": "pieces",
    "speculative": "speculative",
    "invariant": "invariant",
}
MAY_REFUSE = ("speculative", "invariant")  # what vLLM's own backend need not have


def modes_of(engine: str, asked: list[str]) -> list[str]:
    """The loads that an engine serves, of those that are asked for."""
    return [mode for mode, of in MODES.items() if of == engine and mode in asked]


def block(kind: str) -> int:
    """Tokens a page of the model's cache."""
    return V4_BLOCK if kind == "v4" else BLOCK


def v4_config(heads: int) -> dict[str, Any]:
    """As `config` for DeepSeek V4: a layer that sees a window alone, one with 4 tokens a row beside it, one with 128.

    None of its matrices is quantised: one step of bf16 would become one of e4m3, and DeepGEMM would compile kernels for
    each shape and size of a batch. `v4.py` multiplies `wo_a`, which vLLM takes as e4m3 alone.
    """
    layers = 3
    plain = [
        *("attn.fused_wqa_wkv", "attn.wq_b", "attn.wo_a", "attn.wo_b", "attn.indexer.wq_b"),
        *("ffn.shared_experts.gate_up_proj", "ffn.shared_experts.down_proj", "ffn.experts.routed_experts"),
    ]
    skipped = [f"model.layers.{layer}.{name}" for layer in range(layers) for name in plain]
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4, "original_max_position_embeddings": LONGEST // 4}
    model = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LONGEST,
        "num_hidden_layers": layers,
        "hidden_size": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": yarn | {"beta_fast": 32, "beta_slow": 1},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "quantization_config": fp8 | {"modules_to_not_convert": skipped},
    }
    attention = {
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 256,
        "o_lora_rank": 256,
        "o_groups": max(heads // 8, 1),
        "sliding_window": 128,
        "compress_ratios": [0, 4, 128],
        "index_topk": 512,
        "index_n_heads": 64,
        "index_head_dim": 128,
    }
    experts = {
        "moe_intermediate_size": 256,
        "n_routed_experts": 4,  # all of them for each token: where two are close, rounding alone decides who is picked
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "num_hash_layers": 0,
        "topk_method": "noaux_tc",
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "swiglu_limit": None,
        "expert_dtype": "fp8",
        "num_nextn_predict_layers": 0,
    }
    return model | attention | experts | {"hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6}


def config(kind: str, heads: int) -> dict[str, Any]:
    """A config.json of few and narrow layers, with attention of the real size."""
    if kind == "v4":
        return v4_config(heads)
    sparse = kind != "dense"
    model = {
        "architectures": ["DeepseekV32ForCausalLM" if sparse else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v32" if sparse else "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LONGEST,
        "num_hidden_layers": 3,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    attention = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    experts = {
        "first_k_dense_replace": 3,  # no layer has experts: the fields have to be there
        "moe_layer_freq": 1,
        "moe_intermediate_size": 256,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    }
    indexer = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128} if sparse else {}
    return model | attention | experts | indexer


def main(asked: list[str]) -> int:
    """Prints, a line each, the engines of the asked loads, or all: "measured" or "after", and the name."""
    unknown = [mode for mode in asked if mode not in MODES]
    if unknown:
        print(f"MODES: got {' '.join(unknown)}; takes {' '.join(MODES)}", file=sys.stderr)
        return 2
    for engine in ENGINES:
        if modes_of(engine, asked or list(MODES)):
            print("measured" if engine in MEASURED else "after", engine)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
