"""Layouts for tests: those that have names, one of our own, and any composition that fits a row."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from mlagen.layout import CacheLayout, LayoutError, ScalesField, compose
from mlagen.layout.layout import BITS, LARGEST
from mlagen.spec.stored import INDEXER_DIMS, INDEXER_LAYOUTS, LAYOUT_DIMS, NAMED_LAYOUTS

ROOT = Path(__file__).parents[2]

# A layout that no engine has: a 4-bit latent, and RoPE columns left in bf16.
OWN = {
    "name": "nvfp4_bf16_rope",
    "fields": [
        {"kind": "latent", "dtype": "e2m1"},
        {"kind": "scales", "of": "latent", "dtype": "e4m3", "tile": 16}
        | {"rounding": "nearest", "divisor": 6, "floor": 2.0**-9, "floor_on": "scale"},
        {"kind": "pad", "bytes": 16},
        {"kind": "rope", "dtype": "bf16"},
    ],
}
# As gfx942 stores it: e4m3fnuz, one fp32 scale for 128 columns.
FNUZ = {
    "name": "fnuz_ds_mla",
    "fields": [
        {"kind": "latent", "dtype": "e4m3fnuz"},
        {"kind": "rope", "dtype": "bf16"},
        {"kind": "scales", "of": "latent", "dtype": "fp32", "tile": 128}
        | {"rounding": "nearest", "divisor": 224, "floor": 1e-4, "floor_on": "amax"},
    ],
}

NINE = (*sorted(NAMED_LAYOUTS), OWN["name"])
KEYS = tuple(sorted(INDEXER_LAYOUTS))  # of an indexer's keys


def make(name: str, rank: int | None = None, rope: int | None = None, **rule: Any) -> CacheLayout:
    """A layout of NINE or KEYS, or FNUZ, by default on the dims of its first model; `rule` changes its scale rule."""
    own = {OWN["name"]: OWN, FNUZ["name"]: FNUZ}
    dims = (LAYOUT_DIMS | INDEXER_DIMS).get(name, ((512, 64),))[0]
    composition = own.get(name) or (NAMED_LAYOUTS | INDEXER_LAYOUTS)[name]
    return compose(composition, dims[0] if rank is None else rank, dims[1] if rope is None else rope, rule)


def _scale(draw: st.DrawFn, of: str, dtype: str) -> dict[str, Any]:
    stored = draw(st.sampled_from(["fp32", "ue8m0", "e4m3"]))
    rounding = {"ue8m0": "power_of_two", "e4m3": "nearest"}.get(stored)
    return {
        "kind": "scales",
        "of": of,
        "dtype": stored,
        "tile": draw(st.sampled_from([16, 32, 64, 128, 256, 512])),
        "rounding": rounding or draw(st.sampled_from(["power_of_two", "nearest"])),
        "divisor": draw(st.sampled_from([LARGEST[dtype], LARGEST[dtype] / 2, 3.0])),
        "floor": draw(st.sampled_from([1.0, 0.875])),
        "floor_on": draw(st.sampled_from(["amax", "scale"])),
    }


@st.composite
def compositions(draw: st.DrawFn, rank: int, rope: int, dtype: str) -> dict[str, Any]:
    """Any layout of rows of `rank` + `rope` columns with unquantised columns of `dtype`, as a spec says it."""
    columns = {"latent": rank, "rope": rope, "row": rank + rope}
    kinds = draw(st.sampled_from([["row"], ["latent", "rope"], ["rope", "latent"]]))
    planes: list[list[dict[str, Any]]] = [[], []]
    for kind in kinds:
        quantised = [name for name in LARGEST if name != "e2m1" or columns[kind] % 2 == 0]
        stored = draw(st.sampled_from([dtype, *quantised]))
        entries = [{"kind": kind, "dtype": stored}]
        if stored in LARGEST:
            scale = draw(st.sampled_from(["none", "tensor", "tile"]))
            if scale == "tensor":
                entries.append({"kind": "tensor_scale", "of": kind})
            elif scale == "tile":
                entries.append(_scale(draw, kind, stored))
                count = math.ceil(columns[kind] / entries[-1]["tile"])
                entries[-1]["interleave"] = draw(st.sampled_from([n for n in (1, 2, 4, 8) if count % n == 0]))
        for entry in entries:
            planes[draw(st.sampled_from([0, 0, 1]))].append(entry)
    if not any(columns.get(entry["kind"]) for entry in planes[0]):
        planes = [[*planes[1], *planes[0]], []]
    for plane in planes:
        plane[:] = draw(st.permutations(plane))
    padded = [_padded(plane, columns, _widest(planes, columns)) for plane in planes]
    return {
        "name": "mine",
        "fields": padded[0],
        "planar_fields": padded[1],
        "page_multiple": draw(st.sampled_from(["row", 1, 4, 4096])),
    }


def _bytes(entry: dict[str, Any], columns: dict[str, int]) -> tuple[int, int]:
    """Bytes of an entry, and of one of its values."""
    of = entry.get("of", entry["kind"])
    if entry["kind"] == "tensor_scale" or not columns[of]:
        return 0, 1
    count = math.ceil(columns[of] / entry["tile"]) if entry["kind"] == "scales" else columns[of]
    return count * BITS[entry["dtype"]] // 8, max(1, BITS[entry["dtype"]] // 8)


def _widest(planes: list[list[dict[str, Any]]], columns: dict[str, int]) -> int:
    return max(_bytes(entry, columns)[1] for plane in planes for entry in plane)


def _padded(plane: list[dict[str, Any]], columns: dict[str, int], widest: int) -> list[dict[str, Any]]:
    """The entries with padding where one would begin, or a row end, off alignment."""
    entries: list[dict[str, Any]] = []
    offset = 0
    for entry in plane:
        nbytes, itemsize = _bytes(entry, columns)
        if offset % itemsize:
            entries.append({"kind": "pad", "bytes": -offset % itemsize})
            offset += -offset % itemsize
        entries.append(entry)
        offset += nbytes
    if offset % widest:
        entries.append({"kind": "pad", "bytes": -offset % widest})
    return entries


def fitting(rank: int, rope: int, dtype: str) -> list[str]:
    """The named layouts that such rows fit, with unquantised columns of `dtype`."""
    found = []
    for name, composition in NAMED_LAYOUTS.items():
        try:
            layout = compose(composition, rank, rope)
        except LayoutError:
            continue
        if all(field.quantised or field.dtype == dtype for field in layout.data):
            found.append(name)
    return found


@st.composite
def caches(draw: st.DrawFn, rank: int, rope: int, dtype: str) -> dict[str, Any]:
    """Any cache of such rows, as a spec says it."""
    layout = draw(st.sampled_from(fitting(rank, rope, dtype)) | compositions(rank, rope, dtype))
    composition = NAMED_LAYOUTS[layout] if isinstance(layout, str) else layout
    cache = {"layout": layout, "block_size": draw(st.none() | st.integers(1, 4096))}
    if any(isinstance(field, ScalesField) for field in compose(composition, rank, rope).fields):
        cache["scale_rule"] = draw(st.none() | st.just({"floor": 1.5}))
    return cache


@st.composite
def indexers(draw: st.DrawFn, topk: int | None, dtype: str) -> dict[str, Any]:
    """An indexer with the cache of its keys or without, as parts of a spec; or neither.

    Args:
        draw: hypothesis's draw.
        topk: how many keys it picks; None: any number.
        dtype: of columns that are not quantised.
    """
    if draw(st.booleans()):
        return {}
    columns = draw(st.sampled_from([128, 96, 64]) | st.integers(1, 512))
    rope = 2 * draw(st.integers(0, min(columns, 256) // 2))
    indexer = {
        "num_heads": draw(st.sampled_from([64, 5]) | st.integers(1, 128)),
        "head_dim": columns,
        "topk": topk or draw(st.integers(1, 4096)),
        "rope_head_dim": rope,
        "rope": draw(st.sampled_from(["neox", "gptj"])) if rope else None,
        "rope_at": draw(st.sampled_from(["first", "last"])) if rope else None,
        "compress_ratio": draw(st.sampled_from([1, 2, 128])),
        "q_scale_rule": None,
    }
    block = draw(st.sampled_from([4, 8, 16, 32, 64]))
    fewest = -(-indexer["topk"] // block)
    if fewest <= 4096 and draw(st.booleans()):
        indexer["candidates"] = {"block": block, "count": draw(st.integers(fewest, 4096))}
    own = compositions(columns, 0, dtype)
    fits = {"indexer_mxfp4": 2, "indexer_fp8": 4}  # of columns, where a byte or a scale ends
    named = [name for name in INDEXER_LAYOUTS if columns % fits[name] == 0]
    layout = draw(st.sampled_from(named) | own if named else own)
    fields = compose(INDEXER_LAYOUTS[layout] if isinstance(layout, str) else layout, columns, 0).fields
    cache = {"layout": layout, "block_size": draw(st.none() | st.integers(1, 4096)), "scale_rule": None}
    if any(isinstance(field, ScalesField) for field in fields):
        indexer["q_scale_rule"] = draw(st.none() | st.just({"floor": 1.5}))
        cache["scale_rule"] = draw(st.none() | st.just({"floor": 1.25}))
    return {"indexer": indexer, **draw(st.sampled_from([{}, {"indexer_cache": cache}, {"indexer_cache": cache}]))}


def keys_dtype(parts: dict[str, Any]) -> str | None:
    """How a spec's parts store the columns of the indexer's keys; None without a cache of them."""
    cache = parts.get("indexer_cache")
    if cache is None:
        return None
    layout = INDEXER_LAYOUTS[cache["layout"]] if isinstance(cache["layout"], str) else cache["layout"]
    entries = (*layout["fields"], *layout.get("planar_fields", ()))
    return next(entry["dtype"] for entry in entries if entry["kind"] in ("row", "latent"))


def has_hadamard(parts: dict[str, Any]) -> bool:
    """Whether a Hadamard transform fits the indexer of a spec's parts: keys of 128 columns without RoPE."""
    indexer = parts.get("indexer", {})
    return (indexer.get("head_dim"), indexer.get("rope_head_dim")) == (128, 0)


@st.composite
def rows(draw: st.DrawFn) -> tuple[dict[str, Any], int, int]:
    """A composition, kv_lora_rank and qk_rope_head_dim."""
    rank, rope = draw(st.integers(1, 1024)), draw(st.just(0) | st.integers(0, 256))
    return draw(compositions(rank, rope, draw(st.sampled_from(["bf16", "fp16"])))), rank, rope
