"""The layouts of the caches that a spec names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mlagen.layout import layout as layouts
from mlagen.layout.layout import CacheLayout


def layouts_of(spec: Mapping[str, Any]) -> tuple[CacheLayout | None, CacheLayout | None]:
    """The layouts of the cache and of the second cache that a spec names; None for one that it lacks.

    Args:
        spec: a validated spec as a plain dict, `Spec.model_dump()` or `SPEC["spec"]` of a package.
    """
    dims = spec["model"]

    def layout(cache: Mapping[str, Any] | None) -> CacheLayout | None:
        if cache is None:
            return None
        return layouts.compose(cache["layout"], dims["kv_lora_rank"], dims["qk_rope_head_dim"], cache.get("scale_rule"))

    return layout(spec.get("cache")), layout(spec.get("extra_cache"))


def indexer_layout_of(spec: Mapping[str, Any]) -> CacheLayout | None:
    """The layout of the cache of the indexer's keys that a spec names; None for a spec that lacks it.

    Args:
        spec: a validated spec as a plain dict, `Spec.model_dump()` or `SPEC["spec"]` of a package.
    """
    cache, indexer = spec.get("indexer_cache"), spec.get("indexer")
    if cache is None or indexer is None:
        return None
    return layouts.compose(cache["layout"], indexer["head_dim"], 0, cache.get("scale_rule"))


def indexer_query_layout_of(spec: Mapping[str, Any]) -> CacheLayout | None:
    """Return the layout of a head of the indexer's query: values and, in a second plane, scales; None without a cache.

    It is the keys' layout with the changes of `indexer.q_scale_rule` to their cache's scale rule.

    Args:
        spec: a validated spec as a plain dict, `Spec.model_dump()` or `SPEC["spec"]` of a package.
    """
    keys = indexer_layout_of(spec)
    if keys is None:
        return None
    (values,) = keys.data
    scales = keys.scales_of(values)
    planes: dict[str, Any] = {"fields": [{"kind": "row", "dtype": values.dtype}]}
    if scales is not None:
        if pad := -values.nbytes % scales.itemsize:
            planes["fields"].append({"kind": "pad", "bytes": pad})
        rule = {name: value for name, value in (spec["indexer"].get("q_scale_rule") or {}).items() if value is not None}
        stored = {"kind": "scales", "of": "row", "dtype": scales.dtype, "tile": scales.tile}
        planes["planar_fields"] = [stored | dataclasses.asdict(scales.rule) | rule]
    return layouts.compose({"name": keys.name, **planes}, keys.columns, 0)
