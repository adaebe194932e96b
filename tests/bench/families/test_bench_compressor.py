"""Trials of the compressor, on the CPU, against the reference in a package's place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.bench.families.compressor import (
    CONTEXT,
    EPS,
    KINDS,
    Rows,
    compress_call,
    compressor_error,
    compressor_shapes,
    make_compressor_inputs,
    rows_in,
    save_call,
)
from mlagen.bench.peers.compressor import compressor_peers
from mlagen.bench.shapes import Batch
from mlagen.layout.codec import write
from mlagen.spec.stored import NAMED_LAYOUTS
from mlagen.verify.compressor.reference import Windows, compressed
from mlagen.verify.compressor.side import COMPRESS, SAVE
from mlagen.work import compress_bytes, states_bytes

SPEC: dict[str, Any] = {
    "model": {
        "num_heads": 4,
        "kv_lora_rank": 448,
        "qk_rope_head_dim": 64,
        "rope": "gptj",
        "v_head_dim": 512,
        "dtype": "bf16",
    },
    "attention": None,
    "wrappers": (SAVE, COMPRESS),
    "cache": {"layout": NAMED_LAYOUTS["ue8m0_v4"], "block_size": 16, "scale_rule": None},
}
PACKAGE: Any = SimpleNamespace(dtype=torch.bfloat16, spec=SPEC, has=lambda name: name in SPEC["wrappers"])
OF_4, OF_128, SAVED = f"{COMPRESS} of 4", f"{COMPRESS} of 128", f"{SAVE} of 4"


def rows_of(kind: str) -> Rows:
    rows = rows_in(PACKAGE, KINDS[kind])
    assert rows is not None
    return rows


def test_each_call_is_measured_at_batches_of_one_request() -> None:
    shapes = compressor_shapes(PACKAGE, None)
    assert {shape.kind for shape in shapes} == {OF_4, OF_128, SAVED}  # the spec has no keys
    assert {(shape.tokens, shape.requests) for shape in shapes} == {(tokens, 1) for tokens in (1, 128, 4096, 32768)}


@pytest.mark.parametrize(("kind", "tokens"), [(OF_4, 1), (OF_4, 48), (OF_128, 130)])
def test_rows_are_checked_by_what_is_read_back(kind: str, tokens: int) -> None:
    rows = rows_of(kind)
    inputs = make_compressor_inputs(Batch("compressor", kind, tokens, 1), rows, torch.device("cpu"), 2)[1]
    assert int((inputs.slots >= 0).sum()) == rows.made(tokens) == -(-tokens // KINDS[kind].ratio)
    assert inputs.positions[-1] == CONTEXT - 1

    def run(
        states: Any, count: int, requests: Any, positions: Any, state_slots: Any, table: Any, block: int, width: int,
        angles: Any, cache: Any, metadata: Any, pdl: Any, columns: int, rope: int, ratio: int, overlap: bool,
        packed: bool, weight: Any, eps: float, *sizes: int,
    ) -> None:  # fmt: skip
        assert (count, block, width, pdl) == (tokens, states.shape[1], states.shape[2] // 2, {})
        assert (columns, rope, packed, eps, sizes) == (512, 64, False, EPS, (64, 576, 8))
        each = (requests, positions, state_slots, metadata.slot_mapping)
        windows = Windows(states, table, *(one.tolist() for one in each), ratio=ratio, overlap=overlap)
        found, slots = compressed(rows.side, windows, angles, weight, eps, 2**31)
        write(rows.side.layout, inputs.cache, 16, slots, found.bfloat16())

    call = compress_call(run, rows, inputs, 64, 576, 8, metadata=True)
    assert compressor_error(rows, inputs, call) < 1
    assert not compressor_error(rows, inputs, lambda: None) <= 1


def test_states_are_checked_float_by_float() -> None:
    rows = rows_of(SAVED)
    inputs = make_compressor_inputs(Batch("compressor", SAVED, 48, 1), rows, torch.device("cpu"), 2)[0]

    def run(kv: Any, scores: Any, ape: Any, positions: Any, states: Any, slots: Any, block: int, *_: Any) -> None:
        states.view(-1, states.shape[2])[slots] = torch.cat([kv, scores + ape[positions % 4]], 1)

    assert compressor_error(rows, inputs, save_call(run, rows, inputs)) == 0
    assert compressor_error(rows, inputs, lambda: None) == 1


def test_the_peer_knows_v4s_layouts() -> None:
    for kind in (OF_4, SAVED):
        (peer,) = compressor_peers(PACKAGE, Batch("compressor", kind, 1, 1), ())
        assert peer.unsupported is None


def test_bytes_are_those_of_windows_and_rows() -> None:
    assert states_bytes(3, 1024) == 3 * (2 * 1024 * 4 * 2 + 16)
    assert compress_bytes(8, 2, 8, 512, 584, 256) == 2 * (8 * 512 * 8 + 584 + 256) + 8 * 28
