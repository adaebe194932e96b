"""A model's config.json, as Hugging Face keeps it: what of it an attention spec needs.

Fields are read by the names that transformers, vLLM and SGLang read them by. What the file does not say is asked for,
with the option of `mlagen init` that says it; nothing is taken from a class's defaults. The text is untrusted: of its
strings none is handed on but a model type of plain characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mlagen.errors import Place, SpecError, UsageError
from mlagen.spec.hf_layers import Hybrid, read_hybrid
from mlagen.spec.load import FileKind
from mlagen.spec.marked import clip

CONFIG_FILE = FileKind("a model's config.json", "config.json", 4 << 20)
LAYERS = ("full", "sliding")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
DIMS = ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
INDEXER_DIMS = ("index_n_heads", "index_head_dim")
FIELDS = (*DIMS, "head_dim", "index_topk", *INDEXER_DIMS, "sliding_window", *(f"swa_{name}" for name in DIMS))
NESTED = ("text_config", "language_config", "llm_config")  # where multimodal models keep their language model's fields
_ASK_DTYPE = "give --dtype bf16 or --dtype fp16"


class IndexerKin(NamedTuple):
    """What is known of an indexer, which no config says.

    Attributes:
        rope, rope_at: a spec's words for which columns RoPE rotates together, and where they stand in a head.
        styled: its config's indexer_rope_interleave, where there is one, says `rope`: true is gptj, false is neox.
        compress_ratio: tokens a key stands for.
        normed: keys are normed, rotated and stored by one function.
    """

    rope: str
    rope_at: str
    styled: bool = False
    compress_ratio: int = 1
    normed: bool = False


class Kin(NamedTuple):
    """What is known of a model type.

    Attributes:
        title: the model, for people.
        sparse: its attention is sparse, so that its config must say index_topk.
        sink: its softmax has a sink logit a head.
        caches: layouts of the two caches of a model that keeps a window in one; V is the whole row then.
        nearest_scales: its scales of fp8_ds_mla are rounded to fp32, not up to powers of two.
        indexer: what is known of its indexer; None: nothing, or it has none.
    """

    title: str
    sparse: bool = False
    sink: bool = False
    caches: tuple[str, str] | None = None
    nearest_scales: bool = False
    indexer: IndexerKin | None = None


_V4 = IndexerKin("gptj", "last", compress_ratio=4)
_V41 = IndexerKin("gptj", "last", normed=True)
_HY = IndexerKin("gptj", "last")
KIN = {
    "deepseek_v2": Kin("DeepSeek V2"),
    "deepseek_v3": Kin("DeepSeek V3"),
    "deepseek_v32": Kin("DeepSeek V3.2", sparse=True, indexer=IndexerKin("neox", "first", styled=True)),
    "deepseek_v4": Kin("DeepSeek V4", sparse=True, caches=("ue8m0_v4", "ue8m0_v4"), indexer=_V4),
    "deepseek_v41": Kin("DeepSeek V4.1", sparse=True, caches=("mxfp8_v41", "nvfp4_v41"), indexer=_V41),
    "kimi_k2": Kin("Kimi K2"),
    "kimi_k25": Kin("Kimi K2.5"),
    "kimi_k3": Kin("Kimi K3"),
    "kimi_linear": Kin("Kimi Linear"),
    "glm4_moe_lite": Kin("GLM-4.7-Flash"),
    "glm_moe_dsa": Kin("GLM-5", sparse=True, nearest_scales=True, indexer=IndexerKin("gptj", "first", styled=True)),
    "glm5_next": Kin("GLM-5.3-Flash", sparse=True),
    "hy_v4": Kin("HY V4", sparse=True, sink=True, indexer=_HY),
    "hy_v4_vl": Kin("HY V4 VL", sparse=True, sink=True, indexer=_HY),
    "minicpm3": Kin("MiniCPM3"),
    "dots3_note": Kin("dots3", sparse=True),
    "longcat_flash": Kin("LongCat-Flash"),
    "longcat_flash_ngram": Kin("LongCat-Flash-Lite"),
    "mistral4": Kin("Mistral 4"),
    "mistral_large4": Kin("Mistral Large 4", sparse=True),
}


@dataclass(frozen=True)
class HeadDims:
    """Columns of a head before absorption, of q and k and of v."""

    qk: int
    v: int


@dataclass(frozen=True)
class Model:
    """What a config says of a model's attention.

    Attributes:
        model_type: of plain characters; None where the config has none such.
        kin: what is known of the type; its title is the type itself where nothing is.
        known: whether anything is.
        num_heads: query heads.
        latent, rope, v: columns of a cached row, and of V in it, after absorption.
        heads: columns before absorption; None where they were not asked for.
        topk: indices a query token; None: attention is dense.
        window: of sparse attention, further indices; of dense, keys that a token of some layers sees; or None.
        layers: of LAYERS, where the model has both and the dims are of one.
        hybrid: the layers that have MLA, where others have linear attention; None: all have.
        dtype: of q and the output, in a spec's word.
        origins: the config's field, by the field of a spec that it gave.
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
    layers: str | None
    hybrid: Hybrid | None
    dtype: str
    origins: Mapping[str, str]


def read_config(text: str, file: Path, values: Mapping[str, int | None]) -> Config:
    """Parse a config.json.

    Args:
        text: the file's text.
        file: its path, for the places of errors.
        values: fields of FIELDS to take instead of the file's; None: as if it had none.

    Raises:
        SpecError: the text is no JSON object, or holds one that is no model's config.
    """

    def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise SpecError(f"{_shown(twice)} stands twice in one object; takes each field once", place=Place(file))
        return found

    try:
        data = json.loads(text, object_pairs_hook=each_once)
    except json.JSONDecodeError as error:
        place = Place(file, error.lineno, error.colno)
        raise SpecError(f"not JSON: {error.msg[:1].lower()}{error.msg[1:]}", place=place) from None
    except (ValueError, RecursionError):
        raise SpecError("not JSON that can be read: a number too long, or nested too deep", place=Place(file)) from None
    if not isinstance(data, dict):
        raise SpecError(f"got {_shown(data)}; takes an object, {CONFIG_FILE.takes}", place=Place(file))
    return Config(data, file, values)


def _shown(value: Any) -> str:
    """A value of a config in one line of ASCII."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return clip(json.dumps(value))


class Config:
    """The fields of a config: typed, with an error that names its place where one is off or missing.

    Attributes:
        values: what was given instead of the file's.
        file: the path that it came from.
        path: of the object that holds the model's fields, with a dot behind each name; empty: the file's own.
        types: model types of plain characters, the outermost first.
        model_type: one of KIN where the file names several, else the outermost; None without.
    """

    def __init__(self, data: dict[str, Any], file: Path, values: Mapping[str, int | None]) -> None:
        self.values, self.file = values, file
        self._outer, self.path = data, ""
        self._paths: dict[str, str] = {}
        held = self._held()
        self.path = "".join(f"{name}." for name in held)
        levels = [data]
        for name in held:
            levels.append(levels[-1][name])
        self._fields = dict(levels[-1])
        self._paths = dict.fromkeys(self._fields, self.path)
        if held[-1:] and held[-1] not in NESTED:  # an object of attention: the objects around it are the model's
            for depth in range(len(levels) - 2, -1, -1):
                for name in levels[depth].keys() - self._fields.keys():
                    self._fields[name] = levels[depth][name]
                    self._paths[name] = "".join(f"{one}." for one in held[:depth])
        if "n_heads" in self._fields:  # Mistral's params.json
            self._fields.setdefault("num_attention_heads", self._fields["n_heads"])
        self.types = list(dict.fromkeys(found for found in map(self._type, levels) if found))
        known = [found for found in self.types if found in KIN]
        self.model_type: str | None = next(iter(known or self.types), None)

    def _held(self) -> tuple[str, ...]:
        """The names that lead to the object with the model's fields: the nearest with kv_lora_rank, of any depth."""
        if self._outer.get("kv_lora_rank") is not None:
            return ()
        level: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), self._outer)]
        while level:
            found = [path for path, fields in level if path and fields.get("kv_lora_rank") is not None]
            usual = [path for path in found if path[-1] in NESTED]
            if len(usual or found) > 1:
                paths = ", ".join(".".join(path) for path in usual or found)
                self.refuse("kv_lora_rank", f"stands in several objects: {paths}; takes the config of one model")
            if found:
                return (usual or found)[0]
            level = [
                ((*path, name), value)
                for path, fields in level
                for name, value in fields.items()
                if isinstance(value, dict) and re.fullmatch(r"\w{1,40}", name, re.ASCII)
            ]
        for name in NESTED:  # of a model without that field
            if self._outer.get(name) is not None:
                if not isinstance(self._outer[name], dict):
                    self.refuse(name, f"got {_shown(self._outer[name])}; takes an object, the language model's fields")
                return (name,)
        return ()

    def _type(self, fields: Mapping[str, Any]) -> str | None:
        found = fields.get("model_type")
        if found is not None and not isinstance(found, str):
            self.refuse("model_type", f"got {_shown(found)}; takes text")
        plain = re.fullmatch(r"[a-z][a-z0-9_]{0,40}", (found or "").lower().replace("-", "_"))
        return plain[0].removesuffix("_text") if plain else None

    def refuse(self, name: str, message: str) -> NoReturn:
        """Raises a SpecError of a field at its place; a UsageError if an option gave it."""
        if name in self.values:
            raise UsageError(f"--set {name}: {message}")
        path = self._paths.get(name.partition(".")[0], self.path)
        raise SpecError(f"{path}{name}: {message}", place=Place(self.file))

    def has(self, name: str) -> bool:
        """Whether a field has a value other than null."""
        return self.get(name) is not None

    def get(self, name: str) -> Any:
        """A field's value, whatever it is; None without."""
        return self.values[name] if name in self.values else self._fields.get(name)

    def integer(self, name: str, least: int = 1) -> int | None:
        """An integer; None where the config says null or nothing."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(name, f"got {_shown(value)}; takes an integer of at least {least}")
        return value

    def required(self, name: str, least: int = 1, why: str = "") -> int:
        """An integer that a spec cannot do without."""
        value = self.integer(name, least)
        if value is None:
            self.refuse(name, f"missing{why}; give --set {name}=N")
        return value

    def dtype(self) -> str:
        """The model's dtype in a spec's word."""
        for fields in (self._fields, self._outer):
            found = {name: fields[name] for name in ("dtype", "torch_dtype") if fields.get(name) is not None}
            if found:
                break
        else:
            self.refuse("dtype", f"missing, and so is torch_dtype; {_ASK_DTYPE}")
        (name, value), *others = found.items()
        for other, differs in others:
            if differs != value:
                self.refuse(name, f"got {_shown(value)}, but {other} {_shown(differs)}; {_ASK_DTYPE}")
        plain = value.removeprefix("torch.") if isinstance(value, str) else ""
        if plain not in DTYPES:
            self.refuse(name, f"got {_shown(value)}; takes bfloat16 or float16; {_ASK_DTYPE}")
        return DTYPES[plain]

    def window(self) -> int | None:
        """Keys that a token of a sliding layer sees, its own with them; None without such layers."""
        one, other = self.integer("sliding_window"), self.integer("sliding_window_size")
        if "sliding_window" in self.values:
            return one
        kinds = self.get("layer_types")
        if self.get("use_sliding_window") is False or (isinstance(kinds, list) and not set(_text(kinds)) & _SLIDING):
            return None
        if one is not None and other is not None and one != other:
            found = f"got {one}, but sliding_window_size {other}; give --set sliding_window=N"
            self.refuse("sliding_window", f"{found}, the keys that a token sees, its own with them")
        return one or other


_SLIDING = {"sliding_attention"}


def _text(entries: list[Any]) -> list[str]:
    return [entry for entry in entries if isinstance(entry, str)]


def read_model(config: Config, *, dtype: str | None, layers: str | None, heads: bool) -> Model:
    """Read a model's attention from its config.

    Args:
        config: the fields.
        dtype: a spec's word, instead of the config's.
        layers: of LAYERS, where the model has both.
        heads: whether columns before absorption are wanted.

    Raises:
        SpecError: a field is off, or one that is needed is missing.
        UsageError: `layers` or `heads` are of what the model has not.
    """
    name = config.model_type
    kin = KIN.get(name or "", Kin(name or ""))
    origins = {"num_heads": "num_attention_heads", "topk": "index_topk", "window": "sliding_window"}
    hybrid = read_hybrid(config)
    if kin.caches is not None:
        if heads:
            raise UsageError(
                f"{kin.title} has one row of K and V for all heads; takes no --prefill or --for transformers"
            )
        _refuse_layers(layers, kin.title)
        row = config.required("head_dim")
        rope = _rope_of_the_row(config, row)
        return Model(
            name,
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
            hybrid,
            dtype or config.dtype(),
            origins | {"latent": "head_dim", "rope": "qk_rope_head_dim"},
        )
    if config.get("use_mla") is False:
        config.refuse("use_mla", "got false: the model has no MLA, and mlagen's kernels are for no other attention")
    if not config.has("kv_lora_rank"):
        config.refuse("kv_lora_rank", "missing: the model has no MLA, and mlagen's kernels are for no other attention")
    topk = (
        config.required("index_topk", why=f", and {kin.title} is sparse")
        if kin.sparse
        else config.integer("index_topk")
    )
    window = config.window()
    own_dims = any(config.has(f"swa_{dim}") for dim in DIMS) or config.has("per_layer_config")
    if own_dims or (window is not None and topk is not None):
        if layers is None:
            differ = "of dims of their own" if own_dims else "without an indexer"
            config.refuse(
                "sliding_window", f"some layers have a sliding window, {differ}; give --layers {' or '.join(LAYERS)}"
            )
    elif window is None:
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
    return Model(
        name,
        kin,
        name in KIN,
        num_heads,
        latent,
        rope,
        latent,
        _head_dims(config, prefix, rope, num_heads) if heads else None,
        topk,
        window,
        layers,
        hybrid,
        dtype or config.dtype(),
        origins,
    )


def _refuse_layers(layers: str | None, title: str) -> None:
    if layers is not None:
        raise UsageError(f"--layers: got {layers}; takes none: by its config {title} has one kind of layers")


def _rope_of_the_row(config: Config, row: int) -> int:
    """RoPE columns of a row that ends with them; saved configs have the fraction alone."""
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
        v = hidden // num_heads  # as its class has it
    return HeadDims(nope + rope, config.required(f"{prefix}v_head_dim") if v is None else v)
