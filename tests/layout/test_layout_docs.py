"""docs/layouts.md says the same of each layout as the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from layout_specs import KEYS, NINE, OWN, ROOT, make

from mlagen.cli.layouts import as_text, named_layouts
from mlagen.layout import CacheLayout, compose
from mlagen.spec.load import parse

TEXT = (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
SHOWN = set(re.findall(r"^```text\n(\w+ on .*?)^```", TEXT, re.MULTILINE | re.DOTALL))
SPECS = re.findall(r"^```yaml\n(cache:.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
HEAD = """\
name: dsv32
title: From the documentation
model: {num_heads: 128, kv_lora_rank: RANK, qk_rope_head_dim: 64, v_head_dim: RANK, dtype: bf16}
attention: {kind: sparse, topk: 2048}
wrappers: [concat_and_cache_mla]
targets: [sm90]
"""


def block(layout: CacheLayout, dims: tuple[int, int]) -> str:
    """The output of `show layout`, but for hashes and warnings."""
    hidden = ("  fingerprint", "  golden", "  warning")
    return "".join(f"{line}\n" for line in as_text(layout, dims, 64) if not line.startswith(hidden))


def test_every_layout_is_documented_with_its_bytes():
    named = {block(layout, dims) for layout, dims in named_layouts() if layout.name != "fp16"}
    (text,) = [text for text in SPECS if "ckv_kpe" in text]
    tensors = compose(yaml.safe_load(text)["cache"]["layout"], 512, 64)
    assert named | {block(make(OWN["name"]), (512, 64)), block(tensors, (512, 64))} == SHOWN
    assert all(f"`{name}`" in TEXT or f" {name}\n" in TEXT for name in (*NINE, *KEYS))


@pytest.mark.parametrize("text", SPECS)
def test_what_the_page_says_in_yaml_is_a_cache_that_a_spec_can_have(text):
    rank = "448" if "ue8m0_v4" in text else "512"
    spec = parse(HEAD.replace("RANK", rank) + text, Path("dsv32.yaml"))
    assert spec.cache.layout.name in text


def test_the_layout_of_ones_own_is_the_tested_one():
    (text,) = [text for text in SPECS if OWN["name"] in text]
    assert yaml.safe_load(text)["cache"]["layout"] == OWN
