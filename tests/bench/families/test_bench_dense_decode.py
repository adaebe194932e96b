"""Trials of dense attention over a cache, on small caches; the kernels are plain torch over decoded rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench_packages import FlashInferModule

from mlagen.bench.check import error_limit
from mlagen.bench.families import dense_decode, shapes_of
from mlagen.bench.families.dense_decode import (
    CASES,
    DenseDecodeInputs,
    DenseDecodeShape,
    call_of,
    dense_decode_shapes,
    dense_decode_trials,
    input_sets,
)
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers import dense_decode as dense_decode_peers
from mlagen.bench.peers import libraries, peers_of
from mlagen.bench.peers.dense_decode import (
    FlashAttention3DenseDecode,
    FlashInferDenseDecode,
    FlashMlaDenseDecode,
    VllmTritonDenseDecode,
)
from mlagen.bench.roofline import ROOFS, Roof
from mlagen.bench.shapes import TENSOR_SCALE
from mlagen.bench.trial import BATCH_INVARIANT, OURS, Setting
from mlagen.errors import UsageError
from mlagen.layout import CacheLayout
from mlagen.layout.codec import read
from mlagen.spec import Spec, load
from mlagen.verify.call.facts import Facts

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
H200 = ROOFS["NVIDIA H200"]
SHAPES = [
    DenseDecodeShape(3, 1, 4, 200, "equal"),
    DenseDecodeShape(5, 1, 3, 130, "random"),
    DenseDecodeShape(2, 2, 4, 128, "equal"),
]


def attend(
    layout: CacheLayout,
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    d_v: int,
    causal: bool,
    window: int | None = None,
) -> torch.Tensor:
    """Dense attention in plain torch over a cache [pages, block_size, 1, row]; q is [requests, s_q, heads, d_qk]."""
    out = torch.full((*q.shape[:3], d_v), float("nan"))
    size, s_q = cache.shape[1], q.shape[1]
    for request, length in enumerate(lengths.tolist()):
        key = torch.arange(length)
        slots = table[request][key // size] * size + key % size
        kv = read(layout, cache[:, :, 0].view(torch.uint8), size, slots, TENSOR_SCALE)
        for token in range(s_q):
            end = length - s_q + token + 1 if causal else length
            kept = kv[max(0, end - (window or end)) : end].bfloat16().float()
            logits = scale * q[request, token].float() @ kept.T
            out[request, token] = logits.softmax(1) @ kept[:, :d_v]
    return out.bfloat16()


class Attention:
    """The package's wrapper; `fault` makes it wrong."""

    def __init__(self, layout: CacheLayout, window: int | None, fault: str = "") -> None:
        self.layout = layout
        self.window = window
        self.fault = fault

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        head_dim_v: int,
        tile_scheduler_metadata: object,
        *,
        softmax_scale: float,
        causal: bool,
        is_fp8_kvcache: bool,
        enable_batch_invariant: bool,
        k_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        assert is_fp8_kvcache == self.layout.quantised
        assert (k_scale is not None) == self.layout.tensor_scale
        if self.fault == "scale":
            softmax_scale *= 1.2
        if self.fault == "mask":
            causal = not causal
        if self.fault == "length":
            cache_seqlens = cache_seqlens // 2 + 1
        if self.fault == "page":
            block_table = block_table.roll(1, 1)
        arguments = (block_table, cache_seqlens, softmax_scale, head_dim_v, causal, self.window)
        return attend(self.layout, q, k_cache, *arguments), None


def package_of(name: str, fault: str = "") -> BenchPackage:
    """A package of a checked-in spec with a wrapper in plain torch, and writers of none."""
    spec: Spec = load(ROOT / "specs" / f"{name}.yaml")
    said = spec.model_dump(mode="json")
    facts = replace(Facts.of(said), wrappers=("flash_mla_with_kvcache",))
    root = ModuleType(name)
    package = BenchPackage(ROOT / "generated" / name, root, facts, said)
    layout = package.layouts[0]
    if layout is not None:
        window = package.attention_spec.get("window")
        vars(root).update(
            flash_mla_with_kvcache=Attention(layout, window, fault), get_mla_metadata=lambda: (object(), None)
        )
    return package


class CpuSetting(Setting):
    """A setting that measures no roof; a call is short enough for a graph."""

    roof = Roof(1e15, 1e15, "none")  # type: ignore[assignment]


def setting_of(package: BenchPackage) -> Setting:
    return CpuSetting(package, CPU, 1 << 10)


def inputs_of(name: str, shape: DenseDecodeShape) -> DenseDecodeInputs:
    return dense_decode.make_dense_decode_inputs(shape, package_of(name), CPU, 1)[0]


PACKAGES = ("dsv3", "dsv3_fp8", "minicpm3", "dots3_sliding")


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_results_pass(name: str, shape: DenseDecodeShape, monkeypatch: pytest.MonkeyPatch) -> None:
    package = package_of(name)
    if name == "dots3_sliding":
        monkeypatch.setitem(package.spec["attention"], "window", 70)
        vars(package.root)["flash_mla_with_kvcache"].window = 70
    trial = dense_decode_trials(setting_of(package))(shape)
    assert [each.name for each in trial.entrants] == [OURS, BATCH_INVARIANT]
    for entrant in trial.entrants:
        assert trial.error_of(entrant.prepare(trial.inputs[0])) <= trial.error_limit == error_limit(torch.bfloat16)


@pytest.mark.parametrize(
    ("fault", "shape"),
    [("scale", SHAPES[1]), ("length", SHAPES[1]), ("page", SHAPES[1]), ("page", SHAPES[2]), ("mask", SHAPES[2])],
)
def test_wrong_results_do_not(fault: str, shape: DenseDecodeShape) -> None:
    trial = dense_decode_trials(setting_of(package_of("dsv3", fault)))(shape)
    assert trial.error_of(trial.entrants[0].prepare(trial.inputs[0])) > trial.error_limit


def test_a_window_that_is_not_kept_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    package = package_of("dots3_sliding")
    monkeypatch.setitem(package.spec["attention"], "window", 70)  # the wrapper's is 513
    trial = dense_decode_trials(setting_of(package))(SHAPES[0])
    assert trial.error_of(trial.entrants[0].prepare(trial.inputs[0])) > trial.error_limit


def test_one_wrong_token_among_many_is_told() -> None:
    """A result of many keys is small against one of few, and still counts."""
    package = package_of("dsv3")
    (inputs,) = dense_decode.make_dense_decode_inputs(DenseDecodeShape(2, 1, 4, 512, "equal"), package, CPU, 1)
    inputs.lengths[0] = 1
    right = call_of(package, inputs)

    def call() -> torch.Tensor:
        out: torch.Tensor = right()
        out[1] *= 1.012
        return out

    assert dense_decode.reference(inputs).error_of(right) < error_limit(torch.bfloat16)
    assert dense_decode.reference(inputs).error_of(call) > error_limit(torch.bfloat16)


def test_what_a_call_does_not_write_is_told() -> None:
    package = package_of("dsv3")
    (inputs,) = dense_decode.make_dense_decode_inputs(SHAPES[0], package, CPU, 1)
    out = call_of(package, inputs)()
    assert dense_decode.reference(inputs).error_of(lambda: out) == math.inf


def test_one_wrong_element_is_told() -> None:
    package = package_of("dsv3")
    (inputs,) = dense_decode.make_dense_decode_inputs(SHAPES[0], package, CPU, 1)
    right = call_of(package, inputs)

    def call() -> torch.Tensor:
        out: torch.Tensor = right()
        out[1, 0, 2, 7] += 0.03
        return out

    reference = dense_decode.reference(inputs)
    assert reference.error_of(right) < error_limit(torch.bfloat16)
    assert reference.error_of(call) == math.inf


def test_input_sets_have_pages_of_their_own_in_one_cache() -> None:
    first, second = dense_decode.make_dense_decode_inputs(SHAPES[0], package_of("dsv3"), CPU, 2)
    assert first.pages.data_ptr() == second.pages.data_ptr()
    pages = first.block_table.flatten().tolist() + second.block_table.flatten().tolist()
    assert sorted(pages) == list(range(2 * 3 * 4))
    assert pages != sorted(pages)
    assert first.cache.shape == (24, 64, 1, 576)


def test_lengths_are_drawn_alike_in_every_run() -> None:
    shape = DenseDecodeShape(128, 1, 128, 32768, "random")
    lengths = shape.cached_tokens()
    assert lengths.tolist() == shape.cached_tokens().tolist()
    assert 1 <= int(lengths.min()) < 2048
    assert 30720 < int(lengths.max()) <= 32768
    assert 0.4 < float(lengths.double().mean()) / 32768 < 0.6
    assert set(DenseDecodeShape(3, 1, 1, 77, "equal").cached_tokens().tolist()) == {77}


@pytest.mark.parametrize(
    ("name", "requests", "rows", "expected"),
    [
        ("dsv3", 1, 16, DenseDecodeShape(1, 1, 16, 4096, "equal")),
        ("dsv3", 64, 128, DenseDecodeShape(64, 1, 128, 4096, "equal")),
        ("dsv3", 128, 32, DenseDecodeShape(128, 1, 32, 32768, "equal")),
        ("dots3_sliding", 128, 128, DenseDecodeShape(128, 2, 64, 32768, "equal")),  # of 64 heads
        ("dsv2_lite", 16, 32, DenseDecodeShape(16, 2, 16, 4096, "equal")),  # of 16 heads
    ],
)
def test_tiles_are_tuned_at_rows_that_a_model_has(
    name: str, requests: int, rows: int, expected: DenseDecodeShape
) -> None:
    shape = dense_decode.tuned_shape(package_of(name), requests, rows, memory=80 << 30)
    assert shape == expected
    assert shape.num_heads * shape.s_q == rows


def test_long_requests_are_tuned_where_memory_allows() -> None:
    package = package_of("dsv3")
    need = 8 * 128 * 32768 * 1152
    assert dense_decode.tuned_shape(package, 128, 16, memory=need).context == 32768
    assert dense_decode.tuned_shape(package, 128, 16, memory=need - 1).context == 4096
    assert dense_decode.tuned_shape(package_of("dsv3_fp8"), 128, 16, memory=need - 1).context == 32768


def test_a_long_call_takes_one_input_set_and_a_short_one_exceeds_l2() -> None:
    def sets(shape: DenseDecodeShape) -> int:
        work = shape.flops(576, 512, None)
        moved = shape.bytes_moved(576, 512, None, inputs_layout, 64)
        return input_sets(work, moved, H200, 60 << 20)

    inputs_layout = package_of("dsv3").cached[0]
    assert sets(DenseDecodeShape(128, 1, 16, 32768, "equal")) == 1
    assert sets(DenseDecodeShape(128, 1, 128, 32768, "random")) == 1
    assert sets(DenseDecodeShape(64, 1, 16, 4096, "equal")) == 2
    assert sets(DenseDecodeShape(1, 1, 16, 4096, "equal")) == 27


def test_shapes_are_those_of_the_published_figures() -> None:
    found = dense_decode_shapes(package_of("dsv3"), None)
    assert [(s.requests, s.s_q, s.context, s.lengths) for s in found] == [*CASES, *CASES]
    assert {shape.num_heads for shape in found} == {128, 16}
    assert {shape.num_heads for shape in dense_decode_shapes(package_of("dsv2_lite"), None)} == {16}
    assert {shape.num_heads for shape in dense_decode_shapes(package_of("dsv3"), [32])} == {32}
    assert len({str(shape) for shape in found}) == len(found)
    assert all(str(shape).startswith(f"{shape.kind} ") for shape in found)
    assert str(found[-1]) == "dense_decode 128 x 1 x h16, kv 1 to 32K"


@pytest.mark.parametrize("path", sorted((ROOT / "specs").glob("*.yaml")), ids=lambda path: path.stem)
def test_packages_with_dense_decode_attention_alone_are_measured(path: Path) -> None:
    said = load(path).model_dump(mode="json")
    facts = Facts.of(said)
    package = BenchPackage(ROOT / "generated" / path.stem, ModuleType(path.stem), facts, said)
    if said["cache"] and any(field.get("tensor") for field in said["cache"]["layout"]["fields"]):
        with pytest.raises(UsageError, match="benchmarks take one tensor"):
            shapes_of(package, ["dense_decode"])
        return
    measured = facts.kind == "dense" and "flash_mla_with_kvcache" in facts.wrappers
    assert bool(shapes_of(package, ["dense_decode"])) == measured
    assert not (measured and shapes_of(package, ["sparse_decode", "decode", "prefill"]))


def test_work_of_a_call_by_hand() -> None:
    layout = package_of("dsv3").cached[0]
    shape = DenseDecodeShape(3, 2, 4, 100, "equal")
    # 99 and 100 keys a request, 4 heads, 576 + 512 multiply-adds, two FLOPs each.
    assert shape.flops(576, 512, None) == 3 * 199 * 4 * 1088 * 2
    assert shape.flops(576, 512, 10) == 3 * 20 * 4 * 1088 * 2
    # q and out of 2 bytes, rows of 1152, pages' numbers of 4.
    assert shape.bytes_moved(576, 512, None, layout, 64) == 6 * 4 * 1088 * 2 + 3 * (100 * 1152 + 2 * 4)
    assert shape.bytes_moved(576, 512, 10, layout, 64) == 6 * 4 * 1088 * 2 + 3 * (11 * 1152 + 4)
    short = DenseDecodeShape(1, 3, 1, 2, "equal")  # the first query token sees nothing
    assert short.flops(576, 512, None) == (0 + 1 + 2) * 1088 * 2


@pytest.mark.parametrize(
    ("shape", "microseconds", "rate", "roof"),
    [
        (DenseDecodeShape(128, 1, 16, 32768, "equal"), 1171, 4130, 0.93),
        (DenseDecodeShape(128, 1, 128, 32768, "equal"), 2090, 559, 0.81),
        (DenseDecodeShape(128, 2, 128, 32768, "equal"), 3943, 593, 0.86),
    ],
    ids=str,
)
def test_h200_at_published_shapes(shape: DenseDecodeShape, microseconds: int, rate: int, roof: float) -> None:
    """GB/s with 16 heads, TFLOP/s with 128, and the share of the roof."""
    layout = package_of("dsv3").cached[0]
    work, moved = shape.flops(576, 512, None), shape.bytes_moved(576, 512, None, layout, 64)
    seconds = microseconds * 1e-6
    assert (moved / 1e9 if shape.num_heads == 16 else work / 1e12) / seconds == pytest.approx(rate, rel=0.003)
    assert H200.seconds(work, moved) / seconds == pytest.approx(roof, abs=0.006)


FP8_ONLY = "fp8_per_tensor only"
UNSUPPORTED = {
    "dsv3": (None, FP8_ONLY, None, None, None),
    "glm47_flash": (None, FP8_ONLY, None, None, None),
    "dsv3_fp8": ("unquantised rows only", None, *["unquantised rows only"] * 2, None),
    "minicpm3": ("bf16 rows of 512 + 64 columns only", FP8_ONLY, *["bf16 rows of 512 + 64 columns only"] * 2, None),
    "dots3_sliding": (
        "no sliding window",
        FP8_ONLY,
        "bf16 rows of 512 + 64 columns only",
        *["no sliding window"] * 2,
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_peers_run_what_they_know(name: str) -> None:
    package = package_of(name)
    inputs = inputs_of(name, SHAPES[1])
    assert tuple(peer.unsupported(package.facts, inputs) for peer in dense_decode_peers.PEERS) == UNSUPPORTED[name]


def test_peers_say_what_sizes_they_cannot_take() -> None:
    facts = package_of("dsv3").facts
    speculative = inputs_of("dsv3", SHAPES[2])
    assert VllmTritonDenseDecode().unsupported(facts, speculative) == "one query token a request only"
    assert FlashMlaDenseDecode().unsupported(facts, speculative) is None
    inputs = inputs_of("dsv3", SHAPES[0])
    assert FlashMlaDenseDecode().unsupported(facts, replace(inputs, block_size=16)) == "pages of 64 tokens only"
    wide = replace(inputs, q=inputs.q[:, :, :1].expand(-1, -1, 129, -1))
    assert FlashMlaDenseDecode().unsupported(facts, wide) == "at most 128 heads"


@pytest.mark.parametrize(("requests", "absent"), [(64, False), (128, True)])
def test_vllms_kernel_is_absent_where_its_addresses_overflow(requests: int, absent: bool) -> None:
    inputs = inputs_of("dsv3", SHAPES[0])
    pages = torch.empty(1, inputs.pages.shape[1], dtype=torch.uint8).expand(requests * 512, -1)  # takes no memory
    huge = SimpleNamespace(layout=inputs.layout, q=inputs.q, window=None, cache=replace(inputs, pages=pages).cache)
    reason = VllmTritonDenseDecode().unsupported(package_of("dsv3").facts, huge)
    assert reason == ("its addresses are 32 bits wide" if absent else None)


def flash_mla(layout: CacheLayout) -> Any:
    """FlashMLA's module, in plain torch."""

    def attention(
        q: torch.Tensor, cache: torch.Tensor, table: Any, lengths: Any, d_v: int, metadata: object, **options: Any
    ) -> Any:
        assert q.shape[2] in (64, 128)
        assert metadata == "metadata"
        return attend(layout, q, cache, table, lengths, options["softmax_scale"], d_v, options["causal"]), None

    return SimpleNamespace(get_mla_metadata=lambda: ("metadata", None), flash_mla_with_kvcache=attention)


def flash_attention(layout: CacheLayout) -> Any:
    """FlashAttention-3's module, in plain torch. Its k and v are parts of one cache."""

    def attention(**given: Any) -> torch.Tensor:
        assert given["scheduler_metadata"] == "metadata"
        assert given["k"].untyped_storage().data_ptr() == given["v"].untyped_storage().data_ptr()
        lengths = given["seqused_k"]
        assert given["max_seqlen_k"] >= int(lengths.max())
        assert given["cu_seqlens_q"].tolist() == [given["max_seqlen_q"] * i for i in range(len(lengths) + 1)]
        q = torch.cat([given["q_v"], given["q"]], 2).unflatten(0, (len(lengths), given["max_seqlen_q"]))
        cache = torch.cat([given["v"], given["k"]], 3)
        window = None if given["window_size"][0] < 0 else given["window_size"][0] + 1
        arguments = (given["block_table"], lengths, given["softmax_scale"], 512, given["causal"], window)
        return attend(layout, q, cache, *arguments).flatten(0, 1)

    return SimpleNamespace(get_scheduler_metadata=lambda **_: "metadata", flash_attn_varlen_func=attention)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "peer", [FlashMlaDenseDecode(), FlashAttention3DenseDecode(), FlashInferDenseDecode()], ids=lambda peer: peer.name
)
def test_peers_get_the_arguments_that_they_take(
    peer: dense_decode_peers.DenseDecodePeer, shape: DenseDecodeShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of("dsv3", shape)
    modules = {
        "FlashMLA": flash_mla(inputs.layout),
        "FA3": flash_attention(inputs.layout),
        "FlashInfer": FlashInferModule,
    }
    module = modules[peer.name]
    for importing in (libraries, dense_decode_peers):
        monkeypatch.setattr(importing, "first_module", lambda _: module)
    monkeypatch.setattr(libraries, "flash_attention_3_interface", lambda: module)
    assert dense_decode.reference(inputs).error_of(peer.prepare(inputs)) <= error_limit(torch.bfloat16)


def test_flash_attention_keeps_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = replace(inputs_of("dsv3", SHAPES[2]), window=70)
    module = flash_attention(inputs.layout)
    monkeypatch.setattr(libraries, "flash_attention_3_interface", lambda: module)
    assert dense_decode.reference(inputs).error_of(FlashAttention3DenseDecode().prepare(inputs)) <= error_limit(
        torch.bfloat16
    )


def test_peers_that_are_not_installed_are_entrants_all_the_same() -> None:
    package = package_of("dsv3")
    inputs = dense_decode_trials(setting_of(package))(SHAPES[0]).inputs
    names = ["FlashMLA", "FlashMLA fp8", "FA3", "FlashInfer", "vLLM Triton"]
    assert [each.name for each in peers_of(package, SHAPES[0], inputs)] == names
