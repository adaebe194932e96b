"""A spec from a model's config.json: its data, and its YAML with comments that name the config's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from mlagen.errors import UsageError
from mlagen.spec.from_config_indexer import SAID as INDEXER_SAID
from mlagen.spec.from_config_indexer import fields_of, indexer_lines, read_indexer
from mlagen.spec.gpus import TARGETS
from mlagen.spec.hf_config import Config, Model, read_config, read_model
from mlagen.spec.hf_name import named_by
from mlagen.spec.hf_rope import ROPE
from mlagen.spec.hf_scores import OPTION, Scale, head_scale, left_to_the_caller, refuse_caps, row_scale, sink_of
from mlagen.spec.load import check, parse
from mlagen.spec.prose import Finding

ENGINES = ("vllm", "sglang", "flashmla", "transformers")
# vLLM's words for a cache's dtype and mlagen's layouts, each with the word that it means.
CACHE_WORDS = {
    "auto": "auto",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_ds_mla": "fp8_ds_mla",
    "fp8_per_tensor": "fp8_per_tensor",
    "nvfp4": "nvfp4",
}
PLAIN = ("bf16", "fp16")  # layouts of unquantised rows
PAGE = 64  # default page size, in tokens
MOST_V_BY_DESCRIPTORS = 128  # columns of V; with 256, K and V by pointers were faster on sm90
NEAREST = {"rounding": "nearest", "floor": 1.1754943508222875e-38, "floor_on": "scale"}  # the smallest normal fp32

_CACHED = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
_FLASHMLA = {
    "rows": ("flash_mla_sparse_fwd",),
    "pages": _CACHED,
    "two caches": _CACHED,
    "dense": ("flash_mla_with_kvcache",),
    "heads": ("flash_attn_varlen_func",),
}
_CONVERT = "triton_convert_req_index_to_global_index"
# By engine, and by kind of attention: sparse over flat rows, over the pages of one cache, or over two caches; dense;
# before absorption.
WRAPPERS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "rows": ("triton_mla_sparse_attention", "flash_mla_sparse_fwd", "concat_and_cache_mla", _CONVERT),
        "pages": (*_CACHED, "concat_and_cache_mla", "gather_and_maybe_dequant_cache", _CONVERT),
        "two caches": (
            *_CACHED,
            "quantize_and_insert_k_cache",
            "dequantize_and_gather_k_cache",
            "compute_global_topk_indices_and_lens",
            "combine_topk_swa_indices",
        ),
        "dense": (
            "flash_mla_with_kvcache",
            "decode_attention_fwd",
            "concat_and_cache_mla",
            "gather_and_maybe_dequant_cache",
        ),
        "heads": ("flash_attn_varlen_func", "merge_attn_states"),
    },
    "sglang": _FLASHMLA,
    "flashmla": _FLASHMLA,
    "transformers": {"heads": ("flash_attn_varlen_func",)},
}
_SAID = {
    "triton_mla_sparse_attention": "vLLM's signature: returns the output only",
    "flash_mla_sparse_fwd": "FlashMLA's signature: attention over rows; returns output, max_logits, lse",
    "flash_mla_with_kvcache": "FlashMLA's signature: attention over the cache",
    "decode_attention_fwd": "vLLM's signature: one query token per request",
    "flash_attn_varlen_func": "FlashAttention's signature",
    "merge_attn_states": "vLLM's signature: merges a chunk of the context with the rest",
    "concat_and_cache_mla": "writes latent and RoPE columns into the cache",
    "gather_and_maybe_dequant_cache": "gathers rows of the cache, for prefill",
    "quantize_and_insert_k_cache": "writes rows into a cache",
    "dequantize_and_gather_k_cache": "gathers rows of a cache, for prefill",
    _CONVERT: "converts indices within a request to indices of cache rows",
    **INDEXER_SAID,
}


@dataclass(frozen=True)
class Wishes:
    """The choices that a config.json does not make.

    Attributes:
        name: the spec's name; None: named after the config's folder or the model's type.
        engine: one of ENGINES, which calls the wrappers; None: vLLM, with FlashMLA's functions among its wrappers.
        kv_cache_dtype: a word of CACHE_WORDS.
        dtype: bf16 or fp16, in place of the config's.
        softmax_scale: in place of the config's.
        block_size: page size in tokens; None: PAGE, or flat rows if attention can read them.
        targets: GPU architectures; empty: all.
        prefill: attention before absorption.
        layers: one of LAYERS, if the model has both.
        indexer: also the lightning indexer.
        values: values of FIELDS, in place of the config's; None: as if the config had no such field.
    """

    name: str | None = None
    engine: str | None = None
    kv_cache_dtype: str = "auto"
    dtype: str | None = None
    softmax_scale: float | None = None
    block_size: int | None = None
    targets: Sequence[str] = ()
    prefill: bool = False
    layers: str | None = None
    indexer: bool = False
    values: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class MadeSpec:
    """A spec made from a config.

    Attributes:
        text: the YAML.
        notes: notes for the user, a line each.
    """

    text: str
    notes: tuple[str, ...]


def spec_from_config(text: str, file: Path, wishes: Wishes) -> MadeSpec:
    """Return a model's spec.

    Args:
        text: the config.json.
        file: the config's path, for error messages.
        wishes: choices that the config does not make.

    Raises:
        SpecError: the text is not the config of a model with MLA, or lacks a field.
        UsageError: the model's spec cannot have one of the wishes.
    """
    config = read_config(text, file, wishes.values)
    heads = wishes.prefill or wishes.engine == "transformers"
    model = read_model(config, dtype=wishes.dtype, layers=wishes.layers, heads=heads)
    scale = _scale(config, model, wishes)
    data = _data(config, model, wishes, scale)
    if wishes.indexer:
        parts = read_indexer(config, model, wishes.engine, wishes.block_size or PAGE)
        data |= parts | {"wrappers": (*data["wrappers"], *parts["wrappers"])}
    spec, findings = check(data)
    if spec is None:
        _blame(findings[0], config, model)
    written = _yaml(data, config, model, wishes, scale)
    if parse(written, Path(f"{spec.name}.yaml")) != spec:
        raise RuntimeError(f"the YAML of {spec.name} describes another spec than the one it was made from")
    notes = [f"before attention the caller {line}" for line in _left_to_the_caller(config, model)]
    notes += [f"for {model.hybrid}"] if model.hybrid else []
    if model.layers:
        notes.append(f"for {model.layers}; for the others, run init again with --layers {model.layers.other}")
    notes += _other_caches(model, wishes)
    notes += [] if wishes.name else [f"named {spec.name}; for another name, pass --name NAME"]
    return MadeSpec(written, tuple(notes))


def _scale(config: Config, model: Model, wishes: Wishes) -> Scale:
    """Return the softmax scale. It is the same before and after absorption."""
    refuse_caps(config, given=wishes.softmax_scale is not None)
    if wishes.softmax_scale is not None:
        return Scale(wishes.softmax_scale, f"[{OPTION}]")
    if model.kin.caches is not None:
        return row_scale(model.v)
    without_rope, rope = model.origins["qk"].split(" + ")
    columns = config.required(without_rope, why=", and the softmax scale needs it") + config.required(rope, least=0)
    return head_scale(config, columns, model.origins["qk"], model.layers.kind if model.layers else None)


def _left_to_the_caller(config: Config, model: Model) -> list[str]:
    """Return the caller's work on q and on the latent before attention, a line each."""
    return [*left_to_the_caller(config), *([model.kin.caller] if model.kin.caller else [])]


def _other_caches(model: Model, wishes: Wishes) -> list[str]:
    """Return a note if engines use other caches on some of the targets."""
    targets = set(wishes.targets or TARGETS)
    if model.kin.caches_off_sm100 is None or wishes.kv_cache_dtype != "auto":
        return []
    if "sm100" not in targets or len(targets) == 1:
        return []
    return ["engines use these caches on sm100 only; for other GPUs, run init again with --kv-cache-dtype fp8"]


def _blame(finding: Finding, config: Config, model: Model) -> NoReturn:
    """Report a finding of the spec's models as an error of the config's field, or of the option, behind the value."""
    part, *rest = map(str, finding.loc)
    named = {"num_heads": "num_heads", "kv_lora_rank": "latent", "qk_rope_head_dim": "rope", "topk": "topk"}
    named |= {"window": "window", "v_head_dim": "v", "qk_head_dim": "qk", "num_kv_heads": "num_heads"}
    if part in ("model", "attention", "multi_head") and rest and named.get(rest[0]) in model.origins:
        config.refuse(model.origins[named[rest[0]]], finding.text)
    indexed = fields_of(model).get((part, rest[0] if rest else ""))
    if indexed is not None:
        config.refuse(indexed, finding.text)
    option = {"cache": "--kv-cache-dtype", "extra_cache": "--kv-cache-dtype", "name": "--name", "targets": "--gpu"}
    if rest[:1] == ["softmax_scale"]:
        option = {part: OPTION}
    if rest[:1] == ["block_size"]:
        option = {part: "--block-size"}
    raise UsageError(f"{option[part]}: {finding.text}" if part in option else str(finding))


def _data(config: Config, model: Model, wishes: Wishes, scale: Scale) -> dict[str, Any]:
    """Return the spec as plain values."""
    dims: dict[str, Any] = {"num_heads": model.num_heads}
    data: dict[str, Any] = {"name": "", "title": "", "model": dims}
    words = [model.layers.kind] if model.layers else []
    sink = "sink" if model.kin.sink else sink_of(config)
    if model.heads is not None:
        _refuse_cache_options(wishes)
        if sink is not None:
            raise UsageError(
                "--prefill, --for transformers: the model has sinks, which kernels before absorption do not support"
            )
        heads = model.heads
        data["multi_head"] = {"qk_head_dim": heads.qk, "v_head_dim": heads.v, "softmax_scale": scale.value}
        if model.window is not None:
            data["multi_head"]["window"] = model.window
        if heads.v <= MOST_V_BY_DESCRIPTORS:
            data["multi_head"]["addressing"] = "descriptors"
        kind, what = "heads", "multi-head prefill"
        words.append("prefill")
    else:
        dims |= {"kv_lora_rank": model.latent, "qk_rope_head_dim": model.rope, "v_head_dim": model.v}
        if model.rope and model.model_type in ROPE:
            dims["rope"] = ROPE[model.model_type]
        if model.topk is None and sink is not None:
            config.refuse(sink, "gives each head a sink, which kernels of dense attention do not support")
        data["attention"] = {**_attention(model, sink is not None), "softmax_scale": scale.value}
        layouts, asked = _layouts(model, wishes.kv_cache_dtype, tuple(wishes.targets) or TARGETS)
        kind = _kind(model, layouts[0], wishes.block_size)
        size = {} if kind == "rows" else {"block_size": wishes.block_size or PAGE}
        rule = {"scale_rule": NEAREST} if layouts[0] == "fp8_ds_mla" and model.kin.nearest_scales else {}
        for part, layout in zip(("cache", "extra_cache"), layouts, strict=False):
            data[part] = {"layout": layout, **size, **rule}
        what = f"{'dense' if model.topk is None else 'sparse'} MLA"
        what += f" over {layouts[0]}" if layouts[0] not in PLAIN else ""
        words += [asked] if asked else []
    dims["dtype"] = model.dtype
    data["wrappers"] = WRAPPERS[wishes.engine or "vllm"][kind]
    data["targets"] = tuple(wishes.targets) or TARGETS
    called = named_by(config.file, config.types) or next(iter(config.types), None)
    if wishes.name is None and called is None:
        raise UsageError("the config has no model_type to name the spec after; pass --name NAME")
    data["name"] = wishes.name or "_".join([str(called), *words])
    layers = f", {model.layers.kind} layers" if model.layers else ""
    data["title"] = f"{model.kin.title or f'{model.num_heads} heads'} {what}{layers}"
    return data


def _refuse_cache_options(wishes: Wishes) -> None:
    given = {"--kv-cache-dtype": wishes.kv_cache_dtype != "auto", "--block-size": wishes.block_size is not None}
    for option, is_given in given.items():
        if is_given:
            raise UsageError(f"{option}: takes no value with --prefill or --for transformers, which read no cache")


def _attention(model: Model, has_sink: bool) -> dict[str, Any]:
    if model.topk is None:
        return {"kind": "dense"} | ({} if model.window is None else {"window": model.window})
    window = {} if model.window is None else {"window": model.window}
    return {
        "kind": "sparse",
        "topk": model.topk,
        **window,
        "attn_sink": "required" if has_sink else "optional",
    }


def _layouts(model: Model, word: str, targets: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the layouts of a model's caches for a word of vLLM's, and the suffix of the spec's name."""
    meant = CACHE_WORDS[word]
    found: dict[str, tuple[str, ...]]
    if model.kin.caches is not None:
        rows = model.kin.caches_off_sm100 or model.kin.caches
        found = {"auto": model.kin.caches if "sm100" in targets else rows, model.dtype: (model.dtype,) * 2}
        found |= {"fp8": rows, "fp8_ds_mla": rows}  # names of this layout in V4's engines
    else:
        fp8 = "fp8_per_tensor" if model.topk is None else "fp8_ds_mla"
        found = {"auto": (model.dtype,), model.dtype: (model.dtype,), "fp8": (fp8,), "fp8_ds_mla": ("fp8_ds_mla",)}
        found |= {"fp8_per_tensor": ("fp8_per_tensor",), "nvfp4": ("nvfp4_ds_mla",)}
    if meant not in found:
        title = model.kin.title or "the model"
        raise UsageError(f"--kv-cache-dtype: got {word}; takes {', '.join(found)} for {title} in {model.dtype}")
    return found[meant], "" if found[meant] == found["auto"] else meant


def _kind(model: Model, layout: str, block_size: int | None) -> str:
    """Return the kind of attention, a key of an engine's WRAPPERS."""
    if model.topk is None:
        return "dense"
    if model.kin.caches is not None:
        return "two caches"
    return "rows" if layout in PLAIN and block_size is None else "pages"


def _yaml(data: Mapping[str, Any], config: Config, model: Model, wishes: Wishes, scale: Scale) -> str:
    """Return the spec's text. The models have checked its values, so each is a number, a name or a plain title."""

    def of(name: str) -> str:
        return f"[--set {name}]" if name in config.values else f"[{name}]"

    def origin(name: str) -> str:
        return of(model.origins[name])

    dims, lines = data["model"], _head(config, model)
    lines += ["", f"name: {data['name']}", f"title: {data['title']}", "", "model:"]
    lines.append(f"  num_heads: {dims['num_heads']} # {origin('num_heads')}; a tensor-parallel rank may have fewer")
    if "kv_lora_rank" in dims:
        less = f" - {dims['qk_rope_head_dim']} columns with RoPE" if model.kin.caches else ""
        field = model.origins["latent"]
        latent = of(field) if field in config.values else f"[{config.path}{field}]"
        lines.append(f"  kv_lora_rank: {dims['kv_lora_rank']} # {latent}{less}")
        lines.append(f"  qk_rope_head_dim: {dims['qk_rope_head_dim']} # {origin('rope')}")
        if "rope" in dims:
            lines.append(f"  rope: {dims['rope']} # RoPE rotates adjacent columns, as in {model.kin.title}")
        v = "the whole row" if model.kin.caches else "the latent; the config's v_head_dim is the one before absorption"
        lines.append(f"  v_head_dim: {dims['v_head_dim']} # V is {v}")
    lines.append(f"  dtype: {dims['dtype']}{' # [--dtype]' if wishes.dtype else ''}")
    if "attention" in data:
        lines += ["", "attention:", *_attention_lines(data["attention"], model, origin), _scale_line(scale)]
    if "multi_head" in data:
        qk, v = data["multi_head"]["qk_head_dim"], data["multi_head"]["v_head_dim"]
        lines += [
            "",
            "multi_head:",
            f"  qk_head_dim: {qk} # {qk - model.rope} columns without RoPE + {model.rope} with RoPE",
        ]
        lines += [f"  v_head_dim: {v} # {origin('v')}"]
        if "window" in data["multi_head"]:
            window = data["multi_head"]["window"]
            lines += [f"  window: {window} # {origin('window')}; callers pass window_size ({window - 1}, 0)"]
        if "addressing" in data["multi_head"]:
            lines += ["  addressing: descriptors # K and V by TMA on targets that have it"]
        lines += [_scale_line(scale)]
    for part in ("cache", "extra_cache"):
        if part in data:
            lines += ["", f"{part}:", *_cache_lines(data[part])]
    if "indexer" in data:
        lines += indexer_lines(data, model, of)
    lines += ["", "wrappers:"]
    lines += [f"  - {name}{f' # {_SAID[name]}' if name in _SAID else ''}" for name in data["wrappers"]]
    lines += ["", f"targets: [{', '.join(data['targets'])}]"]
    return "\n".join(lines) + "\n"


def _scale_line(scale: Scale) -> str:
    return f"  softmax_scale: {scale.value!r} # {scale.note}"


def _head(config: Config, model: Model) -> list[str]:
    """Return the comment at the top of a spec."""
    called = f" ({model.model_type})" if model.known else ""
    within = f" (of {config.path[:-1]})" if config.path else ""
    lines = [
        f"# {model.kin.title or 'A model'}{called}, from its config.json. Brackets name the config's fields{within}."
    ]
    if not model.known:
        lines.append("# mlagen does not know this model type, so check the values: fields were found by name only.")
    if model.hybrid:
        lines.append(f"# For {model.hybrid}.")
    lines += [f"# Before attention the caller {line}." for line in _left_to_the_caller(config, model)]
    if model.layers:
        lines.append(f"# For {model.layers}.")
        lines.append(f"# The other layers need their own spec: --layers {model.layers.other}.")
    if model.heads is not None and model.topk is not None:
        lines.append(f"# Attends to all keys, as the model does up to {model.topk} keys [index_topk].")
    return lines


def _attention_lines(attention: Mapping[str, Any], model: Model, origin: Any) -> list[str]:
    lines = [f"  kind: {attention['kind']}"]
    if "topk" in attention:
        behind = "; indices of the second cache" if model.kin.caches else ""
        lines.append(f"  topk: {attention['topk']} # {origin('topk')}{behind}")
    if "window" in attention:
        behind = "indices of the first cache" if model.kin.caches else "keys that a token sees"
        lines.append(f"  window: {attention['window']} # {origin('window')}; {behind}")
    if "attn_sink" in attention:
        said = (
            "a sink logit per head"
            if attention["attn_sink"] == "required"
            else "callers may pass a sink logit per head"
        )
        lines.append(f"  attn_sink: {attention['attn_sink']} # {said}")
    return lines


def _cache_lines(cache: Mapping[str, Any]) -> list[str]:
    lines = [f"  layout: {cache['layout']}"]
    if "block_size" in cache:
        lines.append(f"  block_size: {cache['block_size']} # page size in tokens")
    else:
        lines[0] += " # without block_size, attention reads flat rows"
    if "scale_rule" in cache:
        rule = ", ".join(f"{name}: {value}" for name, value in cache["scale_rule"].items())
        lines.append(f"  scale_rule: {{ {rule} }} # floor: the smallest normal fp32")
    return lines
