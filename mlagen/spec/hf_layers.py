"""The layers with MLA of a hybrid model, and the kinds of such layers, from a config.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

KINDS = (("full", "sliding"), ("rope", "nope"))  # kinds of layers that differ in one model
SLIDING = "sliding_attention"  # in layer_types
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
        count = _count(self.layers, self.of)
        named = f"{count} with MLA, {_numbers(self.layers)} counted from 0 [{self.field}]"
        return f"{named}; the others do not read this cache"


class KindOfLayers(NamedTuple):
    """The layers of one kind, in a model with two kinds of layers with MLA.

    Attributes:
        kind, other: words of KINDS: these layers, and the other ones.
        layers: their numbers, from 0; None if the config does not list them.
        of: number of all layers.
        field: the config's field that lists them.
        shared: number of these layers that read the cache of an earlier layer.
    """

    kind: str
    other: str
    layers: tuple[int, ...] | None
    of: int
    field: str
    shared: int

    def __str__(self) -> str:
        if self.layers is None:
            return f"its {self.kind} layers"
        named = f"its {self.kind} layers, {_count(self.layers, self.of)}"
        named += f": {_numbers(self.layers)} counted from 0 [{self.field}]" if self.layers else f" [{self.field}]"
        return named + (f"; {self.shared} of them read an earlier layer's cache [{SHARING}]" if self.shared else "")


SHARING = "kv_source_layers"


def _count(layers: Sequence[int], of: int | None) -> str:
    plural = "" if (of or len(layers)) == 1 else "s"
    return f"{len(layers)}{f' of {of}' if of else ''} layer{plural}"


def _numbers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers[:SHOWN])) + (", ..." if len(layers) > SHOWN else "")


def read_kind(config: Fields, kind: str | None) -> KindOfLayers | None:
    """Return the layers of a kind, a word of KINDS; None without one."""
    pair = next((pair for pair in KINDS if kind in pair), None)
    if kind is None or pair is None:
        return None
    other = pair[1 - pair.index(kind)]
    field = "layer_types" if kind in KINDS[0] else "no_rope_layers"  # which has a 1 for each layer with RoPE
    entries = config.get(field)
    if not isinstance(entries, list) or not entries:
        return KindOfLayers(kind, other, None, 0, field, 0)
    seconds = [entry == SLIDING if field == "layer_types" else entry == 0 for entry in entries]
    layers = tuple(n for n, second in enumerate(seconds) if second == (kind == pair[1]))
    sources = config.get(SHARING)
    listed = isinstance(sources, list) and len(sources) == len(entries)
    shared = sum(sources[n] != n for n in layers) if listed else 0
    return KindOfLayers(kind, other, layers, len(entries), field, shared)


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
