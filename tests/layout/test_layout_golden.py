"""Golden pages: one page a layout, of values that any language can make, pinned to its last bit."""

from __future__ import annotations

import exact
import numpy as np
import pytest
import torch
from layout_specs import FNUZ, KEYS, NINE, make

from mlagen.layout.codec import GOLDEN_TENSOR_SCALE, decode, golden_page, golden_rows, page_sha256, planes_of

# Fingerprint, and sha256 of the golden page of 64 tokens. A cache on disk or in another process may rest on them.
GOLDEN = {
    "bf16": ("832972ac7da69d1c", "1da5e3361e9f259886511c21457be610db8ff980e144a654a20574da2e3dc67e"),
    "fp16": ("05d7d04d3fea56ea", "43c1a33dd7aea3ae8bb677bf8c25a08e9fd0fc2d463ec3e029e7132209f51be8"),
    "fp8_ds_mla": ("741b3d63f2ef2ada", "770054dafe9417f1211d42efe655b8db460bbf0494b546533605fc298765e99c"),
    "fp8_per_tensor": ("14b220c52911fc6f", "a165f8848b6ec3dec383a698b58b574630633b503999fa563548ad0aa2f92e91"),
    "indexer_fp8": ("c0de62fc1e8183ce", "e26799aed68f7208213c63d043161e1e841ccd38422979771c7c55faf2796ced"),
    "indexer_mxfp4": ("72a3399d688a661e", "8773413d54ae4a3bd699d8133192be493988d86b74f94f78457483076189026c"),
    "mxfp8_v41": ("1c6867e1468162e2", "42a6178f81902859d07cd973e1f833aa5410f663e6584144819ac91748def5b7"),
    "nvfp4_ds_mla": ("b9cb8da6fc63f699", "3e6921c6ad8418c6dd4f1204a67a3cfb06ad646c6879fb69dc068cb8735387f1"),
    "nvfp4_v41": ("eb284abaf92b9c93", "e58cb1ebf8c06716c1d7be28315171ee48f4beda4e5c45775888126c69260c4d"),
    "ue8m0_v4": ("288fa323ac5f776c", "3e330ad423536b2b355b6e7cf9c05a9aeb743192afdfca51827447d48d720b6b"),
    "nvfp4_bf16_rope": ("08140496a1ade6f6", "12c2c7a62befe389e4a221acdee3db6322f7001415eeb449a38dbf06b147f53d"),
    "fnuz_ds_mla": ("41e8e02aef000dd8", "b93989d12ebd869142008a8a5a03bdb593230f35ff014839dcfa194d4498a8f8"),
}
# Other scale rules write other bytes of the same layout.
CHANGED = {
    "fp8_ds_mla": (
        {"rounding": "nearest", "floor": 2.0**-126},
        "c20c01473e1a1b8c309a0dc827c8c83dcd807fb4d6f469dcfaab22b01c034132",
    ),
    "indexer_fp8": ({"rounding": "nearest"}, "b5a6865b17f4d83b85483576aba55d5dfeeb723abce557137d914fd5bf3a1889"),
    "ue8m0_v4": ({"floor_on": "scale"}, "0753aaa3a089190dc73a5fd3b959e89e7dc5bc8e010597c826db1c350f5e8c05"),
}


def value(token: int, column: int) -> float:
    """The formula of golden_rows, in Python's integers."""
    kind = (token + column // 128) % 8
    h = (1000003 * token + column) * 2654435761 % 2**32
    h = (h ^ (h >> 16)) * 73244475 % 2**32
    v = (h >> 23) - 256
    return 0.0 if kind == 0 else v * 2.0 ** {1: -24, 2: 7, 3: -14}.get(kind, -7)


def test_golden_rows_are_what_their_formula_says():
    assert golden_rows(64, 576).tolist() == [[value(token, column) for column in range(576)] for token in range(64)]


def test_golden_rows_are_exact_in_both_dtypes_of_models_and_have_tiles_of_all_kinds():
    rows = golden_rows(64, 576)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(rows.to(dtype).float(), rows)
    tiles = rows[:, :512].reshape(64, 4, 128).abs().amax(2)
    assert int((tiles == 0).sum()) == 32
    assert int(((tiles > 0) & (tiles < 1e-4)).sum()) == 32
    assert int((tiles > 2688).sum()) == 32


def test_all_layouts_have_a_golden_page():
    assert set(GOLDEN) == {*NINE, *KEYS, FNUZ["name"]}


@pytest.mark.parametrize("name", GOLDEN)
def test_fingerprints_and_golden_pages_stay(name):
    layout = make(name)
    page = golden_page(layout)
    assert page.shape == (layout.page_bytes(64),)
    assert (layout.fingerprint, page_sha256(page)) == GOLDEN[name]


@pytest.mark.parametrize("name", CHANGED)
def test_golden_pages_of_other_scale_rules_stay(name):
    changes, sha256 = CHANGED[name]
    layout = make(name, **changes)
    assert (layout.fingerprint, page_sha256(golden_page(layout))) == (GOLDEN[name][0], sha256)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_second_encoder_writes_the_same_page(name):
    layout = make(name)
    rows = np.array([[value(token, column) for column in range(layout.columns)] for token in range(64)])
    planes = exact.encode(layout, rows, GOLDEN_TENSOR_SCALE)
    page = b"".join(plane.tobytes() for plane in planes)
    assert bytes(golden_page(layout).tolist()) == page + bytes(layout.page_bytes(64) - len(page))


def test_a_golden_page_has_as_many_tokens_as_it_is_told():
    layout = make("ue8m0_v4")
    small, page = golden_page(layout, 2), golden_page(layout)
    assert small.shape == (1728,)
    planes, wanted = planes_of(layout, small[None], 2), planes_of(layout, page[None], 64)
    for one, other in zip(planes, wanted, strict=True):
        assert torch.equal(one[0], other[0, :2])
    assert torch.equal(decode(layout, tuple(plane[0] for plane in planes))[:, 448:], golden_rows(2, 512)[:, 448:])
