"""The fields of a model's config.json (Hugging Face) that an attention spec needs.

Fields have the names that transformers, vLLM and SGLang use. If a value is missing, an error names the option of
`mlagen init` that supplies it; defaults of model classes are not used. The text is untrusted: the only string that is
passed on is a model type of plain characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mlagen.errors import Place, SpecError, UsageError
from mlagen.spec.hf_layers import KINDS, SLIDING, Hybrid, KindOfLayers, read_hybrid, read_kind
from mlagen.spec.load import FileKind
from mlagen.spec.marked import clip

CONFIG_FILE = FileKind("a model's config.json", "config.json", 4 << 20)
LAYERS = tuple(kind for pair in KINDS for kind in pair)
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
DIMS = ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
INDEXER_DIMS = ("index_n_heads", "index_head_dim", "index_kpool")
FIELDS = (*DIMS, "head_dim", "index_topk", *INDEXER_DIMS, "sliding_window", *(f"swa_{name}" for name in DIMS))
NESTED = ("text_config", "language_config", "llm_config")  # the language model's fields in configs of multimodal models
_ASK_DTYPE = "pass --dtype bf16 or --dtype fp16"


class IndexerKin(NamedTuple):
    """Facts about a model type's indexer that configs do not contain.

    Attributes:
        rope, rope_at: a spec's words for RoPE's pairs of columns, and for their position in a head.
        styled: the config's indexer_rope_interleave, if present, overrides `rope`: true is gptj, false is neox.
        compress_ratio: tokens per key.
        normed: one function normalises, rotates and stores keys.
        pools: the config's field with the tokens of a pool, if keys are of pools; else None.
    """

    rope: str
    rope_at: str
    styled: bool = False
    compress_ratio: int = 1
    normed: bool = False
    pools: str | None = None


class Kin(NamedTuple):
    """Facts about a model type.

    Attributes:
        title: name of the model for people.
        sparse: its attention is sparse, so its config must have index_topk.
        sink: its softmax has a sink logit per head.
        caches: layouts of the two caches, if one of them holds a sliding window. V is the whole row then.
        caches_off_sm100: layouts that engines use on GPUs other than sm100, if they differ.
        nope: its layers without RoPE have no RoPE columns in their cache.
        caller: work on q before attention that the class does and no field of the config tells.
        nearest_scales: scales of fp8_ds_mla are rounded to fp32 instead of up to powers of two.
        indexer: facts about its indexer; None if unknown or if it has none.
    """

    title: str
    sparse: bool = False
    sink: bool = False
    caches: tuple[str, str] | None = None
    caches_off_sm100: tuple[str, str] | None = None
    nope: bool = False
    caller: str = ""
    nearest_scales: bool = False
    indexer: IndexerKin | None = None


_V4 = IndexerKin("gptj", "last", compress_ratio=4)
_V41 = IndexerKin("gptj", "last", normed=True)
_HY = IndexerKin("gptj", "last")
_KPOOL = IndexerKin("neox", "first", pools="index_kpool")  # without RoPE columns
_V4_ROWS = ("ue8m0_v4", "ue8m0_v4")
_V32 = IndexerKin("neox", "first", styled=True)
_GLM = IndexerKin("gptj", "first", styled=True)
_BY_POSITION = (
    "scales q and the indexer's query by a * ln(position + 1) + b, with a and b of each head from the checkpoint "
    "[softmax_scaling]"
)
KIN = {
    "deepseek_v2": Kin("DeepSeek V2"),
    "deepseek_v3": Kin("DeepSeek V3"),
    "deepseek_v32": Kin("DeepSeek V3.2", sparse=True, indexer=_V32),
    "deepseek_v4": Kin("DeepSeek V4", sparse=True, caches=_V4_ROWS, indexer=_V4),
    "deepseek_v41": Kin(
        "DeepSeek V4.1", sparse=True, caches=("mxfp8_v41", "nvfp4_v41"), caches_off_sm100=_V4_ROWS, indexer=_V41
    ),
    "kimi_k2": Kin("Kimi K2"),
    "kimi_k25": Kin("Kimi K2.5"),
    "kimi_k3": Kin("Kimi K3"),
    "kimi_linear": Kin("Kimi Linear"),
    "glm4_moe_lite": Kin("GLM-4.7-Flash"),
    "glm_moe_dsa": Kin("GLM-5", sparse=True, nearest_scales=True, indexer=_GLM),
    "glm5_next": Kin("GLM-5.3-Flash", sparse=True, indexer=_KPOOL),
    "hy_v4": Kin("HY V4", sparse=True, sink=True, indexer=_HY),
    "hy_v4_vl": Kin("HY V4 VL", sparse=True, sink=True, indexer=_HY),
    "minicpm3": Kin("MiniCPM3"),
    "dots3_note": Kin("dots3 note", sparse=True, indexer=_GLM),
    "longcat_flash": Kin("LongCat-Flash"),
    "longcat_flash_ngram": Kin("LongCat-Flash-Lite"),
    "mistral4": Kin("Mistral 4"),
    "mistral_large4": Kin(
        "Mistral Large 4", sparse=True, nope=True, caller=_BY_POSITION, indexer=IndexerKin("gptj", "first")
    ),
    "axk2": Kin("A.X-K2", sparse=True, indexer=_V32),
    "bailing_hybrid": Kin("Ling"),
}


@dataclass(frozen=True)
class HeadDims:
    """Columns of a head before absorption, of q and k and of v."""

    qk: int
    v: int


@dataclass(frozen=True)
class Model:
    """A model's attention, from its config.

    Attributes:
        model_type: the type, of plain characters; None if the config has none.
        kin: facts about the type. Its title is the type itself if it is unknown.
        known: whether the type is known.
        num_heads: query heads.
        latent, rope, v: columns of a cached row, and of V in it, after absorption.
        heads: columns per head before absorption; None if not wanted.
        topk: indices per query token; None: attention is dense.
        window: sparse: additional indices; dense: keys that a token sees in some layers; or None.
        layers: the layers that the dims belong to, if others have other ones; None: all layers.
        hybrid: the layers with MLA, if others have linear attention; None: all layers.
        dtype: dtype of q and the output, in a spec's word.
        origins: the config's field behind each field of the spec.
    """

    model_type: str | None
    kin: Kin
    known: bool
    num_heads: int
    latent: int
    rope: int
    v: int
    heads: HeadDims | None
    topk: int | None
    window: int | None
    layers: KindOfLayers | None
    hybrid: Hybrid | None
    dtype: str
    origins: Mapping[str, str]


def read_config(text: str, file: Path, values: Mapping[str, int | None]) -> Config:
    """Parse a config.json.

    Args:
        text: the file's text.
        file: the file's path, for error messages.
        values: values of FIELDS, in place of the file's; None: as if the file had no such field.

    Raises:
        SpecError: the text is not a JSON object, or not a model's config.
    """

    def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise SpecError(f"{_shown(twice)} appears twice in one object; takes each field once", place=Place(file))
        return found

    try:
        data = json.loads(text, object_pairs_hook=each_once)
    except json.JSONDecodeError as error:
        place = Place(file, error.lineno, error.colno)
        raise SpecError(f"not JSON: {error.msg[:1].lower()}{error.msg[1:]}", place=place) from None
    except (ValueError, RecursionError):
        message = "not readable JSON: a number is too long, or it is nested too deep"
        raise SpecError(message, place=Place(file)) from None
    if not isinstance(data, dict):
        raise SpecError(f"got {_shown(data)}; takes an object, {CONFIG_FILE.takes}", place=Place(file))
    return Config(data, file, values)


def _shown(value: Any) -> str:
    """Return a value of a config in one line of ASCII."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return clip(json.dumps(value))


class Config:
    """The fields of a config. An error of an invalid or missing field names its place.

    Attributes:
        values: values given in place of the file's.
        file: path of the file.
        path: path of the object with the model's fields, with a dot after each name; empty: the top level.
        types: model types of plain characters, the outermost first.
        model_type: the first type in KIN, else the outermost; None without types.
    """

    def __init__(self, data: dict[str, Any], file: Path, values: Mapping[str, int | None]) -> None:
        self.values, self.file = values, file
        self._outer, self.path = data, ""
        self._paths: dict[str, str] = {}
        nested = self._nested_path()
        self.path = "".join(f"{name}." for name in nested)
        levels = [data]
        for name in nested:
            levels.append(levels[-1][name])
        self._fields = dict(levels[-1])
        self._paths = dict.fromkeys(self._fields, self.path)
        if nested[-1:] and nested[-1] not in NESTED:  # an object of attention: outer ones have the model's fields
            for depth in range(len(levels) - 2, -1, -1):
                for name in levels[depth].keys() - self._fields.keys():
                    self._fields[name] = levels[depth][name]
                    self._paths[name] = "".join(f"{one}." for one in nested[:depth])
        if "n_heads" in self._fields:  # Mistral's params.json
            self._fields.setdefault("num_attention_heads", self._fields["n_heads"])
        self.types = list(dict.fromkeys(found for found in map(self._type, levels) if found))
        known = [found for found in self.types if found in KIN]
        self.model_type: str | None = next(iter(known or self.types), None)

    def _nested_path(self) -> tuple[str, ...]:
        """Return the path of the object with the model's fields: the outermost one with kv_lora_rank."""
        if self._outer.get("kv_lora_rank") is not None:
            return ()
        level: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), self._outer)]
        while level:
            found = [path for path, fields in level if path and fields.get("kv_lora_rank") is not None]
            usual = [path for path in found if path[-1] in NESTED]
            if len(usual or found) > 1:
                paths = ", ".join(".".join(path) for path in usual or found)
                self.refuse("kv_lora_rank", f"appears in several objects: {paths}; takes the config of one model")
            if found:
                return (usual or found)[0]
            level = [
                ((*path, name), value)
                for path, fields in level
                for name, value in fields.items()
                if isinstance(value, dict) and re.fullmatch(r"\w{1,40}", name, re.ASCII)
            ]
        for name in NESTED:  # a model without kv_lora_rank
            if self._outer.get(name) is not None:
                if not isinstance(self._outer[name], dict):
                    self.refuse(
                        name, f"got {_shown(self._outer[name])}; takes an object with the language model's fields"
                    )
                return (name,)
        return ()

    def _type(self, fields: Mapping[str, Any]) -> str | None:
        found = fields.get("model_type")
        if found is not None and not isinstance(found, str):
            self.refuse("model_type", f"got {_shown(found)}; takes text")
        plain = re.fullmatch(r"[a-z][a-z0-9_]{0,40}", (found or "").lower().replace("-", "_"))
        return plain[0].removesuffix("_text") if plain else None

    def refuse(self, name: str, message: str) -> NoReturn:
        """Raise a SpecError at a field's place; a UsageError if an option gave its value."""
        if name in self.values:
            raise UsageError(f"--set {name}: {message}")
        path = self._paths.get(name.partition(".")[0], self.path)
        raise SpecError(f"{path}{name}: {message}", place=Place(self.file))

    def has(self, name: str) -> bool:
        """Whether a field has a value other than null."""
        return self.get(name) is not None

    def get(self, name: str) -> Any:
        """Return a field's value of any type, or None."""
        return self.values[name] if name in self.values else self._fields.get(name)

    def integer(self, name: str, least: int = 1) -> int | None:
        """Return an integer; None if the field is null or missing."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(name, f"got {_shown(value)}; takes an integer of at least {least}")
        return value

    def required(self, name: str, least: int = 1, why: str = "") -> int:
        """Return an integer that a spec needs."""
        value = self.integer(name, least)
        if value is None:
            self.refuse(name, f"missing{why}; pass --set {name}=N")
        return value

    def dtype(self) -> str:
        """Return the model's dtype, in a spec's word."""
        for fields in (self._fields, self._outer):
            found = {name: fields[name] for name in ("dtype", "torch_dtype") if fields.get(name) is not None}
            if found:
                break
        else:
            self.refuse("dtype", f"missing, and so is torch_dtype; {_ASK_DTYPE}")
        (name, value), *others = found.items()
        for other, differs in others:
            if differs != value:
                self.refuse(name, f"got {_shown(value)}, but {other} is {_shown(differs)}; {_ASK_DTYPE}")
        plain = value.removeprefix("torch.") if isinstance(value, str) else ""
        if plain not in DTYPES:
            self.refuse(name, f"got {_shown(value)}; takes bfloat16 or float16; {_ASK_DTYPE}")
        return DTYPES[plain]

    def window(self) -> int | None:
        """Return the keys that a token of a sliding layer sees, including its own; None without such layers."""
        one, other = self.integer("sliding_window"), self.integer("sliding_window_size")
        if "sliding_window" in self.values:
            return one
        kinds = self.get("layer_types")
        if self.get("use_sliding_window") is False or (isinstance(kinds, list) and SLIDING not in kinds):
            return None
        if one is not None and other is not None and one != other:
            found = f"got {one}, but sliding_window_size is {other}; pass --set sliding_window=N"
            self.refuse("sliding_window", f"{found}, the number of keys that a token sees, including its own")
        return one or other


def read_model(config: Config, *, dtype: str | None, layers: str | None, heads: bool) -> Model:
    """Read a model's attention from its config.

    Args:
        config: the config's fields.
        dtype: a spec's word, in place of the config's dtype.
        layers: one of LAYERS, if the model has two kinds.
        heads: also read the columns before absorption.

    Raises:
        SpecError: a field is invalid or missing.
        UsageError: the model does not have the wanted `layers` or `heads`.
    """
    name = config.model_type
    kin = KIN.get(name or "", Kin(name or ""))
    origins = {"num_heads": "num_attention_heads", "topk": "index_topk", "window": "sliding_window"}
    if kin.caches is not None:
        if heads:
            raise UsageError(
                f"{kin.title} has one row of K and V for all heads; leave out --prefill and --for transformers"
            )
        _refuse_layers(layers, kin.title)
        return _model_of_two_caches(config, kin, dtype, origins)
    if config.get("use_mla") is False:
        config.refuse("use_mla", "got false, so the model has no MLA; mlagen generates kernels only for MLA")
    if not config.has("kv_lora_rank"):
        config.refuse("kv_lora_rank", "missing, so the model has no MLA; mlagen generates kernels only for MLA")
    topk = (
        config.required("index_topk", why=f", and {kin.title} is sparse")
        if kin.sparse
        else config.integer("index_topk")
    )
    if kin.nope or layers in KINDS[1]:
        _check_rope_layers(config, kin, layers, heads=heads)
    window = config.window()
    own_dims = any(config.has(f"swa_{dim}") for dim in DIMS) or config.has("per_layer_config")
    if own_dims or (window is not None and topk is not None):
        if layers is None:
            differ = " and other dims" if own_dims else " and no indexer"
            config.refuse("sliding_window", f"some layers have a sliding window{differ}; pass {_options(KINDS[0])}")
    elif window is None and layers in KINDS[0]:
        _refuse_layers(layers, "the model")
    prefix = ""
    if layers == "sliding":
        prefix, topk = ("swa_" if own_dims else ""), None
        window = config.required("sliding_window") if window is None else window
    elif layers == "full":
        window = None
    origins |= {"num_heads": f"{prefix}num_attention_heads", "latent": f"{prefix}kv_lora_rank"}
    origins |= {"rope": f"{prefix}qk_rope_head_dim", "v": f"{prefix}v_head_dim"}
    origins["qk"] = f"{prefix}qk_nope_head_dim + {prefix}qk_rope_head_dim"
    num_heads = config.required(origins["num_heads"])
    latent, rope = config.required(origins["latent"]), config.required(origins["rope"], least=0)
    head_dims = _head_dims(config, prefix, rope, num_heads) if heads else None
    if layers == "nope":
        rope, origins["rope"] = 0, "no_rope_layers"
    return Model(
        name,
        kin,
        name in KIN,
        num_heads,
        latent,
        rope,
        latent,
        head_dims,
        topk,
        window,
        read_kind(config, layers),
        read_hybrid(config),
        dtype or config.dtype(),
        origins,
    )


def _model_of_two_caches(config: Config, kin: Kin, dtype: str | None, origins: Mapping[str, str]) -> Model:
    """Read the attention of a model with a sliding window in a cache of its own."""
    row = config.required("head_dim")
    rope = _rope_of_the_row(config, row)
    return Model(
        config.model_type,
        kin,
        True,
        config.required("num_attention_heads"),
        row - rope,
        rope,
        row,
        None,
        config.required("index_topk"),
        config.required("sliding_window"),
        None,
        read_hybrid(config),
        dtype or config.dtype(),
        {**origins, "latent": "head_dim", "rope": "qk_rope_head_dim"},
    )


def _options(kinds: Sequence[str]) -> str:
    return " or ".join(f"--layers {kind}" for kind in kinds)


def _check_rope_layers(config: Config, kin: Kin, layers: str | None, *, heads: bool) -> None:
    """Refuse layers without RoPE of a model that has none, and a model that has them without a kind of layers.

    Before absorption, heads with and without RoPE have the same columns.
    """
    if not kin.nope or (layers is not None and layers not in KINDS[1]):
        takes = _options(KINDS[1]) if kin.nope else "--layers full or --layers sliding if it has a sliding window"
        raise UsageError(f"--layers: got {layers}; {kin.title or 'the model'} takes {takes}")
    if layers is None and not heads:
        config.refuse("no_rope_layers", f"some layers have no RoPE columns; pass {_options(KINDS[1])}")


def _refuse_layers(layers: str | None, title: str) -> None:
    if layers is not None:
        raise UsageError(
            f"--layers: got {layers}; leave it out, since by its config {title} has only one kind of layers"
        )


def _rope_of_the_row(config: Config, row: int) -> int:
    """Return the RoPE columns at the end of a row. Saved configs have only their fraction."""
    rope, fraction = config.integer("qk_rope_head_dim"), config.get("partial_rotary_factor")
    if rope is None and isinstance(fraction, float) and 0 < fraction < 1 and (row * fraction).is_integer():
        rope = int(row * fraction)
    if rope is None:
        rope = config.required("qk_rope_head_dim")
    if rope >= row:
        config.refuse("qk_rope_head_dim", f"got {rope}; takes less than head_dim, {row}")
    return rope


def _head_dims(config: Config, prefix: str, rope: int, num_heads: int) -> HeadDims:
    nope = config.required(f"{prefix}qk_nope_head_dim")
    v = config.integer(f"{prefix}v_head_dim")
    hidden = config.integer("hidden_size")
    if v is None and config.model_type == "minicpm3" and hidden is not None and hidden % num_heads == 0:
        v = hidden // num_heads  # default of its class
    return HeadDims(nope + rope, config.required(f"{prefix}v_head_dim") if v is None else v)
