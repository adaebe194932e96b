"""What only a GPU shows of a generated package: what is compiled, allocated and waited for."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GENERATED = Path(__file__).parents[2] / "generated"
S_KV, TOPK = 4096, 512


@pytest.fixture(scope="module")
def dsv32() -> ModuleType:
    sys.path.insert(0, str(GENERATED))
    try:
        return importlib.import_module("dsv32")
    finally:
        sys.path.remove(str(GENERATED))


def call(tokens: int, heads: int, topk: int, lane: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q that begins `lane` lanes into wider rows, kv and indices, some of them invalid."""
    q = torch.randn(tokens, heads, 600, dtype=torch.bfloat16, device="cuda")[:, :, lane : lane + 576]
    kv = torch.randn(S_KV, 1, 576, dtype=torch.bfloat16, device="cuda")
    indices = torch.randint(-9, S_KV + 9, (tokens, 1, topk), dtype=torch.int32, device="cuda")
    return q, kv, indices


def test_no_call_after_warmup_compiles(dsv32: ModuleType) -> None:
    dsv32.warmup()
    compiled = dsv32._launch._COMPILED
    known = set(compiled)
    heads, tokens, topks, lanes = (1, 12, 16, 32, 48, 128), (1, 17, 70, 300), (17, TOPK), (0, 1, 8)
    for h, t, topk, lane in itertools.product(heads, tokens, topks, lanes):
        q, kv, indices = call(t, h, topk, lane)
        length = torch.full((t,), topk - 3, dtype=torch.int32, device="cuda")
        sink = torch.zeros(h, device="cuda")
        for given, invariant in itertools.product(({}, {"topk_length": length}, {"attn_sink": sink}), (False, True)):
            dsv32.flash_mla_sparse_fwd(q, kv, indices, 0.04, **given, enable_batch_invariant=invariant)
        for splits, lse in itertools.product((None, 1, 3), (None, torch.empty(t, h, device="cuda"))):
            dsv32.triton_mla_sparse_attention(q, kv, indices, 0.04, splits, lse=lse)
    torch.cuda.synchronize()
    assert set(compiled) == known


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("splits", [1, 4])
def test_a_call_with_buffers_neither_allocates_nor_waits(dsv32: ModuleType, splits: int) -> None:
    q, kv, indices = call(4, 128, TOPK)
    out = torch.empty(4, 128, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(4, 128, device="cuda")
    floats = dsv32.workspace_size(q.device, 4, 128, TOPK, splits)
    workspace = torch.empty(max(1, floats), device="cuda")
    buffers = {"out": out, "lse": lse, "workspace": workspace}
    dsv32.triton_mla_sparse_attention(q, kv, indices, 0.04, splits, **buffers)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert dsv32.triton_mla_sparse_attention(q, kv, indices, 0.04, splits, **buffers) is out
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_another_thread_launches_while_one_warms_up(dsv32: ModuleType) -> None:
    from concurrent.futures import ThreadPoolExecutor

    q, kv, indices = call(3, 20, 48)
    with dsv32._launch.compiling(), ThreadPoolExecutor(1) as other:
        out = other.submit(dsv32.triton_mla_sparse_attention, q, kv, indices, 0.04, 2).result()
    expected = dsv32.triton_mla_sparse_attention(q, kv, indices, 0.04, 2)
    assert torch.equal(out, expected)
