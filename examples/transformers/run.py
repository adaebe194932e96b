"""Runs tiny Hugging Face models of random weights by generated packages, beside transformers' own eager attention.

    python examples/transformers/run.py [deepseek_v32 deepseek_v3 minicpm3] [--device cpu]

On a CPU the kernels run in Triton's interpreter, as `mlagen verify` runs them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parents[1] / "generated"
TINY = {
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "initializer_range": 0.06,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
INDEXER = {"index_topk": 16, "index_n_heads": 4, "index_head_dim": 128}
MINICPM = {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}


@dataclass(frozen=True)
class Model:
    """A model, and the package that it runs by.

    Attributes:
        classes: how the names of its classes begin.
        dims: its config, beside TINY.
        package: the generated package.
        use: the function of mla_attention.py that puts the package in.
        seed: of weights and prompts for which no two tokens are equally likely but for bf16's rounding.
    """

    classes: str
    dims: dict[str, Any]
    package: str
    use: str
    seed: int


MODELS = {
    "deepseek_v32": Model("DeepseekV32", {**DEEPSEEK, **INDEXER}, "dsv32", "use_sparse", 20),
    "deepseek_v3": Model("DeepseekV3", DEEPSEEK, "dsv3_prefill", "use_multi_head", 0),
    "minicpm3": Model("MiniCPM3", MINICPM, "minicpm3_prefill", "use_multi_head", 10),
}
PROMPT, NEW = 24, 8


def tiny(model: Model) -> Any:
    """A model of random weights in fp32."""
    import torch
    import transformers

    torch.manual_seed(model.seed)
    config = getattr(transformers, f"{model.classes}Config")(**{**TINY, **model.dims}, attn_implementation="eager")
    return getattr(transformers, f"{model.classes}ForCausalLM")(config).eval()


def planned(package: Any, device: str) -> contextlib.AbstractContextManager[Any]:
    """On a CPU, calls plan as for an A100."""
    launch = package._launch
    return launch.planned_for(launch.facts_of("sm80")) if device == "cpu" else contextlib.nullcontext()


def compare(model: Model, device: str) -> dict[str, Any]:
    """Logits and greedy tokens of a model in bf16: by eager attention, by the package, and in fp32."""
    import importlib

    import torch

    package = importlib.import_module(model.package)
    exact = tiny(model).to(device)
    eager = copy.deepcopy(exact).bfloat16()
    ours = copy.deepcopy(eager)
    getattr(importlib.import_module("mla_attention"), model.use)(ours, package)

    torch.manual_seed(model.seed + 1)
    tokens = torch.randint(1, TINY["vocab_size"], (2, PROMPT), device=device)
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0  # a shorter prompt, padded on its left
    given = {"input_ids": tokens, "attention_mask": mask}
    told, models = mask.bool(), {"eager": eager, "mlagen": ours}
    with torch.no_grad(), planned(package, device):
        reference = exact(**given).logits[told].double()
        logits = {key: one(**given).logits[told].double() for key, one in models.items()}
        generated = {
            key: one.generate(**given, max_new_tokens=NEW, do_sample=False)[:, PROMPT:].tolist()
            for key, one in models.items()
        }
    best = {key: one.argmax(-1) for key, one in logits.items()}
    return {
        "error": {key: (one - reference).square().mean().sqrt().item() for key, one in logits.items()},
        "top1": (int((best["eager"] == best["mlagen"]).sum()), best["eager"].numel()),
        "tokens": generated,
    }


def main() -> int:
    """Prints a comparison a model; 1 if a token differs."""
    parser = argparse.ArgumentParser(description="Tiny Hugging Face models by generated packages.")
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    sys.path.insert(0, str(HERE))
    from mlagen import diffs

    if options.device == "cpu":
        import numpy as np

        from mlagen.verify import interpreter

        np.seterr(all="ignore")  # a GPU warns of no infinity either
        interpreter.install()
    different = 0
    for name in options.models or MODELS:
        with diffs.whole(PACKAGES / MODELS[name].package) as folder:  # minicpm3_prefill is kept as a diff
            sys.path.insert(0, str(folder.parent))
            found = compare(MODELS[name], options.device)
        same, count = found["top1"]
        tokens = found["tokens"]
        errors = ", ".join(f"{key} {value:.4f}" for key, value in found["error"].items())
        equal = tokens["eager"] == tokens["mlagen"]
        print(f"{name} by {MODELS[name].package}: rms error of logits against fp32: {errors}")
        print(f"  most likely token the same in {same} of {count} positions")
        print(
            f"  {NEW} tokens generated greedily for 2 prompts: {'equal' if equal else 'different'}: {tokens['mlagen']}"
        )
        different += same != count
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
