"""Runs the plugin of a DeepSeek V4 package over a stand-in for vLLM, in Triton's interpreter; prints JSON.

Arguments: the folder that holds the plugin, its name, the engine ("0.26" or "0.33") and a compute capability or "none".
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import stand_in
import torch

HEADS, D, WINDOW, TOPK, SCALE = 4, 512, 128, 128, 0.0442
BLOCK, PAGES = 64, 12  # of the window's cache
SEQ = (5, 300, 9, 290)  # tokens of each request with those of this batch; the first two decode one
QUERIES = (1, 1, 9, 3)
DECODES = 2


class Cache:
    """Pages of random rows, and the same rows as readers find them, in float64."""

    def __init__(self, layout: Any, block: int, seed: int) -> None:
        from mlagen.layout.codec import decode, encode

        rows = torch.randn(PAGES * block, D, generator=torch.Generator().manual_seed(seed)).bfloat16()
        planes = encode(layout, rows)
        self.rows, self.block = decode(layout, planes).double(), block
        page = torch.cat([plane.reshape(PAGES, -1) for plane in planes], 1)
        multiple = layout.page_multiple
        whole = torch.full((PAGES, -(-page.shape[1] // multiple) * multiple), 0xFF, dtype=torch.uint8)
        whole[:, : page.shape[1]] = page
        self.pages = whole[:, : page.shape[1]].unflatten(1, (block, -1))
        self.table = torch.stack([torch.arange(PAGES).roll(shift)[:6] for shift in (0, 3, 7, 10)]).int()

    def slots(self, request: int, at: torch.Tensor) -> torch.Tensor:
        """Where tokens of a request lie."""
        return self.table[request, at // self.block].long() * self.block + at % self.block


def batch(ratio: int, near: Cache, far: Cache) -> tuple[Any, Any, torch.Tensor, list[Any]]:
    """Metadata of both caches, the indexer's buffer, and the keys of each token in float64."""
    generator, tokens = torch.Generator().manual_seed(5), sum(QUERIES)
    buffer = torch.full((tokens, TOPK), -1, dtype=torch.int32)
    keys, token = [], 0
    swa = torch.zeros(DECODES, 1, WINDOW, dtype=torch.int32)
    slots = torch.full((DECODES, 1, TOPK), -1, dtype=torch.int32)
    lens = torch.zeros(2, DECODES, dtype=torch.int32)
    for request, (length, count) in enumerate(zip(SEQ, QUERIES, strict=True)):
        for position in range(length - count, length):
            latest = torch.arange(max(0, position + 1 - WINDOW), position + 1)
            seen = min((position + 1) // ratio, TOPK) if ratio > 1 else 0
            picked = torch.arange(seen)
            if ratio == 4:
                picked = torch.randperm((position + 1) // ratio, generator=generator)[:seen]
            buffer[token, :seen] = picked.int()
            keys.append(torch.cat((near.rows[near.slots(request, latest)], far.rows[far.slots(request, picked)])))
            if request < DECODES:
                swa[token, 0, : len(latest)] = near.slots(request, latest).int()
                slots[token, 0, :seen] = far.slots(request, picked).int()
                lens[0, token], lens[1, token] = len(latest), seen
            token += 1
    starts = torch.tensor((0, *QUERIES)).cumsum(0).int()
    seq, queries = torch.tensor(SEQ[DECODES:]).int(), torch.tensor(QUERIES[DECODES:]).int()
    gathered = queries + torch.minimum(seq - queries, torch.tensor(WINDOW - 1).int())
    window_row = max(SEQ) // ratio if ratio > 1 else 0
    rows = window_row + int(gathered.max())
    window = SimpleNamespace(
        num_decodes=DECODES, num_decode_tokens=DECODES, num_prefills=len(SEQ) - DECODES, block_size=BLOCK,
        token_to_req_indices=torch.arange(len(SEQ)).repeat_interleave(torch.tensor(QUERIES)).int(),
        is_valid_token=torch.ones(tokens, dtype=torch.bool), decode_swa_indices=swa, decode_swa_lens=lens[0],
        query_start_loc=starts, query_start_loc_cpu=starts, prefill_seq_lens=seq, prefill_gather_lens=gathered,
        block_table=near.table,
        get_prefill_chunk_plan=lambda **_: [(0, 1, window_row, rows), (1, 2, window_row, rows)],
    )  # fmt: skip
    compressed = SimpleNamespace(
        block_table=far.table, block_size=far.block * ratio, c128a_global_decode_topk_indices=slots,
        c128a_decode_topk_lens=lens[1], c128a_prefill_topk_indices=buffer[DECODES:],
    )  # fmt: skip
    return window, compressed, buffer, keys


def forward(module: Any, layout: Any, context: Any, ratio: int) -> dict[str, float]:
    """The largest errors of decodes and of prefills of a layer with that many tokens a compressed row; 1: none."""
    near, far = Cache(layout, BLOCK, 1), Cache(layout, 2 if ratio == 128 else BLOCK, 2)
    window, compressed, buffer, keys = batch(ratio, near, far)
    layer = object.__new__(module.Attention)
    sink = torch.linspace(-1, 1, HEADS)
    vars(layer).update(
        compress_ratio=ratio, window_size=WINDOW, topk_indices_buffer=buffer, prefix="layer", kv_cache=far.pages,
        swa_cache_layer=SimpleNamespace(prefix="window", kv_cache=near.pages), scale=SCALE, attn_sink=sink,
        PREFILL_CHUNK_SIZE=1, max_model_len=512, max_num_batched_tokens=16, _batch_invariant=False,
    )  # fmt: skip
    q = torch.randn(len(keys), HEADS, D, generator=torch.Generator().manual_seed(3)).bfloat16()
    out = torch.full_like(q, torch.nan)
    context.attn_metadata = {"window": window} | ({"layer": compressed} if ratio > 1 else {})
    layer.forward_mqa(q, None, None, out)
    wanted = torch.stack([_attend(one, of, sink) for one, of in zip(q, keys, strict=True)])
    errors = (out.double() - wanted).abs().amax((1, 2)).nan_to_num(nan=torch.inf)
    context.attn_metadata = None
    layer.forward_mqa(q, None, None, out)
    return {
        "decode": errors[:DECODES].max().item(),
        "prefill": errors[DECODES:].max().item(),
        "without a batch": out.abs().max().item(),
    }


def _attend(q: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    scores = torch.cat(((q.double() @ keys.T) * SCALE, sink.double()[:, None]), 1)
    return scores.softmax(1)[:, :-1] @ keys


def selected(plugin: Any, context: Any) -> dict[str, str]:
    """The class that a model takes after two calls of `register`, by the value of `--attention-backend`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Names

    plugin.register()
    model = sys.modules["vllm.models.deepseek_v4.nvidia.model"]
    once = model._select_dsv4_attn_cls
    plugin.register()
    new = hasattr(Names, "register")
    ours = Names.__members__[plugin.NAME] if new else Names.CUSTOM
    asked = {"ours": ours, "another": Names.FLASHMLA_SPARSE, "nothing": None}
    of = {name: SimpleNamespace(attention_config=SimpleNamespace(backend=one)) for name, one in asked.items()}
    found = {name: model._select_dsv4_attn_cls(config).__name__ for name, config in of.items()}
    return found | {"again": "same" if model._select_dsv4_attn_cls is once else "wrapped twice"}


MODEL = "vllm.models.deepseek_v4.nvidia.model"
MODEL_TEXT = """import os
breaks = os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH")
def _select_dsv4_attn_cls(config):
    return "vLLM's"
"""


def imported(plugin: Any) -> dict[str, Any]:
    """vLLM's module after an import that follows the load of plugins, as in vLLM."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.py").write_text(MODEL_TEXT, encoding="utf-8")
        del sys.modules[MODEL]
        sys.modules[MODEL.rpartition(".")[0]].__path__ = [folder]
        finders = len(sys.meta_path)
        plugin.register()
        plugin.register()
        early, once = MODEL in sys.modules, len(sys.meta_path) == finders + 1
        os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
        importlib.util.find_spec(MODEL)  # which imports nothing
        model = importlib.import_module(MODEL)
    other = SimpleNamespace(attention_config=SimpleNamespace(backend=SimpleNamespace(name="", is_overridden=bool)))
    return {
        "by the plugin": early,
        "waits once": once,
        "reads what vLLM has set": model.breaks == "1",
        "plugins": len(model._select_dsv4_attn_cls.plugins),
        "another": model._select_dsv4_attn_cls(other),
        "still waits": len(sys.meta_path) != finders,
    }


def main(folder: str, name: str, engine: str, capability_name: str) -> None:
    """Prints the findings."""
    from mlagen.layout import layouts_of
    from mlagen.verify import interpreter

    interpreter.install()
    sys.path.insert(0, folder)
    capability = None if capability_name == "none" else stand_in.Capability(*map(int, capability_name.split(".")))
    stand_in.install(engine, capability)
    context = stand_in.install_v4()
    plugin = importlib.import_module(name)
    package = importlib.import_module(f"{name}.{name.removeprefix('mlagen_vllm_')}")
    module = importlib.import_module(f"{name}.backend")
    found: dict[str, Any] = {"selected": selected(plugin, context) if capability else {}}
    found["heads"] = [module.Attention.get_padded_num_q_heads(heads) for heads in (1, 8, 12, 16, 64, 65, 128)]
    layout, _ = layouts_of(package.SPEC["spec"])
    if capability_name == "8.6":
        with package._launch.planned_for(package._launch.facts_of("sm80")):
            found["forward"] = {str(ratio): forward(module, layout, context, ratio) for ratio in (1, 4, 128)}
    found["imported"] = imported(plugin) if capability else {}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
