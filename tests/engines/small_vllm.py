"""So much of vLLM as `examples/vllm` calls, over a model that sums tokens: the text of a package `vllm`, no test."""

from __future__ import annotations

import importlib
import os
import sys
import types
from enum import Enum
from types import SimpleNamespace as Space
from typing import Any

import torch

__version__ = "0"
__path__: list[str] = []
torch.cuda.get_device_name = lambda *_: "no GPU"


def _module(name: str, **contents: Any) -> None:
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(contents)
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, module)


for _name in ("model_executor", "model_executor.model_loader", "v1", "v1.attention", "v1.attention.backends"):
    _module(f"vllm.{_name}")
_module(
    "vllm.model_executor.model_loader.dummy_loader",
    initialize_dummy_weights=lambda model, config, low=-1e-3, high=1e-3: model.fill_(high),
)
_mode = Space(name="FULL")
_module("vllm.forward_context", get_forward_context=lambda: Space(cudagraph_runtime_mode=_mode))
_module("vllm.v1.attention.backends.registry", AttentionBackendEnum=Enum("Names", ["FLASHMLA", "CUSTOM"]))


class SamplingParams:
    def __init__(self, **options: Any) -> None:
        vars(self).update(options)


class Engine:
    """Computes prompts in chunks together with decodes, keeps whole pages, and drafts if it is asked to."""

    def __init__(self, budget: int, caches: bool, drafts: bool) -> None:
        self.budget, self.caches, self.drafts = budget, caches, drafts
        self.runner: Any = None
        self.running: dict[str, Any] = {}
        self.pages: set[tuple[int, ...]] = set()

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        tokens, cached = prompt["prompt_token_ids"], 0
        while self.caches and cached + 64 < len(tokens) and tuple(tokens[: cached + 64]) in self.pages:
            cached += 64
        self.running[request_id] = Space(prompt=tokens, params=params, done=cached, cached=cached, out=[])

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.running[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        self.runner._model_forward()
        left, results = self.budget, []
        for name, one in list(self.running.items()):
            if one.done < len(one.prompt):
                taken = min(left, len(one.prompt) - one.done)
                one.done, left = one.done + taken, left - taken
                if one.done < len(one.prompt):
                    continue
                self.pages |= {tuple(one.prompt[:end]) for end in range(64, one.done + 1, 64)}
            for _ in range(2 if self.drafts and one.out else 1):
                if len(one.out) < one.params.max_tokens:
                    one.out.append(_next(one.prompt + one.out, one.params.allowed_token_ids))
            finished = len(one.out) == one.params.max_tokens
            if finished:
                del self.running[name]
            best = {0: Space(logprob=-0.5), 1: Space(logprob=-2.0)}
            output = Space(token_ids=list(one.out), logprobs=[best] * len(one.out))
            results.append(Space(request_id=name, outputs=[output], finished=finished, num_cached_tokens=one.cached))
        return results


def _next(tokens: list[int], allowed: list[int] | None) -> int:
    # a fault stands here
    found = sum(place * token for place, token in enumerate(tokens, 1)) % 2048
    return found if allowed is None else allowed[found % len(allowed)]


class LLM:
    def __init__(self, **options: Any) -> None:
        plugin = os.environ["VLLM_PLUGINS"] != "none"
        if os.environ["VLLM_BATCH_INVARIANT"] == "1" and not plugin:
            raise ValueError("batch invariance not supported")
        module, _, name = options["worker_extension_cls"].rpartition(".")
        look = getattr(importlib.import_module(module), name)
        owner = f"{os.environ['VLLM_PLUGINS'].replace('mlagen_', 'mlagen_vllm_')}.backend" if plugin else "vllm.own"
        backend = importlib.import_module(owner) if plugin else None  # as layers load it, before they get weights
        weight = torch.zeros(4)
        sys.modules["vllm.model_executor.model_loader.dummy_loader"].initialize_dummy_weights(weight, None)  # type: ignore[attr-defined]
        layer = Space(get_attn_backend=lambda: type("Backend", (), {"__module__": owner}))
        self.worker = look()
        forward = (lambda: backend.flash_mla_with_kvcache((0, 0))) if backend else lambda: None
        runner = self.worker.model_runner = Space(model=Space(parameters=lambda: [weight]), _model_forward=forward)
        self.worker.vllm_config = Space(compilation_config=Space(static_forward_context={"layer": layer}))
        self.llm_engine = Engine(
            options["max_num_batched_tokens"], options["enable_prefix_caching"], "speculative_config" in options
        )
        self.llm_engine.runner = runner

    def collective_rpc(self, method: str) -> list[Any]:
        return [getattr(self.worker, method)()]
