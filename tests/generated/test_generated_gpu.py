"""Facts of a generated package that only a GPU shows: compilation, allocation and waits."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GENERATED = Path(__file__).parents[2] / "generated"
S_KV, TOPK = 4096, 512


def imported(name: str) -> ModuleType:
    sys.path.insert(0, str(GENERATED))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(GENERATED))


@pytest.fixture(scope="module")
def dsv32() -> ModuleType:
    return imported("dsv32")


def call(tokens: int, heads: int, topk: int, column: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q that begins `column` columns into wider rows, kv and indices, some of them invalid."""
    q = torch.randn(tokens, heads, 600, dtype=torch.bfloat16, device="cuda")[:, :, column : column + 576]
    kv = torch.randn(S_KV, 1, 576, dtype=torch.bfloat16, device="cuda")
    indices = torch.randint(-9, S_KV + 9, (tokens, 1, topk), dtype=torch.int32, device="cuda")
    return q, kv, indices


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda")], ids=str)
def test_a_gpu_is_named_as_in_torch(dsv32: ModuleType, device: torch.device | str | int) -> None:
    found = torch.device("cuda", torch.cuda.current_device())
    assert dsv32._launch.gpu_of(device) == found
    assert dsv32.workspace_size(device, 4, 16, TOPK) == dsv32.workspace_size(found, 4, 16, TOPK)
    assert isinstance(device, int) or dsv32.supports(device) == dsv32.supports(found)


def test_no_call_after_warmup_compiles(dsv32: ModuleType) -> None:
    dsv32.warmup()
    compiled = dsv32._launch._COMPILED
    known = set(compiled)
    heads, tokens, topks, columns = (1, 12, 16, 32, 48, 128), (1, 17, 70, 300, 520), (17, TOPK), (0, 1, 8)
    for h, t, topk, column in itertools.product(heads, tokens, topks, columns):
        q, kv, indices = call(t, h, topk, column)
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
    with dsv32._launch.recording(), ThreadPoolExecutor(1) as other:
        out = other.submit(dsv32.triton_mla_sparse_attention, q, kv, indices, 0.04, 2).result()
    expected = dsv32.triton_mla_sparse_attention(q, kv, indices, 0.04, 2)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("tokens", "s_kv", "lengths"), [(17, S_KV, False), (11, 70_000, True), (6, 140_000, False)])
def test_a_list_has_each_row_once_in_order_and_flags_repeats(
    dsv32: ModuleType, tokens: int, s_kv: int, lengths: bool
) -> None:
    lists_of = importlib.import_module(f"{dsv32.__name__}._index_union_sm90")
    group = lists_of.GROUP.value
    indices = torch.rand(tokens, s_kv, device="cuda").topk(TOPK, dim=1).indices.int()
    indices[:, ::9] = torch.tensor([-1, s_kv, 2**31 - 1, -(2**31)], device="cuda")[torch.arange(TOPK)[::9] % 4].int()
    indices[2, 5] = indices[2, 6]  # a repeat, in the first group alone
    length = torch.randint(-2, TOPK + 9, (tokens,), dtype=torch.int32, device="cuda") if lengths else None
    if length is not None:
        length[2] = TOPK
    groups = -(-tokens // group)
    found = torch.full((groups * (group * TOPK + 2),), -1, dtype=torch.int32, device="cuda")
    recompute, counts, lists = found[:groups], found[groups : 2 * groups], found[2 * groups :].view(groups, -1)
    call = SimpleNamespace(
        indices=indices,
        topk_length=length,
        union=lists,
        union_length=counts,
        recompute=recompute,
        tokens=tokens,
        topk=TOPK,
        s_kv=s_kv,
        indices_token_stride=TOPK,
    )
    dsv32._launch.launch(lists_of._index_union_kernel, groups, call, (), 8, 1)
    assert recompute.tolist() == [1] + [0] * (groups - 1)
    assert counts[0] == 0
    for number in range(1, groups):
        named: dict[int, int] = {}
        for token in range(number * group, min(tokens, number * group + group)):
            most = TOPK if length is None else int(length[token].clamp(0, TOPK))
            for row in indices[token, :most].tolist():
                if 0 <= row < s_kv:
                    named[row] = named.get(row, 0) | 1 << token % group
        entries = lists[number, : counts[number]].tolist()
        assert [(entry & (1 << 28) - 1, entry >> 28 & 15) for entry in entries] == sorted(named.items())


def replayed(work: Callable[[], object]) -> None:
    """Runs `work` as a graph, which holds its launches as they follow each other."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()


@pytest.mark.parametrize("run", [lambda work: work(), replayed], ids=["launched", "replayed"])
@pytest.mark.parametrize("tokens", [1, 128, 20_000])
def test_kernels_of_caches_read_the_results_of_earlier_kernels(
    run: Callable[[Callable[[], object]], None], tokens: int
) -> None:
    """Writers and gathers take turns at the same slots: none may load or store before the one before it ends."""
    package = imported("dsv32_fp8")
    turns, block = 24, 64
    blocks = -(-tokens // block)
    rows = torch.randn(turns, tokens, 576, dtype=torch.bfloat16, device="cuda")
    table = torch.randperm(blocks, dtype=torch.int32, device="cuda")[None]
    slots = (table[0].long()[:, None] * block + torch.arange(block, device="cuda")).flatten()[:tokens]
    cache = torch.zeros(blocks, block, 656, dtype=torch.uint8, device="cuda")
    ends = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    requests = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    found = torch.zeros_like(rows)

    def turn(number: int) -> None:
        row = rows[number]
        package.concat_and_cache_mla(row[:, :512], row[:, 512:], cache, slots, "fp8_ds_mla")
        package.gather_and_maybe_dequant_cache(cache, found[number], table, ends, requests, tokens, "fp8_ds_mla")

    for number in range(turns):
        turn(number)
        torch.cuda.synchronize()
    expected = found.clone()
    found.zero_()
    torch.cuda.synchronize()
    run(lambda: [turn(number) for number in range(turns)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("run", [lambda work: work(), replayed], ids=["launched", "replayed"])
def test_indices_are_mapped_again_and_again_in_order(run: Callable[[Callable[[], object]], None]) -> None:
    package = imported("dsv32_fp8")
    tokens, block, blocks = 16, 64, 128
    table = torch.randperm(blocks, dtype=torch.int32, device="cuda")[None]
    requests = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    indices = torch.randint(0, block * blocks, (tokens, 2048), dtype=torch.int32, device="cuda")
    package.triton_convert_req_index_to_global_index(requests, table, indices)  # compiles
    expected, last = indices, torch.empty_like(indices)
    for _ in range(24):
        expected = table[0][(expected // block).long()] * block + expected % block

    def work() -> None:
        found = indices
        for _ in range(24):
            found = package.triton_convert_req_index_to_global_index(requests, table, found)
        last.copy_(found)

    run(work)
    assert torch.equal(last, expected)
