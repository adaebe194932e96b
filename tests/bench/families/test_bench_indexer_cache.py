"""Trials of the functions around the indexer's keys, on the CPU, against the reference in a package's place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.bench.families.indexer_cache import (
    KINDS,
    KeyInputs,
    Keys,
    gather_call,
    gathered_error,
    indexer_cache_shapes,
    keys_query_call,
    keys_query_error,
    make_key_inputs,
    query_call,
    query_error,
    write_call,
    written_error,
    written_limit,
)
from mlagen.bench.shapes import Batch
from mlagen.layout import indexer_layout_of
from mlagen.layout.codec import write
from mlagen.spec.stored import INDEXER_LAYOUTS
from mlagen.verify.indexer_cache.reference import normalised_keys, quantise_query
from mlagen.verify.indexer_cache.side import GATHER, KEYS_QUERY, QUERY, WRITE, side_of
from mlagen.work import keys_bytes, normalise_bytes, query_bytes, write_bytes

CPU = torch.device("cpu")
SPEC: dict[str, Any] = {
    "model": {"num_heads": 8, "kv_lora_rank": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "dtype": "bf16"},
    "attention": None,
    "wrappers": KINDS,
    "indexer": {
        "num_heads": 4,
        "head_dim": 128,
        "rope_head_dim": 64,
        "rope": "gptj",
        "rope_at": "last",
        "compress_ratio": 1,
        "q_scale_rule": None,
    },
    "indexer_cache": {"layout": INDEXER_LAYOUTS["indexer_fp8"], "block_size": 16, "scale_rule": None},
}


@pytest.fixture
def keys() -> Keys:
    side = side_of(SPEC)
    assert side is not None
    package: Any = SimpleNamespace(dtype=torch.bfloat16, spec=SPEC, has=lambda name: name in KINDS)
    return Keys(package, side, 16)


def inputs_of(keys: Keys, kind: str) -> KeyInputs:
    return make_key_inputs(Batch("indexer_cache", kind, 48, 2), keys, CPU, 2)[1]


def test_each_wrapper_is_measured_at_every_batch(keys: Keys) -> None:
    shapes = indexer_cache_shapes(keys.package, None)
    assert {shape.kind for shape in shapes} == {*KINDS}
    assert len(shapes) == 5 * len(KINDS)


def test_a_writer_is_checked_by_what_is_read_back(keys: Keys) -> None:
    inputs = inputs_of(keys, WRITE)
    layout = indexer_layout_of(SPEC)
    assert layout is not None

    def right(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, tile: int, rounding: str) -> None:
        assert (tile, rounding, cache.shape[1:]) == (128, "ue8m0", (16, 132))
        write(layout, cache, 16, slots, k)

    def wrong(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *rest: object) -> None:
        write(layout, cache, 16, slots, k.flip(0))

    limit = written_limit(keys, inputs.k)
    assert 0 < written_error(keys, inputs, False, write_call(right, keys, inputs)) <= limit
    assert not written_error(keys, inputs, False, write_call(wrong, keys, inputs)) <= limit


def test_keys_and_the_query_are_checked_together(keys: Keys) -> None:
    inputs = inputs_of(keys, KEYS_QUERY)

    def right(q: torch.Tensor, q_out: torch.Tensor, weights: torch.Tensor, *rest: Any, compress_ratio: int) -> None:
        _, k, cache, slots, norm, bias, positions, cos, sin, eps, *_ = rest
        table = torch.cat([cos, sin], 1)
        rows, _ = normalised_keys(keys.side, k, positions, table, norm, eps, compress_ratio, bias)
        write(keys.layout, cache.as_strided((cache.shape[0], 16 * 132), (cache.stride(0), 1)), 16, slots, rows)
        q_out.copy_(quantise_query(keys.side, q, positions, table, weights, 1.0, 1.0)[0])

    assert keys_query_error(keys, inputs, keys_query_call(right, keys, inputs)) <= 1

    def same(q: torch.Tensor, *rest: Any, **named: Any) -> None:
        right(q.flip(0), *rest, **named)

    assert not keys_query_error(keys, inputs, keys_query_call(same, keys, inputs)) <= 1
    inputs.cache.zero_()
    assert not keys_query_error(keys, inputs, lambda: None) <= 1


def test_a_gather_is_checked_byte_by_byte(keys: Keys) -> None:
    inputs = inputs_of(keys, GATHER)

    def copied(cache: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, *rest: object) -> None:
        pages = cache.as_strided((cache.shape[0], 16 * 132), (cache.stride(0), 1))
        page, place = inputs.slots // 16, inputs.slots % 16
        values.copy_(pages[:, : 16 * 128].view(-1, 16, 128)[page, place])
        scales.copy_(pages[:, 16 * 128 :].view(-1, 16, 4)[page, place])

    def nothing(*rest: object) -> None:
        """A gather that writes nothing."""

    assert gathered_error(keys, inputs, gather_call(copied, keys, inputs)) == 0
    assert gathered_error(keys, inputs, gather_call(nothing, keys, inputs)) > 0.5


def test_a_query_is_checked_byte_by_byte(keys: Keys) -> None:
    inputs = inputs_of(keys, QUERY)

    def right(
        positions: torch.Tensor, q: torch.Tensor, angles: torch.Tensor, weights: torch.Tensor, *scales: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, _, scaled = quantise_query(keys.side, q, positions, angles, weights, *scales[:2])
        return values, scaled

    def late(positions: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return right(positions + 1, *rest)

    assert query_error(keys, inputs, query_call(right, keys, inputs)) == 0
    assert query_error(keys, inputs, query_call(late, keys, inputs)) > 0.1


def test_bytes_are_those_that_a_call_must_move() -> None:
    assert keys_bytes(100, 132, 3, 2) == 2 * 100 * 132 + 4 * 6
    assert query_bytes(10, 64, 128, 64, 128) == 10 * (64 * (256 + 128 + 8) + 8 + 256)
    assert normalise_bytes(10, 128, 64, 132) == write_bytes(10, 128, 132) + 10 * (8 + 256)
