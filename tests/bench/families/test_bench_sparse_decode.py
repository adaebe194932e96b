"""Trials of attention over a cache, on small pools; the kernel is plain torch over decoded rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_packages import MakePackage

from mlagen.bench.check import error_limit
from mlagen.bench.families import sparse_decode
from mlagen.bench.families.cache import sides_of
from mlagen.bench.families.sparse_decode import (
    OURS_E4M3,
    Pool,
    SparseDecodeInputs,
    SparseDecodeShape,
    call_of,
    contexts_needed,
    sparse_decode_shapes,
    sparse_decode_trials,
)
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.sparse_decode import PEERS, named_rows, pad_indices
from mlagen.bench.roofline import Roof
from mlagen.bench.shapes import TENSOR_SCALE
from mlagen.bench.trial import BATCH_INVARIANT, OURS, Setting
from mlagen.layout.codec import read

CPU = torch.device("cpu")


class Attention:
    """`flash_mla_with_kvcache` in plain torch. Its logits are wrong by a factor `scale`."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.package: BenchPackage | None = None

    def rows(self, number: int, cache: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        assert self.package is not None
        layout = self.package.layouts[number]
        assert layout is not None
        pages = cache.view(torch.uint8).as_strided(
            (cache.shape[0], layout.page_bytes(cache.shape[1])), (layout.page_bytes(cache.shape[1]), 1)
        )
        return read(layout, pages, cache.shape[1], indices.flatten(), TENSOR_SCALE).view(*indices.shape, -1)

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: None,
        cache_seqlens: None,
        head_dim_v: int,
        tile_scheduler_metadata: object,
        *,
        softmax_scale: float,
        is_fp8_kvcache: bool,
        indices: torch.Tensor,
        enable_batch_invariant: bool,
        extra_k_cache: torch.Tensor | None = None,
        extra_indices_in_kvcache: torch.Tensor | None = None,
        **scales: Any,
    ) -> tuple[torch.Tensor, None]:
        kv = self.rows(0, k_cache, indices)
        if extra_k_cache is not None and extra_indices_in_kvcache is not None:
            kv = torch.cat([kv, self.rows(1, extra_k_cache, extra_indices_in_kvcache)], 2)
        kv = kv.bfloat16().float()
        softmax_scale *= float(scales.get("q_scale", 1.0))
        logits = torch.einsum("bshd,bskd->bshk", q.float(), kv) * softmax_scale * self.scale
        return torch.einsum("bshk,bskd->bshd", logits.softmax(3), kv[..., :head_dim_v]).bfloat16(), None


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of few tokens."""
    monkeypatch.setattr(sparse_decode, "CONTEXT", 256)
    monkeypatch.setattr(sparse_decode, "WINDOW_CONTEXT", 80)
    monkeypatch.setattr(sparse_decode, "BATCHES", (1, 3))


CACHES = {
    "fp8_ds_mla": (None, (512, 64, 512)),
    "bf16": (None, (512, 64, 512)),
    "ue8m0_v4": ("ue8m0_v4", (448, 64, 512)),
    "mxfp8_v41": ("nvfp4_v41", (448, 64, 512)),
    "fp8_per_tensor": (None, (512, 64, 512)),
}


def package_of(make: MakePackage, layout: str, scale: float = 1.0, **attention: object) -> BenchPackage:
    function = Attention(scale)
    extra, dims = CACHES[layout]
    options = {"topk": 64, **({"window": 32} if extra else {}), **attention}
    package = make({"flash_mla_with_kvcache": function}, layout, extra, dims=dims, **options)
    vars(package.root)["get_mla_metadata"] = lambda: (object(), None)
    function.package = package
    return package


class CpuSetting(Setting):
    """A setting that measures no roof."""

    roof = Roof(1.0, 1.0, "none")  # type: ignore[assignment]


def setting_of(package: BenchPackage) -> Setting:
    return CpuSetting(package, CPU, 1 << 10)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("scale", [1.0, 1.2])
@pytest.mark.parametrize("layout", CACHES)
def test_attention_is_told_from_one_that_is_off(make_package: MakePackage, layout: str, scale: float) -> None:
    package = package_of(make_package, layout, scale)
    make = sparse_decode_trials(setting_of(package))
    for shape in sparse_decode_shapes(package, [4]):
        trial = make(shape)
        assert [each.name for each in trial.entrants] == [OURS, BATCH_INVARIANT]
        error = trial.error_of(trial.entrants[0].prepare(trial.inputs[0]))
        assert (error <= trial.error_limit == error_limit(torch.bfloat16)) == (scale == 1)


@pytest.mark.usefixtures("small")
def test_input_sets_share_the_caches_and_take_other_contexts(make_package: MakePackage) -> None:
    package = package_of(make_package, "ue8m0_v4")
    first, second, *_ = sparse_decode_trials(setting_of(package))(SparseDecodeShape(1, 2, 4, 32, 64)).inputs
    for one, other in ((first.main, second.main), (first.extra, second.extra)):
        assert one is not None
        assert other is not None
        assert one.pages.data_ptr() == other.pages.data_ptr()
        pages = [set((cached.indices // cached.block_size).flatten().tolist()) for cached in (one, other)]
        assert not pages[0] & pages[1]
    assert first.main.indices.shape == (1, 2, 32)
    assert first.extra is not None
    assert first.extra.indices.shape == (1, 2, 64)


def test_a_window_is_a_run_of_tokens_that_ends_a_token_later_each_query(make_package: MakePackage) -> None:
    package = package_of(make_package, "bf16")
    pool = Pool(replace(sides_of(package)[""], block_size=16), 3, 80, CPU)
    cached = pool.cached(2, 2, 3, 32, window=True)
    where = {int(slot): place for place, slot in enumerate(_slots(pool))}
    for request, rows in enumerate(cached.indices.tolist()):
        begin = where[rows[0][0]] - 80 * ((2 + request) % 3)
        for number, row in enumerate(rows):
            expected = range(begin + number, begin + number + 32)
            assert [where[slot] - 80 * ((2 + request) % 3) for slot in row] == list(expected)


def _slots(pool: Pool) -> list[int]:
    position = torch.arange(pool.tokens)
    slots = pool.tables[:, position // pool.block_size] * pool.block_size + position % pool.block_size
    found: list[int] = slots.flatten().tolist()
    return found


def test_pools_exceed_l2_and_hold_a_context_a_request() -> None:
    assert contexts_needed(row_bytes=656, tokens=1 << 15, l2_bytes=60 << 20, requests=1) == 6
    assert contexts_needed(row_bytes=656, tokens=1 << 15, l2_bytes=60 << 20, requests=128) == 128


def test_shapes_are_those_of_the_published_figures(make_package: MakePackage) -> None:
    package = package_of(make_package, "ue8m0_v4", topk=512, window=128)
    shapes = sparse_decode_shapes(package, None)
    assert {(shape.requests, shape.s_q) for shape in shapes} == {(b, s) for b in (1, 16, 64, 128) for s in (1, 2)}
    assert {(shape.num_heads, shape.window, shape.topk) for shape in shapes} == {(64, 128, 512)}
    assert str(shapes[0]) == "flash_mla_with_kvcache 1 x 1 x h64, 128 + 512"


def test_work_counts_both_caches(make_package: MakePackage) -> None:
    package = package_of(make_package, "mxfp8_v41", topk=512, window=128)
    shape = SparseDecodeShape(16, 2, 64, 128, 512)
    assert shape.flops(package.facts) == 2 * 32 * 64 * 640 * 1024
    rows = 32 * (128 * 528 + 512 * 288)
    assert shape.bytes_moved(package.facts, *package.layouts) == 32 * 64 * 1024 * 2 + 32 * 640 * 4 + rows


def test_h200_at_a_published_shape(make_package: MakePackage) -> None:
    """FlashMLA's 207 us at 128 x h128, topk 2048 are 353 TFLOP/s, 0.51 of the roof."""
    from mlagen.bench.roofline import ROOFS

    package = package_of(make_package, "fp8_ds_mla", topk=2048)
    shape = SparseDecodeShape(128, 1, 128, 0, 2048)
    assert shape.flops(package.facts) / 207e-6 / 1e12 == pytest.approx(353, abs=1)
    moved = shape.bytes_moved(package.facts, *package.layouts)
    assert ROOFS["NVIDIA H200"].seconds(shape.flops(package.facts), moved) / 207e-6 == pytest.approx(0.51, abs=0.005)


@pytest.mark.parametrize("layout", CACHES)
def test_flashmla_runs_the_layouts_that_it_knows(make_package: MakePackage, layout: str) -> None:
    package = package_of(make_package, layout)
    able = {peer.name: peer.unsupported(package.facts, *package.layouts) is None for peer in PEERS}
    known = layout in ("fp8_ds_mla", "ue8m0_v4")
    assert able == {"FlashMLA": known, "FlashMLA, rows of bf16": layout == "fp8_per_tensor"}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("scale", [1.0, 1.2])
def test_a_q_of_e4m3_is_the_same_numbers_and_judged_alike(make_package: MakePackage, scale: float) -> None:
    package = package_of(make_package, "fp8_per_tensor", scale, products="mixed")
    trial = sparse_decode_trials(setting_of(package))(SparseDecodeShape(1, 2, 4, 0, 64))
    assert [each.name for each in trial.entrants] == [OURS, BATCH_INVARIANT, OURS_E4M3]
    error = trial.error_of(trial.entrants[2].prepare(trial.inputs[0]))
    assert (error <= trial.error_limit) == (scale == 1)


@pytest.mark.usefixtures("small")
def test_named_rows_are_those_of_the_cache(make_package: MakePackage) -> None:
    package = package_of(make_package, "fp8_per_tensor")
    (inputs, *_) = sparse_decode_trials(setting_of(package))(SparseDecodeShape(2, 2, 4, 0, 64)).inputs
    inputs.main.indices[0, 1, 5:9] = -1
    rows, indices = named_rows(inputs.main)
    assert indices.shape == inputs.main.indices.shape
    assert indices[0, 1, 5:9].tolist() == [-1] * 4
    for token in range(4):
        own, slots = (each.flatten(0, 1)[token].long() for each in (indices, inputs.main.indices))
        main, slots = inputs.main, slots[slots >= 0]
        expected = read(main.layout, main.pages, main.block_size, slots, TENSOR_SCALE)
        assert torch.equal(rows[own[own >= 0]].float(), expected)


def test_flashmla_gets_indices_in_groups() -> None:
    indices = torch.arange(100, dtype=torch.int32).view(1, 1, 100)
    padded = pad_indices(indices)
    assert padded.shape == (1, 1, 128)
    assert padded.dtype == torch.int32
    assert (padded[..., 100:] == -1).all()
    assert pad_indices(padded).shape == (1, 1, 128)


@pytest.mark.usefixtures("small")
def test_what_the_spec_requires_is_passed(make_package: MakePackage) -> None:
    package = package_of(make_package, "ue8m0_v4", attn_sink="required", topk_length="required")
    inputs: SparseDecodeInputs = sparse_decode_trials(setting_of(package))(SparseDecodeShape(3, 1, 4, 32, 64)).inputs[0]
    assert inputs.attn_sink is not None
    assert inputs.attn_sink.shape == (4,)
    assert inputs.topk_length is not None
    assert inputs.topk_length.tolist() == [32] * 3
    assert inputs.extra_topk_length is not None
    assert inputs.extra_topk_length.tolist() == [64] * 3
    with_sink = replace(inputs, attn_sink=torch.full((4,), 5.0))  # the function has none
    assert sparse_decode.reference(with_sink).error_of(call_of(package, with_sink)) > error_limit(torch.bfloat16)
