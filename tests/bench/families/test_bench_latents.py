"""Measured calls of latents: shapes, and the checks of their results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.bench.families.latents import (
    CONTEXT,
    EPS,
    KINDS,
    latents_call,
    latents_error,
    latents_shapes,
    make_latents_inputs,
)
from mlagen.bench.peers.latents import latents_peers
from mlagen.bench.shapes import Batch
from mlagen.layout.codec import write
from mlagen.spec.stored import NAMED_LAYOUTS
from mlagen.verify.latents.reference import Groups, pooled
from mlagen.verify.latents.side import INSERT, POOL, side_of
from mlagen.verify.paged.rope import rotate
from mlagen.work import insert_bytes, latents_bytes

DIMS = {"num_heads": 4, "kv_lora_rank": 448, "qk_rope_head_dim": 64, "rope": "gptj", "v_head_dim": 512, "dtype": "bf16"}
SPEC: dict[str, Any] = {
    "model": DIMS,
    "attention": None,
    "wrappers": (POOL, INSERT),
    "cache": {"layout": NAMED_LAYOUTS["mxfp8_v41"], "block_size": 16, "scale_rule": None},
}
PACKAGE: Any = SimpleNamespace(dtype=torch.bfloat16, spec=SPEC, has=lambda name: name in SPEC["wrappers"])
SIDE = side_of(SPEC)


def inputs_of(kind: str, tokens: int) -> Any:
    assert SIDE is not None
    return make_latents_inputs(Batch("latents", kind, tokens, 1), PACKAGE, SIDE, torch.device("cpu"), 2)[1]


def test_each_call_is_measured_at_batches_of_one_request() -> None:
    shapes = latents_shapes(PACKAGE, None)
    assert {shape.kind for shape in shapes} == set(KINDS)
    assert {(shape.tokens, shape.requests) for shape in shapes} == {(tokens, 1) for tokens in (1, 128, 4096, 32768)}


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("tokens", [1, 48])
def test_latents_are_checked_where_groups_end(ratio: int, tokens: int) -> None:
    kind = f"{POOL} of {ratio}"
    inputs = inputs_of(kind, tokens)
    assert inputs.positions[-1] == CONTEXT - 1

    def run(
        values: Any, positions: Any, states: Any, slots: Any, starts: Any, requests: Any, weight: Any, eps: float,
        size: int, latents: Any,
    ) -> None:  # fmt: skip
        assert (eps, size, states is None) == (EPS, ratio, ratio == 1)
        ring = [] if states is None else [starts.tolist(), requests.tolist()]
        groups = Groups(values, positions.tolist(), slots.tolist(), size, states, *(ring or ([], [])))
        ends, found, _ = pooled(groups, weight, eps)
        latents[ends] = found.bfloat16()

    assert latents_error(PACKAGE, KINDS[kind], inputs, latents_call(run, PACKAGE, KINDS[kind], inputs)) < 0.004
    assert not latents_error(PACKAGE, KINDS[kind], inputs, lambda: None) <= 0.004


@pytest.mark.parametrize("ratio", [1, 2])
def test_rows_are_checked_by_what_is_read_back(ratio: int) -> None:
    kind = f"{INSERT} of {ratio}"
    inputs = inputs_of(kind, 48)
    assert int((inputs.slots >= 0).sum()) == 48 // ratio

    def run(latents: Any, positions: Any, angles: Any, cache: Any, slots: Any, size: int) -> None:
        assert SIDE is not None
        ends = slots >= 0
        rows = rotate(SIDE, latents[ends].float(), angles[positions[ends] // size * size])
        write(SIDE.layout, inputs.cache, 16, slots[ends], rows.bfloat16())

    assert latents_error(PACKAGE, KINDS[kind], inputs, latents_call(run, PACKAGE, KINDS[kind], inputs)) < 1
    assert not latents_error(PACKAGE, KINDS[kind], inputs, lambda: None) <= 1


def test_the_peer_knows_v41s_layouts() -> None:
    for kind in KINDS:
        (peer,) = latents_peers(PACKAGE, Batch("latents", kind, 1, 1), ())
        assert peer.unsupported is None


def test_bytes_are_those_of_groups_and_rows() -> None:
    assert latents_bytes(8, 4, 2, 512, 8) == 4 * (2 * 4096 + 1024) + 2 * 8 * 4096 + 8 * 20
    assert latents_bytes(8, 8, 1, 512, 0) == 8 * (2048 + 1024) + 8 * 20
    assert insert_bytes(8, 4, 512, 288, 256) == 4 * (1024 + 288 + 256) + 8 * 16
