"""The second reader of caches notices a fault of the first, which kernels and reference share."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import pytest
from hypothesis import given, settings
from layout_specs import FNUZ, OWN, rows

from mlagen.layout import codec
from mlagen.layout import layout as module
from mlagen.spec.stored import INDEXER_DIMS, INDEXER_LAYOUTS, LAYOUT_DIMS, NAMED_LAYOUTS
from mlagen.verify.cache.fields import CACHES, cases, check_fields
from mlagen.verify.call.case import CaseFailedError

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)
NAMED = {**NAMED_LAYOUTS, OWN["name"]: OWN, FNUZ["name"]: FNUZ}


def said(composition: dict[str, Any], rank: int = 512, rope: int = 64, cache: str = "cache", **rule: Any) -> Any:
    """The part of a package's SPEC that a cache's layout depends on."""
    model = {"kv_lora_rank": rank, "qk_rope_head_dim": rope}
    keys = {"indexer": {"head_dim": rank}} if cache == "indexer_cache" else {}
    return {"model": model, **keys, cache: {"layout": composition, "scale_rule": rule or None}}


@pytest.mark.parametrize("name", NAMED)
def test_named_layouts_are_read_as_their_fields_say(name: str) -> None:
    for rank, rope in LAYOUT_DIMS.get(name, ((512, 64),)):
        for cache in ("cache", "extra_cache"):
            assert check_fields(said(NAMED[name], rank, rope, cache), cache) == []


@pytest.mark.parametrize("name", INDEXER_LAYOUTS)
def test_named_layouts_of_keys_are_read_as_their_fields_say(name: str) -> None:
    rank = INDEXER_DIMS[name][0][0]
    assert check_fields(said(INDEXER_LAYOUTS[name], rank, 0, "indexer_cache"), "indexer_cache") == []


def test_a_scale_rule_of_the_cache_is_followed() -> None:
    assert check_fields(said(NAMED_LAYOUTS["fp8_ds_mla"], divisor=112.0, rounding="nearest"), "cache") == []


@SETTINGS
@given(row=rows())
def test_any_composition_is_read_as_its_fields_say(row: Any) -> None:
    composition, rank, rope = row
    assert check_fields(said(composition, rank, rope), "cache") == []


def test_each_cache_of_a_package_has_a_case() -> None:
    spec = {cache: {"layout": NAMED_LAYOUTS["bf16"]} for cache in CACHES}
    assert [case.cache for case in cases(spec)] == list(CACHES)
    assert list(cases({**spec, "cache": None, "extra_cache": None, "indexer_cache": None})) == []


PLANAR, PERMUTED = said(NAMED_LAYOUTS["ue8m0_v4"], 448), said(NAMED_LAYOUTS["nvfp4_ds_mla"])
# By name: the owner of a function, its name, a part of its text, another text, and a spec that shows the fault.
FAULTS: dict[str, tuple[Any, str, str, str, Any]] = {
    "RoPE begins 16 bytes early, at the pad": (
        module,
        "compose",
        "item in entries:",
        "item in sorted(entries, key=lambda one: one[2]['kind'] == 'pad'):",
        said(OWN),
    ),
    "fields lie in the opposite order": (module, "compose", "item in entries:", "item in entries[::-1]:", said(OWN)),
    "a pad has half of its bytes": (module, "compose", 'item["bytes"], plane', 'item["bytes"] // 2, plane', said(OWN)),
    "RoPE columns are the first ones": (module, "compose", '"rope": kv_lora_rank', '"rope": 0', said(OWN)),
    "the planes change places": (
        module,
        "_entries",
        '("fields", "planar_fields")',
        '("planar_fields", "fields")',
        PLANAR,
    ),
    "a page is a multiple of the second row": (module, "compose", "offsets[0] if", "offsets[1] if", PLANAR),
    "a page ends with its last row": (
        module.CacheLayout,
        "page_bytes",
        "return ",
        "return block_size * self.row_bytes or ",
        PLANAR,
    ),
    "the second plane begins a row late": (codec, "planes_of", "+= block_size *", "+= (block_size + 1) *", PLANAR),
    "scales stand in order": (module.ScalesField, "position", "return ", "return scale if scale else ", PERMUTED),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, function, old, new, spec = FAULTS[name]
    known = getattr(owner, function)
    text = textwrap.dedent(inspect.getsource(known))
    assert old in text
    made: dict[str, Any] = {}
    exec(text.replace(old, new), known.__globals__ | {"__name__": "faulty"}, made)
    monkeypatch.setattr(owner, function, made[function])
    with pytest.raises((CaseFailedError, ValueError)):
        check_fields(spec, "cache")
