"""Trials of pools of keys, on the CPU, against the reference in a package's place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.bench.families.kpool import (
    CONTEXT,
    KINDS,
    kpool_call,
    kpool_error,
    kpool_shapes,
    make_kpool_inputs,
    moved_bytes,
    pools_of,
)
from mlagen.bench.peers.kpool import kpool_peers
from mlagen.bench.shapes import Batch
from mlagen.layout.codec import encode, write
from mlagen.spec.stored import INDEXER_LAYOUTS
from mlagen.verify.kpool.reference import Step, expanded, pooled, seeded_tail, transformed
from mlagen.verify.kpool.side import COMPRESS, EXPAND, QUERY, SEED, UPDATE

MODEL = {"num_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 0, "v_head_dim": 64, "dtype": "bf16"}
SPEC: dict[str, Any] = {
    "model": MODEL,
    "attention": None,
    "wrappers": KINDS,
    "cache": None,
    "indexer": {"num_heads": 3, "head_dim": 128, "topk": 24, "rope_head_dim": 0, "compress_ratio": 4},
    "indexer_cache": {"layout": INDEXER_LAYOUTS["indexer_fp8"], "block_size": 16, "scale_rule": None},
}
PACKAGE: Any = SimpleNamespace(dtype=torch.bfloat16, spec=SPEC, has=lambda name: name in KINDS)
POOLS = pools_of(PACKAGE)


def compress(kv_cache: Any, slot_k: Any, slot_score: Any, ape: Any, loc: Any, pool_size: int) -> None:
    rows = [pooled(k, score, ape, torch.bfloat16).row for k, score in zip(slot_k, slot_score, strict=True)]
    write(POOLS.layout, kv_cache, 16, loc, torch.stack(rows))


def update(kv_cache: Any, tail_kv_cache: Any, pool_size: int, **given: Any) -> None:
    integers = [given[name].tolist() for name in ("tail_slot_mapping", "slot_mapping", "positions")]
    step = Step(given["key"], given["slot_score"], given["ape"], *integers)
    for slot, key in step.run(tail_kv_cache, 2**31):
        write(POOLS.layout, kv_cache, 16, torch.tensor([slot]), key.row[None])


def quantise(q: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert POOLS.side is not None
    values, scales = encode(POOLS.side.query, transformed(q, torch.bfloat16))
    return values.view(torch.float8_e4m3fn), scales.view(torch.float32)


RIGHT: dict[str, Any] = {
    QUERY: quantise,
    COMPRESS: compress,
    SEED: lambda tail_kv_cache, key, gate_score, tslot, kpool: seeded_tail(
        tail_kv_cache, key, gate_score, tslot.tolist(), kpool
    ),
    UPDATE: update,
    EXPAND: lambda pool_ids, seq_lens, pool_size: expanded(pool_ids, seq_lens, pool_size),
}


def test_each_call_is_measured() -> None:
    shapes = kpool_shapes(PACKAGE, None)
    assert {shape.kind for shape in shapes} == set(KINDS)
    assert max(shape.tokens for shape in shapes if shape.kind == UPDATE) == 4096


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 37])
def test_results_are_checked_by_what_is_read_back(kind: str, tokens: int) -> None:
    batch = Batch("kpool", kind, tokens, 1)
    inputs = make_kpool_inputs(batch, POOLS, torch.device("cpu"), 2)[1]
    limit = 0.0 if kind in (SEED, EXPAND) else 1.0
    assert kpool_error(batch, POOLS, inputs, kpool_call(RIGHT[kind], inputs)) <= limit
    given = inputs.arguments
    wrong: dict[str, Any] = {
        QUERY: lambda: quantise(given["q"].neg()),
        EXPAND: lambda: expanded(given["pool_ids"], given["seq_lens"] - 1, given["pool_size"]),
    }
    assert not kpool_error(batch, POOLS, inputs, wrong.get(kind, lambda: None)) <= limit


def test_the_peer_knows_vllms_layout() -> None:
    for kind in KINDS:
        (peer,) = kpool_peers(PACKAGE, Batch("kpool", kind, 1, 1), ())
        assert peer.unsupported is None


def test_bytes_are_those_of_tokens_keys_and_indices() -> None:
    def moved(kind: str) -> int:
        return moved_bytes(Batch("kpool", kind, 8, 1), POOLS)

    assert moved(QUERY) == 8 * 3 * (256 + 132)
    assert moved(COMPRESS) == 2 * (4 * 2 * 256 + 132 + 8) + 4 * 512
    assert moved(UPDATE) == 8 * (4 * 2 * 256 + 132 + 8) + 4 * 512 + 8 * (1024 + 8)
    assert moved(SEED) == 4 * (1024 + 8) + 8 * 8
    assert moved(EXPAND) == 8 * (6 + 28) * 4
    assert CONTEXT % 4 == 0
