"""How far into a cache the sm90 kernels reach, by tensors without memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mlagen.bench import load_package

GENERATED = Path(__file__).parents[2] / "generated"


@pytest.mark.parametrize(("name", "row_bytes", "planar"), [("dsv32_fp8", 656, False), ("dsv4_flash", 584, True)])
@pytest.mark.parametrize(("begin", "reached"), [((1 << 36) - 1024, True), ((1 << 36) - 16, False), (1 << 36, False)])
def test_a_row_whose_offset_would_mean_none_is_out_of_reach(
    name: str, row_bytes: int, planar: bool, begin: int, reached: bool
) -> None:
    package = load_package(GENERATED / name)
    wrappers = sys.modules[f"{package.root.__name__}.sparse_decode"]
    q = torch.empty(1, 1, 64, 576, device="meta")
    out = torch.empty(1, 64, 512, device="meta")
    strides = (begin, row_bytes, row_bytes, 1)
    cache = torch.empty_strided((2, 1, 1, row_bytes), strides, dtype=torch.uint8, device="meta")
    indices = torch.empty(1, 1, 1, device="meta")
    parts = (q,) if planar else (q, q[..., 512:])  # rows of 656 bytes have RoPE columns behind V, and a Q of two parts
    assert wrappers._reaches(*parts, out, [(cache, indices)] * (2 if planar else 1)) is reached
