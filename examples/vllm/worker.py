"""What vLLM adds to its workers (`worker_extension_cls`): weights that let attention decide, and a look inside."""

from __future__ import annotations

import functools
import sys
from typing import Any

import v4
import vllm.model_executor.model_loader.dummy_loader as loader
from calls import CALLS, watch, watch_merges

ROW, FILLED = 576, 1 << 16  # columns of a row of the cache, and rows that are filled at a time
INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
SIZE = 0.08  # of the weights: with vLLM's 0.001 attention adds nothing that a token shows

_initialize = loader.initialize_dummy_weights


def _initialize_larger(model: Any, config: Any, *_: Any, **__: Any) -> None:
    """Random weights of a module; vLLM's loader goes through all modules, the whole model first."""
    _watch()
    _initialize(model, config, low=-SIZE, high=SIZE)
    if getattr(getattr(config, "hf_config", None), "model_type", None) == "deepseek_v4":
        v4.finish(model)


@functools.cache
def _watch() -> None:
    """Has the calls of plugins counted, before a graph is captured: layers, which exist by now, have loaded theirs."""
    for name in [name for name in sys.modules if name.startswith("mlagen_vllm_") and name.endswith(".backend")]:
        watch(sys.modules[name])
    if INDEXER in sys.modules:
        watch_merges(sys.modules[INDEXER])


loader.initialize_dummy_weights = _initialize_larger


class Look:
    """Methods that `collective_rpc` calls by their names."""

    vllm_config: Any
    model_runner: Any
    counted: dict[str, int] | None = None
    apart_by: dict[str, list[float]]

    def attention_classes(self) -> list[str]:
        """The backends of the model's layers, as classes: which of them runs is seen, not asked for."""
        largest = max(weight.float().abs().max().item() for weight in self.model_runner.model.parameters())
        if largest < SIZE / 2:
            raise RuntimeError(f"weights: got up to {largest}, as vLLM's own; {SIZE} was asked for")
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        found = {layer.get_attn_backend() for layer in layers if hasattr(layer, "get_attn_backend")}
        return sorted(f"{one.__module__}.{one.__qualname__}" for one in found)

    def count_steps(self) -> None:
        """Counts, from now on, the steps by how their graphs run: FULL, PIECEWISE or NONE, which is eager."""
        forward = getattr(self.model_runner, "_model_forward", None)
        if forward is None:  # another runner than that of 0.26
            return
        from vllm.forward_context import get_forward_context

        self.counted = counted = dict[str, int]()

        def counting(*arguments: Any, **options: Any) -> Any:
            mode = get_forward_context().cudagraph_runtime_mode.name
            counted[mode] = counted.get(mode, 0) + 1
            return forward(*arguments, **options)

        self.model_runner._model_forward = counting

    def fill_caches(self) -> None:
        """Fills the caches with random rows, by vLLM's own writers."""
        import torch
        from vllm import _custom_ops as ops

        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            cache = layer.kv_cache
            for first in range(0, cache.shape[0] * cache.shape[1], FILLED):
                slots = torch.arange(first, min(first + FILLED, cache.shape[0] * cache.shape[1]), device=cache.device)
                rows = torch.randn(len(slots), ROW, dtype=torch.bfloat16, device=cache.device)
                if hasattr(layer, "impl"):
                    latent, rope = rows[:, :512].contiguous(), rows[:, 512:].contiguous()
                    ops.concat_and_cache_mla(latent, rope, cache, slots, layer.kv_cache_dtype, layer._k_scale)
                else:
                    ops.indexer_k_quant_and_cache(rows[:, :128].contiguous(), cache, slots, 128, "ue8m0")

    def steps(self) -> dict[str, int] | None:
        """What `count_steps` has counted; None where it cannot."""
        return self.counted

    def calls(self) -> dict[str, list[int]]:
        """What `calls.py` has counted."""
        return CALLS

    def compare_attention(self) -> None:
        """Has vLLM's own attention compute, from now on, what each of the plugin's layers of DeepSeek V4 does."""
        import beside  # of vLLM's Python as of V4 on

        self.apart_by = {}
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            if hasattr(layer, "forward_mqa"):
                beside.compare(layer, self.apart_by)

    def apart(self) -> dict[str, list[float]]:
        """By how much `compare_attention` saw the two part, by kind of layer and of tokens."""
        return self.apart_by

    def logits_module(self) -> str | None:
        """The module whose function scores the indexer's keys; None: vLLM has loaded no indexer."""
        indexer = sys.modules.get(INDEXER)
        return getattr(getattr(indexer, "fp8_fp4_mqa_logits", None), "__module__", None)
