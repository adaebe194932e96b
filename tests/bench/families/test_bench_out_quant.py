"""Measured calls of the output's quantisation: shapes, and the checks of their results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.bench.families.out_quant import (
    KINDS,
    POSITIONS,
    make_out_quant_inputs,
    out_quant_call,
    out_quant_error,
    out_quant_shapes,
)
from mlagen.bench.peers.out_quant import out_quant_peers
from mlagen.bench.shapes import Batch
from mlagen.verify.checks.out_quant import quantised
from mlagen.verify.out_quant.side import WRAPPER, side_of
from mlagen.verify.paged.rope import rotate
from mlagen.work import out_quant_bytes

DIMS = {
    "num_heads": 16,
    "kv_lora_rank": 448,
    "qk_rope_head_dim": 64,
    "rope": "gptj",
    "v_head_dim": 512,
    "dtype": "bf16",
}
SPEC: dict[str, Any] = {"model": DIMS, "attention": None, "cache": None, "wrappers": (WRAPPER,)}
PACKAGE: Any = SimpleNamespace(dtype=torch.bfloat16, spec=SPEC, has=lambda name: name in SPEC["wrappers"])
SIDE: Any = side_of(SPEC)


def test_each_kind_is_measured_at_batches_of_one_request() -> None:
    shapes = out_quant_shapes(PACKAGE, None)
    assert {shape.kind for shape in shapes} == set(KINDS)
    assert {(shape.tokens, shape.requests) for shape in shapes} == {(tokens, 1) for tokens in (1, 128, 4096, 32768)}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
def test_results_are_checked_by_what_they_stand_for(tokens: int, packed: bool) -> None:
    inputs = make_out_quant_inputs(tokens, SIDE, torch.device("cpu"), 2)[1]
    assert inputs.positions[-1] == POSITIONS - 1

    def run(o: Any, positions: Any, angles: Any, groups: int, width: int, *, tma_aligned_scales: bool, turn: int = -1):  # type: ignore[no-untyped-def]
        assert (groups, width, tma_aligned_scales) == (2, 8, packed)
        back = angles[positions][:, None].clone()
        back[..., 32:] *= turn
        return quantised(rotate(SIDE, o.float(), back), width, packed)

    def wrong(*given: Any, **named: Any) -> Any:
        return run(*given, **named, turn=1)

    assert out_quant_error(SIDE, packed, inputs, out_quant_call(run, packed, inputs)) < 1
    assert out_quant_error(SIDE, packed, inputs, out_quant_call(wrong, packed, inputs)) > 1


def test_the_peer_knows_v4s_heads() -> None:
    (peer,) = out_quant_peers(PACKAGE, Batch("out_quant", WRAPPER, 1, 1), ())
    assert peer.unsupported is None


def test_bytes_are_those_of_rows_scales_and_angles() -> None:
    assert out_quant_bytes(3, 16, 512, 256, 4) == 3 * (16 * (3 * 512 + 16) + 256 + 8)
