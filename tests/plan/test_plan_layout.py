"""Where the bytes of a cached token are, against numbers worked out by hand."""

from __future__ import annotations

import io
import itertools
import re
import tokenize
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from plan_specs import ROOT, dims, make_spec

from mlagen.plan import CacheField, CacheLayout, layout_fingerprint, make_layout


@pytest.mark.parametrize(
    ("rank", "rope", "d_qk", "row_bytes"), [(512, 64, 576, 1152), (512, 0, 512, 1024), (256, 32, 288, 576)]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_unquantised_rows_are_two_bytes_a_lane(rank, rope, d_qk, row_bytes, dtype):
    spec = make_spec(kv_lora_rank=rank, qk_rope_head_dim=rope, v_head_dim=rank, dtype=dtype, layout=dtype)
    layout = make_layout(spec)
    assert (layout.name, layout.lanes, layout.row_bytes) == (dtype, d_qk, row_bytes)


def test_the_latent_comes_first_and_rope_follows():
    layout = make_layout(make_spec())
    assert layout.fields == (CacheField("latent", "bf16", 512, 0, 0), CacheField("rope", "bf16", 64, 512, 1024))
    assert [field.nbytes for field in layout.fields] == [1024, 128]
    assert layout.byte_table == ("[0, 1024)     latent  512 x bf16", "[1024, 1152)  rope    64 x bf16")


def test_a_model_without_rope_has_no_rope_field():
    layout = make_layout(make_spec(qk_rope_head_dim=0))
    assert [field.name for field in layout.fields] == ["latent"]
    assert [field.name for field in layout.fields] == ["latent"]


@pytest.mark.parametrize(("block_size", "tokens"), [(None, 1), (1, 1), (53, 53)])
def test_a_page_holds_what_the_spec_says_and_a_flat_row_is_a_page_of_one(block_size, tokens):
    assert make_layout(make_spec(block_size=block_size)).block_size == tokens


@settings(max_examples=100, deadline=None, derandomize=True)
@given(dims=dims())
def test_fields_lie_end_to_end(dims):
    layout = make_layout(make_spec(**dims))
    offset = lane = 0
    for field in layout.fields:
        assert (field.offset, field.first_lane) == (offset, lane)
        offset, lane = offset + field.nbytes, lane + field.lanes
    assert (layout.row_bytes, layout.lanes) == (offset, lane)


def test_fingerprints_tell_layouts_apart_and_depend_on_nothing_else():
    variants = [
        make_layout(make_spec(kv_lora_rank=rank, qk_rope_head_dim=rope, v_head_dim=16, dtype=dtype, layout=dtype))
        for rank, rope, dtype in itertools.product((448, 512, 576), (0, 64), ("bf16", "fp16"))
    ]
    # Same lanes and bytes, in another order.
    latent, rope = variants[-1].fields
    swapped = (replace(rope, first_lane=0, offset=0), replace(latent, first_lane=64, offset=128))
    variants.append(CacheLayout("fp16", swapped, 1))
    assert len({layout_fingerprint(layout) for layout in variants}) == len(variants)
    assert all(re.fullmatch("[0-9a-f]{16}", layout_fingerprint(layout)) for layout in variants)
    others = make_spec(num_heads=16, topk=7, title="Another", targets=("sm90",), wrappers=("concat_and_cache_mla",))
    assert layout_fingerprint(make_layout(others)) == layout_fingerprint(make_layout(make_spec()))


# The lanes and bytes of known rows, which other code bases repeat as literals.
ROW_SIZES = re.compile(r"\b(?:576|656|584|528|1152)\b")
# What the peers' own kernels take is a fact of theirs.
PEERS = Path("mlagen/bench/peers.py")


def without_comments(text: str) -> str:
    """Python source without comments: what was measured on which dims may be told there."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(token.string for token in tokens if token.type != tokenize.COMMENT)


def test_no_row_size_stands_in_the_sources_as_a_literal():
    found = {}
    for path in sorted([*(ROOT / "mlagen").rglob("*.py"), *(ROOT / "templates").rglob("*.jinja")]):
        text = path.read_text(encoding="utf-8")
        sizes = ROW_SIZES.findall(without_comments(text) if path.suffix == ".py" else text)
        if sizes and path.relative_to(ROOT) != PEERS:
            found[str(path.relative_to(ROOT))] = sizes
    assert found == {}
