"""Fields of a config.json that change attention's scores: softmax scale, caps, sinks, factors of q or the latent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

Effect = Literal["cap", "scale", "sink", "caller"]


class ScoreField(NamedTuple):
    """A field that changes the scores.

    Attributes:
        effect: "cap" (of the logits) and "scale" (by another rule than MLA's) are refused; "sink" is used if kernels
            support it; "caller": the caller applies the factor to q or to the latent before attention.
        says: the effect in words.
    """

    effect: Effect
    says: str


# By the names that classes of transformers, vLLM and SGLang read. A value of null, false or 0 turns each off.
SCORES: dict[str, ScoreField] = {
    "attn_logit_softcapping": ScoreField("cap", "soft-caps the logits"),  # Gemma 2 and 3, VaultGemma, T5Gemma
    "attn_logit_softcap": ScoreField("cap", "soft-caps the logits"),
    "attention_logit_cap": ScoreField("cap", "soft-caps the logits"),  # Gemma 4
    "attention_logit_softcapping": ScoreField("cap", "soft-caps the logits"),
    "attn_logits_soft_cap": ScoreField("cap", "soft-caps the logits"),
    "attention_multiplier": ScoreField("scale", "is the softmax scale itself"),  # Granite, HyperCLOVA X
    "query_pre_attn_scalar": ScoreField("scale", "gives the softmax scale as X**-0.5"),  # Gemma
    "attn_output_multiplier": ScoreField("scale", "scales the logits"),  # Grok
    "learnable_sink_init": ScoreField("sink", "gives each head a sink"),  # HY V4
    "add_full_attention_sink_bias": ScoreField("sink", "gives each head a sink"),  # MiMo V2
    "use_attention_sinks": ScoreField("sink", "gives each head a sink"),
    "attention_sinks": ScoreField("sink", "gives each head a sink"),
    "attention_sink": ScoreField("sink", "gives each head a sink"),
    "mla_scale_q_lora": ScoreField("caller", "scales q by (hidden_size / q_lora_rank)**0.5"),  # LongCat
    "mla_scale_kv_lora": ScoreField("caller", "scales the latent by (hidden_size / kv_lora_rank)**0.5"),  # LongCat
    "apply_mla_qkv_lora_rescale": ScoreField(  # dots3
        "caller", "scales q by (hidden_size / q_lora_rank)**0.5 and the latent by (hidden_size / kv_lora_rank)**0.5"
    ),
    "llama_4_scaling": ScoreField("caller", "scales q by its position"),  # Mistral Large 3, params.json
    "llama_4_scaling_beta": ScoreField("caller", "scales q by its position"),  # Mistral 4, in rope_parameters
    "attn_temperature_tuning": ScoreField("caller", "scales q by its position"),  # Llama 4
}
ROPE = ("rope_parameters", "rope_scaling")  # Transformers 5's name, and the one before
PLAIN_SCALE = ("kimi_linear", "kimi_k3", "glm5_next")  # model types without a YaRN factor in the scale
OWN_ROPE = ("mistral4",)  # model types with a YaRN default in their class
LEAST, MOST = 1e-6, 1e6  # as the spec's softmax_scale
OPTION = "--softmax-scale"
_FIX = f"pass {OPTION} X"
# Initial value of sinks, which may be 0: the field's presence means that there are sinks.
_PRESENT = ("learnable_sink_init",)


class Fields(Protocol):
    """The part of a config that this module reads."""

    model_type: str | None

    def get(self, name: str) -> Any:
        """Return a field's value, or None."""

    def refuse(self, name: str, message: str) -> NoReturn:
        """Raise an error at a field's place."""


class Scale(NamedTuple):
    """A softmax scale, and its origin in words."""

    value: float
    note: str


def stated(config: Fields) -> Iterator[tuple[str, ScoreField]]:
    """Yield the fields of SCORES that a config turns on, with their paths for error messages."""
    for path, fields in ((None, config), *((name, config.get(name)) for name in ROPE)):
        if path is not None and not isinstance(fields, dict):
            continue
        for name, field in SCORES.items():
            value = fields.get(name)
            is_zero = isinstance(value, int | float) and not value  # False among them
            if value is not None and (not is_zero or (name in _PRESENT and value is not False)):
                yield (name if path is None else f"{path}.{name}"), field


def refuse_caps(config: Fields, *, given: bool) -> None:
    """Refuse fields that no kernel supports. Fields of the softmax scale are allowed if the scale is `given`."""
    for name, field in stated(config):
        if field.effect == "cap":
            config.refuse(name, f"{field.says}, which no kernel supports")
        if field.effect == "scale" and not given:
            config.refuse(name, f"{field.says}, which is not MLA's rule; {_FIX}")


def sink_of(config: Fields) -> str | None:
    """Return the field that gives each head a sink, or None."""
    return next((name for name, field in stated(config) if field.effect == "sink"), None)


def left_to_the_caller(config: Fields) -> list[str]:
    """Return the caller's work on q and on the latent before attention, a line per field."""
    return [f"{field.says} [{name}]" for name, field in stated(config) if field.effect == "caller"]


def row_scale(columns: int) -> Scale:
    """Return the softmax scale of heads that attend to whole rows."""
    return Scale(float(columns**-0.5), f"{columns}**-0.5 [head_dim]")


def head_scale(config: Fields, columns: int, origin: str, layers: str | None) -> Scale:
    """Return the softmax scale of heads with this many columns of q and k, with YaRN's factor if the model has one.

    Args:
        config: the config's fields.
        columns: columns of a head before absorption.
        origin: the config's fields behind `columns`.
        layers: one of LAYERS, if RoPE differs between them.

    Raises:
        SpecError: a field of YaRN is missing or invalid.
    """
    plain, note = float(columns**-0.5), f"{columns}**-0.5 [{origin}]"
    if config.model_type in PLAIN_SCALE:
        return Scale(plain, note)
    path, rope = _rope(config, layers)
    if not rope and config.model_type in OWN_ROPE:
        config.refuse(ROPE[0], f"missing, and the model's class then has its own softmax scale; {_FIX}")
    mscale, path = _mscale(config, path, rope)
    if mscale == 1.0:
        return Scale(plain, note)
    value = plain * mscale * mscale
    if not LEAST <= value <= MOST:
        config.refuse(path, f"gives a softmax scale of {value:g}; takes a scale from {LEAST:g} to {MOST:g}; {_FIX}")
    return Scale(value, f"{note} * {mscale:.5g}**2 [{path}]")


def _rope(config: Fields, layers: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return RoPE's parameters and their path, for one kind of layers if they differ."""
    for name in ROPE:
        rope = config.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            config.refuse(name, "takes an object with RoPE's parameters")
        kinds = [kind for kind, of in rope.items() if isinstance(of, dict)]
        kind = "sliding_attention" if layers == "sliding" else "full_attention"
        if kind in kinds:
            return f"{name}.{kind}", rope[kind]
        if kinds and any(of.get("mscale_all_dim") for of in rope.values() if isinstance(of, dict)):
            config.refuse(name, f"differs between kinds of layers and has no {kind}; {_FIX}")
        return name, rope
    yarn = config.get("yarn")  # Mistral's params.json: a factor of all columns unless apply_scale is false
    if isinstance(yarn, dict):
        return "yarn", {"rope_type": "yarn", "mscale_all_dim": yarn.get("apply_scale", True) is not False, **yarn}
    return ROPE[0], {}


def _mscale(config: Fields, path: str, rope: Mapping[str, Any]) -> tuple[float, str]:
    """Return YaRN's factor, which enters the scale squared; 1.0 without YaRN. Also return the path of its fields."""
    of_all = rope.get("mscale_all_dim")
    if not of_all or rope.get("apply_yarn_scaling") is False:
        return 1.0, path
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "default":
        return 1.0, path
    if not isinstance(kind, str):
        config.refuse(f"{path}.rope_type", f"missing, and so is type, although mscale_all_dim is given; {_FIX}")
    amount = float(of_all) if path == "yarn" else _number(config, f"{path}.mscale_all_dim", of_all)
    factor = _number(config, f"{path}.factor", rope.get("factor"))
    return (0.1 * amount * math.log(factor) + 1.0 if factor > 1 else 1.0), path


def _number(config: Fields, path: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
        got = "missing" if value is None else f"got {value!r}" if isinstance(value, int | float) else "got no number"
        config.refuse(path, f"{got}; takes a number above 0, up to {MOST:g}; {_FIX}")
    return float(value)
