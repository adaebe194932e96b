"""Runs the MLA prefill backend of a plugin over vLLM's Python, or over its stand-in, and prints its findings as JSON.

Arguments: the folder that holds the plugin, its name, the engine ("vllm", or "0.26" or "0.33" for the stand-in's),
the platform's compute capability, and the part to look at: "registry", "refusals", "attention" or "invariance".
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import sys
import types
from typing import Any

import prefill_forward
import torch
import vllm_probe

HEADS, SCALE, LATENT = 2, 0.0723, 32
NEW = (5, 1, 34)  # new tokens of the requests
CHUNKS = ((38, 0, 38), (3, 0, 2))  # cached tokens of theirs, by chunk
REGISTRY = "vllm.v1.attention.backends.mla.prefill.registry"


class Messages(logging.Handler):
    """Messages of the plugin's logger."""

    def __init__(self, plugin: Any) -> None:
        super().__init__()
        self.texts: list[str] = []
        plugin.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def registry(plugin: Any) -> dict[str, Any]:
    """The class that CUSTOM stands for after two calls of `register`, and messages where it cannot stand for it."""
    messages = Messages(plugin)
    module = importlib.import_module(REGISTRY)
    member, found = module.MLAPrefillBackendEnum.CUSTOM, {}
    for call in ("once", "twice"):
        plugin.register()
        found[call] = member.get_path()
    assert not messages.texts
    module.register_mla_prefill_backend(member, "another.Backend")
    plugin.register()
    found |= {"taken": member.get_path(), "said of the name": messages.texts.pop()}
    sys.modules[REGISTRY] = None  # type: ignore[assignment]
    plugin.register()
    return found | {"said of no registry": messages.texts.pop()}


def config(dtype: torch.dtype, nope: int, rope: int, v: int) -> Any:
    """A model's values that vLLM asks of a backend."""
    dims = types.SimpleNamespace(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v)
    return types.SimpleNamespace(dtype=dtype, mla_dimensions=dims)


def refusals(backend: Any, engine: str, qk: int, v: int) -> dict[str, Any]:
    """vLLM's reasons against the backend: by capability, and for other values of the model."""
    import stand_in

    at = stand_in.Capability
    ours = torch.bfloat16, qk - 32, 32, v
    found: dict[str, Any] = {
        f"{major}.{minor}": backend.validate_configuration(at(major, minor), config(*ours))
        for major, minor in vllm_probe.CAPABILITIES
    }
    found["fp16"] = backend.validate_configuration(at(9, 0), config(torch.float16, *ours[1:]))
    found["without rope"] = backend.validate_configuration(at(9, 0), config(torch.bfloat16, qk, 0, v))
    found["wider v"] = backend.validate_configuration(at(9, 0), config(*ours[:3], v + 16))
    if engine != "0.26" and "None" in str(inspect.signature(backend.__mro__[1].validate_configuration)):
        found["no capability"] = backend.validate_configuration(None, config(*ours))
    found["quantised out"] = make(backend, qk, v).supports_quant_output("fp8")
    try:
        make(backend, qk, v + 16)
    except ValueError as error:
        found["layer"] = str(error)
    if engine == "vllm":
        found["selected"] = selected(qk, v)
    return found


def selected(qk: int, v: int) -> str:
    """The class that vLLM's selector finds for CUSTOM."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.mla.prefill.selector import get_mla_prefill_backend

    text = types.SimpleNamespace(qk_nope_head_dim=qk - 32, qk_rope_head_dim=32, v_head_dim=v)
    asked: Any = types.SimpleNamespace(
        attention_config=types.SimpleNamespace(mla_prefill_backend=MLAPrefillBackendEnum["CUSTOM"]),
        model_config=types.SimpleNamespace(dtype=torch.bfloat16, hf_text_config=text),
    )
    found = get_mla_prefill_backend(asked)
    return f"{found.__module__}.{found.__qualname__}"


def make(backend: Any, qk: int, v: int) -> Any:
    """The backend of a layer, as vLLM makes it."""
    dims = {"qk_nope_head_dim": qk - 32, "qk_rope_head_dim": 32, "v_head_dim": v}
    return backend(num_heads=HEADS, scale=SCALE, kv_lora_rank=LATENT, vllm_config=None, **dims)


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).int()


def heads(tokens: int, qk: int, v: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K, and V as a part of the rows of a product, as vLLM has them."""
    generator = torch.Generator().manual_seed(seed)
    product = torch.randn(tokens, HEADS, qk - 32 + v, generator=generator).bfloat16()
    rope = torch.randn(tokens, 1, 32, generator=generator).bfloat16()
    return torch.cat((product[..., : qk - 32], rope.expand(-1, HEADS, -1)), 2), product[..., qk - 32 :]


def attend(q: Any, k: Any, v: Any, q_lengths: Any, k_lengths: Any, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of requests in float64: out [tokens, heads, v], and its LSE [heads, tokens]."""
    outs, lses = [], []
    parts = q.double().split(q_lengths), k.double().split(k_lengths), v.double().split(k_lengths)
    for one, keys, values in zip(*parts, strict=True):
        scores = torch.einsum("qhd,khd->hqk", one, keys) * SCALE
        if causal:
            scores.masked_fill_(torch.ones(scores.shape[1:]).triu(1 + len(keys) - len(one)).bool(), -torch.inf)
        lse = scores.logsumexp(2)
        weights = (scores - lse[..., None]).exp()
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference; equal infinities have none."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return float(torch.where(found == wanted, 0, found.double() - wanted).abs().max())


def metadata(q_lengths: tuple[int, ...], chunks: tuple[tuple[int, ...], ...]) -> Any:
    """A batch's metadata with the fields that both versions of vLLM have."""
    context = types.SimpleNamespace(
        cu_seq_lens=torch.stack([starts(chunk) for chunk in chunks]), max_seq_lens=[max(chunk) for chunk in chunks]
    )
    return types.SimpleNamespace(
        query_start_loc=starts(q_lengths), max_query_len=max(q_lengths), chunked_context=context
    )


def chunk_of(layer: Any, number: int) -> dict[str, Any]:
    """The argument that names a chunk: in 0.33 it has tensors of its own, which begin anywhere in larger ones."""
    known = layer._prefill_metadata
    if "chunk_idx" in inspect.signature(type(layer).__mro__[1].run_prefill_context_chunk).parameters:
        return {"chunk_idx": number}
    chunk = types.SimpleNamespace(
        query_start_loc=known.query_start_loc,
        max_query_len=known.max_query_len,
        cu_seq_lens=known.chunked_context.cu_seq_lens[number],
        max_seq_len=known.chunked_context.max_seq_lens[number],
    )
    del known.chunked_context  # 0.33's has other fields
    return {"chunk": chunk}


def attention(backend: Any, qk: int, v: int) -> dict[str, Any]:
    """The largest errors of both methods, of `out` and of the LSE, and facts about the results."""
    layer, total = make(backend, qk, v), sum(NEW)
    q = torch.randn(total + 3, HEADS, qk, generator=torch.Generator().manual_seed(1)).bfloat16()[3:]  # behind decodes
    k, values = heads(total, qk, v, seed=2)
    layer.prepare_metadata(metadata(NEW, CHUNKS))
    wanted, wanted_lse = attend(q, k, values, NEW, NEW, causal=True)
    out, lse = layer.run_prefill_new_tokens(q=q, k=k, v=values, return_softmax_lse=True, out=None, output_scale=None)
    found: dict[str, Any] = {"new": [error(out, wanted), error(lse, wanted_lse)], "lse": str(lse.dtype)}
    only = layer.run_prefill_new_tokens(q=q, k=k, v=values, return_softmax_lse=False)
    found["without its LSE"] = bool(torch.equal(only, out))
    wide = torch.full((total, HEADS, v + 8), torch.nan).bfloat16()
    into = layer.run_prefill_new_tokens(q=q, k=k, v=values, return_softmax_lse=False, out=wide[..., :v])
    found["in place"] = bool(into.data_ptr() == wide.data_ptr() and torch.equal(wide[..., :v], out))
    try:
        layer.run_prefill_new_tokens(q, k, values, False, output_scale=torch.ones(1))
    except ValueError as refused:
        found["output_scale"] = str(refused)
    found["chunks"], found["empty"] = [], True
    for number, lengths in enumerate(CHUNKS):
        layer.prepare_metadata(metadata(NEW, CHUNKS))
        k, values = heads(sum(lengths), qk, v, seed=3 + number)
        wanted, wanted_lse = attend(q, k, values, NEW, lengths, causal=False)
        none = torch.tensor([keys == 0 for keys in lengths]).repeat_interleave(torch.tensor(NEW))
        wanted[none] = 0
        out, lse = layer.run_prefill_context_chunk(q=q, k=k, v=values, **chunk_of(layer, number))
        found["chunks"] += [error(out, wanted), error(lse, wanted_lse)]
        found["empty"] &= bool((out[none] == 0).all() and (lse[:, none] == -torch.inf).all())
    return found


def invariance(backend: Any, qk: int, v: int) -> bool:
    """Whether a request of few tokens has the same bits by itself and together with a long one."""
    q = torch.randn(70 + 3, HEADS, qk, generator=torch.Generator().manual_seed(1)).bfloat16()
    k, values = heads(1 + 150, qk, v, seed=2)
    layer = make(backend, qk, v)
    layer.prepare_metadata(metadata((70, 3), ((1, 150),)))
    beside, beside_lse = layer.run_prefill_context_chunk(q=q, k=k, v=values, **chunk_of(layer, 0))
    layer.prepare_metadata(metadata((3,), ((150,),)))
    alone, lse = layer.run_prefill_context_chunk(q=q[70:], k=k[1:], v=values[1:], **chunk_of(layer, 0))
    return bool(torch.equal(alone, beside[70:]) and torch.equal(lse, beside_lse[:, 70:]))


def main(folder: str, name: str, engine: str, capability_name: str, what: str) -> None:
    """Prints the findings."""
    from mlagen.verify import interpreter

    interpreter.install()
    sys.path.insert(0, folder)
    if engine == "vllm":  # its modules ask for CUDA's libraries once the platform says that it is CUDA
        importlib.import_module(f"{name}.prefill")
        importlib.import_module("vllm.model_executor.layers.attention.mla_attention")
    vllm_probe.place(engine, capability_name)
    plugin = importlib.import_module(name)
    if what == "registry":
        print(json.dumps(registry(plugin)))
        return
    plugin.register()
    module = importlib.import_module(f"{name}.prefill")
    package = importlib.import_module(f"{name}.{name.removeprefix('mlagen_vllm_')}")
    sizes = package.SPEC["spec"]["multi_head"]
    targets = package.SPEC["spec"]["targets"]
    target = "sm90" if what == "invariance" else "sm80" if "sm80" in targets else "sm100"
    backend, qk, v = module.PrefillBackend, sizes["qk_head_dim"], sizes["v_head_dim"]
    with package._launch.planned_for(package._launch.facts_of(target)):
        if what == "invariance":
            print(json.dumps(invariance(backend, qk, v)))
            return
        found = attention(backend, qk, v)
        if engine == "vllm":
            found["forward"] = prefill_forward.forward(make(backend, qk, v), attend)
    print(json.dumps({"attention": found, "refusals": refusals(backend, engine, qk, v)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
