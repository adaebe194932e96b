"""The lightning indexer of a spec from a model's config.json: its parts, their wrappers, and their YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlagen.errors import UsageError
from mlagen.spec.hf_config import KIN, Config, Model

OPTION = "--indexer"
STYLE = "indexer_rope_interleave"
STYLES = {True: "gptj", False: "neox"}

_KEYS = ("indexer_k_quant_and_cache", "cp_gather_indexer_k_quant_cache")
_LEGACY = ("fp8_mqa_logits", "get_paged_mqa_logits_metadata", "fp8_paged_mqa_logits")
_LOGITS = ("fp8_fp4_mqa_logits", "get_paged_mqa_logits_metadata", "fp8_fp4_paged_mqa_logits")
_TOPK = ("top_k_per_row_prefill", "top_k_per_row_decode", "persistent_topk")
_PICKS = ("indexer_topk", "paged_indexer_topk")
_PATH = (*_KEYS, "fused_indexer_q_rope_quant")
# Replacements of an engine's indexer functions, by engine; None: of all engines.
WRAPPERS: dict[str | None, tuple[str, ...]] = {
    None: (*_PATH, *dict.fromkeys((*_LEGACY, *_LOGITS)), *_TOPK, "top_k_page_table_transform", "topk_merge", *_PICKS),
    "vllm": (*_PATH, *_LOGITS, *_TOPK),
    "sglang": (*_LEGACY, "top_k_page_table_transform"),
}
# Of an indexer of two levels, where no engine limits the functions.
CANDIDATES = (
    "select_candidate_blocks",
    "candidate_mqa_logits",
    "paged_candidate_mqa_logits",
    "candidate_indexer_topk",
    "paged_candidate_indexer_topk",
)
# Of an indexer over pools of keys, in place of the functions that write keys and quantise the query.
POOLS = (
    "fwht128_quant_fp8",
    "kpool_compress_and_write_cache",
    "kpool_seed_tail_cache",
    "kpool_decode_update_and_maybe_write_cache_batched",
    "expand_pools_and_append_tail",
)
# Functions that it has none of.
TOKENS = ("indexer_k_quant_and_cache", "fused_indexer_q_rope_quant", "top_k_page_table_transform", "topk_merge")
BLOCK, BLOCKS = "candidate_block_size", "candidate_topk_blocks"
NORMED = "indexer_k_norm_rope_store"  # for models that normalise, rotate and store keys in one function
SAID = {
    "indexer_k_quant_and_cache": "writes keys into the indexer's cache",
    NORMED: "normalises, rotates and writes keys",
    "cp_gather_indexer_k_quant_cache": "gathers keys, for prefill",
    "fused_indexer_q_rope_quant": "rotates and quantises the query",
    "fp8_mqa_logits": "DeepGEMM's signature: logits over gathered keys",
    "fp8_fp4_mqa_logits": "DeepGEMM's newer signature: logits over gathered keys",
    "fp8_paged_mqa_logits": "logits over pages",
    "fp8_fp4_paged_mqa_logits": "logits over pages",
    "top_k_per_row_prefill": "vLLM's signatures: top-k",
    "top_k_page_table_transform": "FlashInfer's signature: top-k as cache slots",
    "topk_merge": "merges the top-k of ranks that share a context",
    "indexer_topk": "logits and top-k in one call",
    "fwht128_quant_fp8": "vLLM's signatures: the query, keys of pools, and picked pools to tokens",
    "select_candidate_blocks": "vLLM's signature: the best blocks of keys",
    "candidate_mqa_logits": "the second level: only keys of these blocks",
}


def read_indexer(config: Config, model: Model, engine: str | None, block_size: int) -> dict[str, Any]:
    """Return a spec's `indexer` and `indexer_cache`, and the wrappers that they add, as plain values.

    Args:
        config: the config's fields.
        model: the model's attention.
        engine: a key of WRAPPERS.
        block_size: page size in tokens.

    Raises:
        SpecError: the config has no indexer, or a field of it is invalid.
        UsageError: the model's indexer is unknown, or the engine or the layers have no indexer.
    """
    if model.heads is not None:
        raise UsageError(f"{OPTION}: takes no value with --prefill or --for transformers, which attend to all keys")
    if engine not in WRAPPERS:
        raise UsageError(
            f"{OPTION}: got --for {engine}, which calls no indexer; takes --for vllm, --for sglang or no --for"
        )
    if model.layers is not None and model.layers.kind == "sliding":
        raise UsageError(f"{OPTION}: got --layers sliding, which have no indexer; takes --layers full")
    if model.topk is None:
        config.refuse("index_topk", f"missing, so the model has no indexer; leave out {OPTION}")
    kin = model.kin.indexer
    if kin is None:
        known = ", ".join(name for name, of in KIN.items() if of.indexer is not None)
        got = f"model type {model.model_type}" if model.model_type else "a config without a model type"
        raise UsageError(f"{OPTION}: got {got}, an indexer with unknown RoPE; takes {known}")
    why = f", and {OPTION} needs it"
    indexer: dict[str, Any] = {
        "num_heads": config.required("index_n_heads", why=why),
        "head_dim": config.required("index_head_dim", why=why),
        "topk": model.topk,
        "rope_head_dim": model.rope,
    }
    if model.rope:
        said = config.get(STYLE) if kin.styled else None
        indexer |= {"rope": kin.rope if said is None else _style(config, said), "rope_at": kin.rope_at}
    if kin.pools is not None:
        for name, found, columns in (("index_head_dim", indexer["head_dim"], 128), ("qk_rope_head_dim", model.rope, 0)):
            if found != columns:
                config.refuse(name, f"got {found}; keys of pools take {columns}")
        indexer["compress_ratio"] = config.required(kin.pools, why=why)
    elif kin.compress_ratio > 1:
        indexer["compress_ratio"] = kin.compress_ratio
    candidates: tuple[str, ...] = ()
    # Engines call only the first of these, and no plugin knows the layers with such an indexer.
    if engine is None and config.get(BLOCK) is not None:
        candidates, why = CANDIDATES, f", and {BLOCK} needs it"
        indexer["candidates"] = {"block": config.required(BLOCK), "count": config.required(BLOCKS, why=why)}
    wrappers = WRAPPERS[engine]
    if kin.pools is not None:
        wrappers = (*POOLS[:-1], *(name for name in wrappers if name not in TOKENS), POOLS[-1])
    normed = (NORMED,) if kin.normed and "indexer_k_quant_and_cache" in wrappers else ()
    cache = {"layout": "indexer_fp8", "block_size": block_size}
    return {"indexer": indexer, "indexer_cache": cache, "wrappers": (*wrappers, *candidates, *normed)}


def _style(config: Config, said: Any) -> str:
    """Return a spec's word for the config's RoPE style."""
    if not isinstance(said, bool):
        config.refuse(STYLE, "takes true or false")
    return STYLES[said]


def fields_of(model: Model) -> dict[tuple[str, str], str]:
    """Return the config's field behind each value, by part and field of the spec."""
    return {
        ("indexer", "num_heads"): "index_n_heads",
        ("indexer", "head_dim"): "index_head_dim",
        ("indexer", "topk"): model.origins["topk"],
        ("indexer", "rope_head_dim"): model.origins["rope"],
        **({("indexer", "compress_ratio"): pools} if (pools := model.kin.indexer and model.kin.indexer.pools) else {}),
        ("indexer_cache", "layout"): "index_head_dim",
    }


def indexer_lines(data: Mapping[str, Any], model: Model, origin: Callable[[str], str]) -> list[str]:
    """Return the YAML of `indexer` and `indexer_cache`. `origin` formats the name of a config's field."""
    indexer, cache = data["indexer"], data["indexer_cache"]
    lines = ["", "indexer:", f"  num_heads: {indexer['num_heads']} # {origin('index_n_heads')}"]
    lines.append(f"  head_dim: {indexer['head_dim']} # {origin('index_head_dim')}")
    lines.append(f"  topk: {indexer['topk']} # {origin(model.origins['topk'])}, equal to attention's")
    lines.append(f"  rope_head_dim: {indexer['rope_head_dim']} # {origin(model.origins['rope'])}")
    if "rope" in indexer:
        which = "columns i and i + half" if indexer["rope"] == "neox" else "adjacent columns"
        lines.append(f"  rope: {indexer['rope']} # RoPE rotates {which}, as in {model.kin.title}")
        lines.append(f"  rope_at: {indexer['rope_at']}")
    if "compress_ratio" in indexer:
        pools = model.kin.indexer and model.kin.indexer.pools
        of = f"{origin(pools)}, tokens per pool, which has one key" if pools else "tokens per key"
        lines.append(f"  compress_ratio: {indexer['compress_ratio']} # {of}")
    if candidates := indexer.get("candidates"):
        lines.append(
            f"  candidates: {{ block: {candidates['block']}, count: {candidates['count']} }} # [{BLOCK}, {BLOCKS}]"
        )
    lines += ["", "indexer_cache:", f"  layout: {cache['layout']}", f"  block_size: {cache['block_size']}"]
    return lines
