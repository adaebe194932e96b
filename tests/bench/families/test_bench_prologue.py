"""Trials of prologues, on the CPU, against the reference in a package's place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.bench.families.prologue import (
    EPS,
    PrologueInputs,
    Rows,
    concat_call,
    make_prologue_inputs,
    padded_call,
    prologue_error,
    prologue_shapes,
)
from mlagen.bench.shapes import Batch
from mlagen.layout.codec import write
from mlagen.spec.stored import NAMED_LAYOUTS
from mlagen.verify.prologue.reference import normalise, turned_queries, turned_rows
from mlagen.verify.prologue.side import CONCAT, PADDED, side_of
from mlagen.work import prologue_bytes, write_bytes

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
    "wrappers": (PADDED, CONCAT),
    "cache": {"layout": NAMED_LAYOUTS["ue8m0_v4"], "block_size": 16, "scale_rule": None},
}


@pytest.fixture
def rows() -> Rows:
    side = side_of(SPEC)
    assert side is not None
    package: Any = SimpleNamespace(dtype=torch.bfloat16, spec=SPEC, has=lambda name: name in SPEC["wrappers"])
    return Rows(package, side, 16)


def inputs_of(rows: Rows, kind: str) -> PrologueInputs:
    return make_prologue_inputs(Batch("prologue", kind, 48, 1), rows, 4, torch.device("cpu"), 2)[1]


def test_each_wrapper_is_measured_at_batches_of_one_request(rows: Rows) -> None:
    shapes = prologue_shapes(rows.package, None)
    assert {(shape.kind, shape.requests) for shape in shapes} == {(PADDED, 1), (CONCAT, 1)}
    assert {shape.tokens for shape in shapes} == {1, 128, 4096, 32768}


def test_whole_heads_are_checked_by_q_and_by_what_is_read_back(rows: Rows) -> None:
    inputs = inputs_of(rows, PADDED)

    def run(
        q: Any, kv: Any, cache: Any, slots: Any, positions: Any, angles: Any, heads: int, eps: float, *_: Any
    ) -> Any:
        assert (heads, eps, len(angles)) == (4, EPS, 8192)
        turned, _ = turned_queries(rows.side, normalise(q.double(), None, eps), angles, positions)
        row, _ = turned_rows(rows.side, kv, angles, positions, None, eps)
        write(rows.side.layout, cache, 16, slots, row)
        return turned.to(q.dtype)

    assert prologue_error(rows, PADDED, inputs, padded_call(run, rows, inputs)) < 1
    assert not prologue_error(rows, PADDED, inputs, lambda: inputs.q) <= 1
    call = padded_call(run, rows, inputs)
    assert not prologue_error(rows, PADDED, inputs, lambda: call().flip(0)) <= 1


def test_rope_columns_are_put_back_after_the_check(rows: Rows) -> None:
    inputs = inputs_of(rows, CONCAT)
    before = inputs.q.clone()

    def run(
        positions: Any, q: Any, k_pe: Any, kv_c: Any, angles: Any, neox: bool, slots: Any, cache: Any, *_: Any
    ) -> None:
        assert not neox
        row, _ = turned_rows(rows.side, torch.cat([kv_c, k_pe], 1), angles, positions, None, EPS)
        write(rows.side.layout, inputs.cache, 16, slots, row)
        q.copy_(turned_queries(rows.side, q.float(), angles, positions)[0])
        k_pe.copy_(row[:, 448:])

    assert prologue_error(rows, CONCAT, inputs, concat_call(run, rows, inputs, "auto")) < 1
    assert torch.equal(inputs.q, before)


def test_bytes_are_those_of_a_writer_and_of_q_twice() -> None:
    assert prologue_bytes(3, 4, 512, 512, 584, 256) == write_bytes(3, 512, 584) + 3 * (2 * 4 * 512 * 2 + 8 + 256)
