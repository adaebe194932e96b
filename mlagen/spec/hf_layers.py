"""The layers with MLA of a hybrid model, from its config.json."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol

SHOWN = 6  # most layers that are listed by number
_OTHER = re.compile("linear|mamba|conv|recurrent|delta|kda|lightning|rwkv|ssm")  # kinds of layers without MLA


class Fields(Protocol):
    """The part of a config that this module reads."""

    def get(self, name: str) -> Any:
        """Return a field's value, or None."""


class Hybrid(NamedTuple):
    """The layers with MLA of a model that also has layers with linear attention.

    Attributes:
        layers: their numbers, from 0; None if the config does not list them.
        of: number of all layers; None if the config does not have it.
        field: the config's field that lists them.
    """

    layers: tuple[int, ...] | None
    of: int | None
    field: str

    def __str__(self) -> str:
        if self.layers is None:
            return f"its layers with MLA; others have linear attention [{self.field}]"
        named = ", ".join(map(str, self.layers[:SHOWN])) + (", ..." if len(self.layers) > SHOWN else "")
        plural = "" if (self.of or len(self.layers)) == 1 else "s"
        count = f"{len(self.layers)}{f' of {self.of}' if self.of else ''} layer{plural}"
        return f"{count} with MLA, {named} counted from 0 [{self.field}]; the others do not read this cache"


def read_hybrid(config: Fields) -> Hybrid | None:
    """Return the layers with MLA; None if all layers have it."""
    of = config.get("num_hidden_layers")
    count = of if isinstance(of, int) and not isinstance(of, bool) and 0 < of < 10_000 else None
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        other = [isinstance(kind, str) and _OTHER.search(kind) is not None for kind in kinds]
        if any(other):
            return Hybrid(tuple(n for n, is_other in enumerate(other) if not is_other), len(kinds), "layer_types")
    linear = config.get("linear_attn_config")
    for path, holder in (("linear_attn_config.", linear), ("", config)):
        full = holder.get("full_attn_layers") if holder is config or isinstance(holder, dict) else None
        if isinstance(full, list) and full and all(type(n) is int and 0 < n < 10_000 for n in full):
            return Hybrid(tuple(n - 1 for n in full), count, f"{path}full_attn_layers")  # which counts from 1
    if isinstance(linear, dict):
        return Hybrid(None, count, "linear_attn_config")
    return _in_groups(config, count)


def _in_groups(config: Fields, count: int | None) -> Hybrid | None:
    """Return the layers of a model with groups: the last of each group, in Ling also layers after the last group."""
    for field in ("layer_group_size", "full_attention_interval"):
        size = config.get(field)
        if type(size) is not int or size < 2:
            continue
        if count is None:
            return Hybrid(None, None, field)
        whole = count // size * size if field == "layer_group_size" else count
        return Hybrid(tuple(n for n in range(count) if (n + 1) % size == 0 or n >= whole), count, field)
    return None
