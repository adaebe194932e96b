"""Dense attention over e4m3 with a q of either dtype, and FlashMLA's kernel; both in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_bench_dense_decode import CPU, SHAPES, attend, package_of, setting_of

from mlagen.bench.families import dense_decode
from mlagen.bench.families.dense_decode import (
    CASES,
    DenseDecodeShape,
    call_of,
    dense_decode_shapes,
    dense_decode_trials,
)
from mlagen.bench.peers import dense_decode as dense_decode_peers
from mlagen.bench.peers import peers_of
from mlagen.bench.shapes import TENSOR_SCALE
from mlagen.bench.trial import WrongResultError
from mlagen.layout import CacheLayout


class Fp8Operators:
    """FlashMLA's operators over e4m3, in plain torch that rounds probabilities as they do."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout

    def get_mla_decoding_metadata_dense_fp8(self, lengths: torch.Tensor, rows: int, kv_heads: int) -> list[str]:
        assert (rows % 64, kv_heads) == (0, 1)
        return ["metadata", "splits"]

    def fwd_kvcache_mla_fp8(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        d_v: int,
        lengths: torch.Tensor,
        table: torch.Tensor,
        scale: float,
        causal: bool,
        metadata: str,
        splits: str,
        descale_q: torch.Tensor,
        descale_k: torch.Tensor,
    ) -> list[torch.Tensor]:
        assert q.dtype == cache.dtype == torch.float8_e4m3fn
        assert (metadata, splits, q.shape[2] in (64, 128)) == ("metadata", "splits", True)
        assert float(descale_k) == TENSOR_SCALE
        q = q.float() * descale_q
        out = attend(self.layout, q, cache, table, lengths, scale, d_v, causal)
        return [out * (1 + 0.01 * torch.randn(out.shape).clamp(-2, 2)).bfloat16()]


@pytest.mark.parametrize("shape", [*SHAPES, replace(SHAPES[0], q="e4m3")], ids=str)
def test_flashmlas_fp8_kernel_is_a_peer_with_q_of_either_dtype(
    shape: DenseDecodeShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = package_of("dsv3_fp8")
    trial = dense_decode_trials(setting_of(package))(shape)
    (inputs, *_) = trial.inputs
    assert (inputs.q_e4m3 is not None) == (shape.q == "e4m3")
    monkeypatch.setattr(dense_decode_peers, "load_packed_library", lambda *_: None)
    operators = Fp8Operators(inputs.layout)
    monkeypatch.setattr(torch.ops, "_flashmla_extension_C", operators, raising=False)
    (peer,) = [each for each in peers_of(package, shape, trial.inputs) if each.name == "FlashMLA fp8"]
    assert peer.unsupported is None
    call = peer.prepare(inputs)
    error = trial.checked(peer, call)
    assert 0.005 < error < (0.015 if shape.q == "e4m3" else 0.05)
    with pytest.raises(WrongResultError, match="wrong result: error"):
        trial.checked(trial.entrants[0], call)  # which has a tighter limit
    with pytest.raises(WrongResultError, match="wrong result: error"):
        trial.checked(peer, lambda: call() * 1.1)


def test_a_package_over_e4m3_is_measured_with_q_of_either_dtype() -> None:
    found = dense_decode_shapes(package_of("dsv3_fp8"), [64])
    assert [shape.q for shape in found] == ["model"] * len(CASES) + ["e4m3"] * len(CASES)
    assert str(found[-1]) == f"{found[len(CASES) - 1]}, q e4m3"


def test_q_of_e4m3_is_given_with_its_scale() -> None:
    package = package_of("dsv3_fp8")
    given: dict[str, Any] = {}

    def wrapper(q: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        given.update(options, q=q)
        return q, None

    vars(package.root)["flash_mla_with_kvcache"] = wrapper
    (inputs,) = dense_decode.make_dense_decode_inputs(replace(SHAPES[0], q="e4m3"), package, CPU, 1)
    call_of(package, inputs)()
    assert given["q"].dtype == torch.float8_e4m3fn
    assert torch.equal(given["q"].float() * given["q_scale"], inputs.q.float())
