"""`examples/vllm/v4.py` and `calls.py`: the tiny V4's parts besides random weights, and counts of calls."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vllm"
MODULES = ("calls", "plan", "v4")
HEADS, D, ROPE, GROUPS, RANK, HIDDEN = 4, 96, 64, 2, 16, 32


@pytest.fixture
def example() -> Any:
    """The example's modules by name, with counts of their own."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            del sys.modules[name]


class Layer(torch.nn.Module):
    """A layer of attention, as far as its projection reads it; its own would be e4m3's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        angles = torch.outer(torch.arange(50.0), 100 ** -torch.linspace(0, 1, ROPE // 2))
        self.rotary_emb = SimpleNamespace(cos_sin_cache=torch.cat((angles.cos(), angles.sin()), 1))
        self.nope_head_dim, self.n_local_groups, self.o_lora_rank = D - ROPE, GROUPS, RANK
        self.wo_a = torch.nn.Linear(HEADS * D // GROUPS, GROUPS * RANK, bias=False).bfloat16()
        self.wo_b = torch.nn.Linear(GROUPS * RANK, HIDDEN, bias=False).bfloat16()
        self.attn_sink = torch.nn.Parameter(torch.full((8,), -torch.inf), requires_grad=False)

    def _o_proj(self, o: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def expected(self, o: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The same in float64, RoPE as turns of complex numbers."""
        cos, sin = self.rotary_emb.cos_sin_cache[positions].double().chunk(2, 1)
        turned = torch.view_as_complex(o[..., D - ROPE :].double().unflatten(-1, (-1, 2)))
        back = torch.view_as_real(turned * torch.complex(cos, -sin)[:, None]).flatten(-2)
        rows = torch.cat((o[..., : D - ROPE].double(), back), -1).reshape(len(o), GROUPS, -1)
        weight = self.wo_a.weight.double().view(GROUPS, RANK, -1)
        return torch.einsum("tgd,grd->tgr", rows, weight).flatten(1) @ self.wo_b.weight.double().T


def inputs(tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads of more that they were padded to, and positions."""
    o = torch.randn(tokens, 2 * HEADS, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    return o[:, :HEADS], torch.arange(tokens) * 5 % 50


def test_a_layer_projects_as_its_own_would_without_e4m3(example: dict[str, ModuleType]) -> None:
    layer, (o, positions) = Layer(), inputs()
    example["v4"].finish(layer)
    before = o.clone()
    found, expected = layer._o_proj(o, positions), layer.expected(o, positions)
    assert found.dtype == torch.bfloat16
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert 0 < error < 2**-7  # two roundings to bf16
    assert torch.equal(o, before)
    assert example["calls"].CALLS["projected"] == [1, 0]


def test_a_graph_can_hold_the_projection(example: dict[str, ModuleType]) -> None:
    """Nothing is read back to the host, which a capture does not take, and no size hangs on a value."""
    layer = Layer()
    example["v4"].finish(layer)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        o, positions = (fake.from_tensor(one) for one in inputs())
        assert layer._o_proj(o, positions).shape == (7, HIDDEN)
        with pytest.raises(DataDependentOutputException):
            int(positions.max())


def test_weights_are_read_at_each_call(example: dict[str, ModuleType]) -> None:
    """Where they are: vLLM may put others there, and a graph replays with those."""
    layer, (o, positions) = Layer(), inputs()
    example["v4"].finish(layer)
    once = layer._o_proj(o, positions)
    layer.wo_a.weight.data.mul_(2)
    assert torch.equal(layer._o_proj(o, positions), 2 * once)


def test_parameters_without_random_weights_are_set(example: dict[str, ModuleType]) -> None:
    v4, layer = example["v4"], Layer()
    v4.finish(layer)
    assert layer.attn_sink.tolist() == [-1, 0, 1, 2, -1, 0, 1, 2]
    norm, head = (type(name, (torch.nn.Module,), {})() for name in ("RMSNorm", "ParallelLMHead"))
    for module in (norm, head):
        module.weight = torch.nn.Parameter(torch.full((4,), 2.0))
        v4.finish(module)
    assert norm.weight.tolist() == [1] * 4
    assert head.weight.tolist() == [2 * 3 / 64] * 4


def test_no_matrix_of_v4_is_quantised(example: dict[str, ModuleType]) -> None:
    """vLLM's names of those that it would quantise, in `vllm/models/deepseek_v4`."""
    attention = ("fused_wqa_wkv", "wq_b", "wo_a", "wo_b", "indexer.wq_b")
    experts = ("shared_experts.gate_up_proj", "shared_experts.down_proj", "experts.routed_experts")
    names = [*(f"attn.{name}" for name in attention), *(f"ffn.{name}" for name in experts)]
    skipped = example["plan"].v4_config(16)["quantization_config"]["modules_to_not_convert"]
    assert sorted(skipped) == sorted(f"model.layers.{layer}.{name}" for layer in range(3) for name in names)


def test_calls_are_counted_by_how_q_comes(example: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    calls, backend = example["calls"], ModuleType("backend")
    vars(backend)["flash_mla_sparse_fwd"] = lambda q, kv, *, sm_scale: (q, kv, sm_scale)
    calls.watch(backend)
    assert backend.flash_mla_sparse_fwd((1, 2), 3, sm_scale=4) == ((1, 2), 3, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    backend.flash_mla_sparse_fwd((1, 2), 3, sm_scale=4)
    backend.flash_mla_sparse_fwd(1, 3, sm_scale=4)
    assert calls.CALLS == {"pair": [2, 1], "whole": [1, 1]}
    assert not hasattr(backend, "flash_mla_with_kvcache")


def test_merges_of_picks_are_counted_if_a_package_does_them(example: dict[str, ModuleType]) -> None:
    def merge(logits: torch.Tensor, *, row_starts: object = None) -> object:
        return row_starts

    calls, layer = example["calls"], ModuleType("layer")
    calls.watch_merges(layer)  # of a vLLM without such a function
    layer._merge_dcp_topk_global = merge  # type: ignore[attr-defined]
    calls.watch_merges(layer)
    assert layer._merge_dcp_topk_global is merge  # vLLM's own
    merge.__module__ = "mlagen_vllm_dsv32.indexer"
    calls.watch_merges(layer)
    assert layer._merge_dcp_topk_global(torch.zeros(1), row_starts=7) == 7
    assert calls.CALLS["merged"] == [1, 0]
