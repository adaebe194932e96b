"""One tiny DeepSeek model with dummy weights in vLLM, by vLLM's own backend or by the plugin of a package.

Writes tokens, log-probabilities and throughput as JSON. Several such processes get ready side by side; one at a time
generates, once all of them are ready.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = {  # the package, vLLM's own backend and its word for the cache
    "sparse": ("dsv32", "FLASHMLA_SPARSE", "auto"),
    "sparse_fp8": ("dsv32_fp8", "FLASHMLA_SPARSE", "fp8_ds_mla"),
    "dense": ("dsv3", "FLASHMLA", "auto"),
}
VOCABULARY = 2048
LENGTHS = (5, 17, 64, 70, 129, 300, 1200, 2500, 3000)  # of prompts; the longest hold more tokens than the indices name
TOKENS = 24  # generated from each
SIZE = 0.08  # of the weights: with vLLM's 0.001 attention adds nothing that a token shows
WAIT = 240  # seconds for the others to get ready


def options() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("who", choices=("vllm", "mlagen"))
    parser.add_argument("mode", choices=("eager", "graphs"))
    parser.add_argument("--heads", type=int, default=16, help="query heads, as a rank has them")
    parser.add_argument("--ready", type=Path, required=True, help="folder of the runs that are ready")
    parser.add_argument("--runs", type=int, default=1, help="runs to wait for")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def config(kind: str, heads: int) -> dict[str, Any]:
    """A config.json of few and narrow layers, with attention of the real size."""
    sparse = kind != "dense"
    model = {
        "architectures": ["DeepseekV32ForCausalLM" if sparse else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v32" if sparse else "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
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


def prepare(kind: str, who: str) -> None:
    """What vLLM reads of the environment before it is imported: which plugins it loads, among others."""
    package, _, _ = KINDS[kind]
    os.environ |= {
        "VLLM_PLUGINS": f"mlagen_{package}" if who == "mlagen" else "none",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
    }


def make_engine(kind: str, who: str, mode: str, heads: int) -> Any:
    """vLLM with the model, on the backend that is asked for."""
    import vllm.model_executor.model_loader.dummy_loader as loader
    from vllm import LLM
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    initialize = loader.initialize_dummy_weights
    loader.initialize_dummy_weights = lambda model, config, *_, **__: initialize(model, config, low=-SIZE, high=SIZE)
    package, backend, cache_dtype = KINDS[kind]
    if who == "mlagen":  # vLLM 0.26 has one name for all that are not its own
        backend = f"MLAGEN_{package.upper()}" if hasattr(AttentionBackendEnum, "register") else "CUSTOM"
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config(kind, heads)), encoding="utf-8")
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        block_size=64,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.05,  # of which so many runs fit one GPU
        kv_cache_memory_bytes=1 << 30,
        attention_backend=backend,
        kv_cache_dtype=cache_dtype,
        enforce_eager=mode == "eager",
        **({} if mode == "eager" else {"compilation_config": graphs}),
    )


def backends(engine: Any) -> list[str]:
    """The backends of the engine's layers, as classes: which of them runs is seen, not asked for."""
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    found = {layer.get_attn_backend() for layer in layers if hasattr(layer, "get_attn_backend")}
    return sorted(f"{one.__module__}.{one.__qualname__}" for one in found)


@contextlib.contextmanager
def alone(ready: Path, runs: int, name: str) -> Iterator[None]:
    """Waits until all runs are ready; inside no other generates."""
    (ready / name).touch()
    until = time.monotonic() + WAIT
    while len(list(ready.iterdir())) < runs and time.monotonic() < until:
        time.sleep(0.2)
    with (ready.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens, of the seed and the length alone."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()


def generate(engine: Any, prompts: list[list[int]], count: int, logprobs: int | None = None) -> list[Any]:
    """vLLM's results: `count` greedy tokens a prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=count, logprobs=logprobs, ignore_eos=True, detokenize=False)
    return engine.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)


def sequences(engine: Any) -> list[dict[str, Any]]:
    """Greedy tokens, the log-probability of each, and by how much it leads the next best."""
    found = []
    for result in generate(engine, [prompt(length, length) for length in LENGTHS], TOKENS, logprobs=2):
        (output,) = result.outputs
        best = [sorted((one.logprob for one in each.values()), reverse=True) for each in output.logprobs]
        rows = {"tokens": list(output.token_ids), "logprobs": [each[0] for each in best]}
        found.append(rows | {"leads": [each[0] - each[1] for each in best]})
    return found


def context_decides(engine: Any) -> str:
    """In how many pairs of prompts that end alike the first token is another: that of attention, not of the end."""
    ends = [prompt(100 + number, 4) for number in range(16)]
    firsts = [
        [result.outputs[0].token_ids[0] for result in generate(engine, [prompt(seed, 60) + end for end in ends], 1)]
        for seed in (1, 2)
    ]
    return f"{sum(a != b for a, b in zip(*firsts, strict=True))} of {len(ends)}"


def throughput(engine: Any) -> dict[str, float]:
    """Tokens a second, the best of three: of 64 requests that decode, and of 8 prompts of 3000 tokens."""
    short, long = [prompt(n, 512) for n in range(64)], [prompt(n, 3000) for n in range(8)]
    first, decode, prefill = (
        min(seconds(engine, prompts, count) for _ in range(3))
        for prompts, count in ((short, 1), (short, 65), (long, 1))
    )
    return {"decode": 64 * 64 / (decode - first), "prefill": 8 * 3000 / prefill}


def seconds(engine: Any, prompts: list[list[int]], count: int) -> float:
    """How long it takes to generate."""
    start = time.perf_counter()
    generate(engine, prompts, count)
    return time.perf_counter() - start


def main() -> None:
    """Runs the model and writes what came out."""
    asked = options()
    prepare(asked.kind, asked.who)
    start = time.monotonic()
    import torch
    import triton
    import vllm

    engine = make_engine(asked.kind, asked.who, asked.mode, asked.heads)
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "triton": triton.__version__}
    found = {"heads": asked.heads, "device": torch.cuda.get_device_name(), "versions": versions}
    found |= {"backends": backends(engine), "ready": time.monotonic() - start}
    with alone(asked.ready, asked.runs, f"{asked.kind}-{asked.mode}-{asked.who}"):
        found |= {"sequences": sequences(engine), "decides": context_decides(engine), "rates": throughput(engine)}
    asked.out.write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # vLLM's shutdown takes seconds, and nothing is left to write


if __name__ == "__main__":
    main()
