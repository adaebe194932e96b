"""`examples/vllm/beside.py` over layers that stand for V4's: the rounding that it sees."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

FILE = Path(__file__).resolve().parents[2] / "examples" / "vllm" / "beside.py"
HEADS, D = 6, 64


class Theirs:
    """vLLM's class: heads padded to 64, and an output that shows the sink and that padded heads are zeros."""

    @staticmethod
    def get_padded_num_q_heads(heads: int) -> int:
        return 64

    def forward_mqa(self, q: torch.Tensor, kv: None, positions: None, output: torch.Tensor) -> None:
        assert q.shape[1] == len(self.attn_sink) == 64
        assert not q[:, HEADS + 2 :].any()
        output.copy_(2 * q + self.attn_sink[:, None].nan_to_num(neginf=0))


class Ours(Theirs):
    """The plugin's: 8 heads for 6, and another rounding in the first column of the decodes."""

    def __init__(self, ratio: int) -> None:
        self.compress_ratio, self.prefix = ratio, "layer"
        self.n_local_heads, self.padded_heads = HEADS, HEADS + 2
        self.attn_sink = torch.nn.Parameter(torch.arange(HEADS + 2.0), requires_grad=False)
        self.swa_cache_layer = SimpleNamespace(prefix="window")

    def forward_mqa(self, q: torch.Tensor, kv: None, positions: None, output: torch.Tensor) -> None:
        output.copy_(2 * q + self.attn_sink[:, None])
        output[:3, :, 0] *= 1 + 2**-6


@pytest.fixture
def context() -> dict[str, SimpleNamespace]:
    return {"window": SimpleNamespace(num_decode_tokens=3, num_prefill_tokens=5)}


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch, context: dict[str, SimpleNamespace]) -> ModuleType:
    vllm, flashmla = ModuleType("vllm.forward_context"), ModuleType("vllm.models.deepseek_v4.nvidia.flashmla")
    vars(vllm)["get_forward_context"] = lambda: SimpleNamespace(attn_metadata=context or None)
    vars(flashmla)["DeepseekV4FlashMLAAttention"] = Theirs
    for module in (vllm, flashmla):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("beside", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attend(layer: Ours) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's output of 8 tokens, and the output that vLLM's own would give."""
    q = torch.rand((8, HEADS + 2, D), generator=torch.Generator().manual_seed(0)).bfloat16() + 1
    q[:, HEADS:] = 0
    output = torch.full_like(q, torch.nan)
    layer.forward_mqa(q, None, None, output)
    return output, 2 * q + layer.attn_sink.detach().bfloat16()[:, None]


def test_differences_are_seen_by_kind_of_layer_and_of_tokens(beside: ModuleType) -> None:
    layer, found = Ours(4), dict[str, list[float]]()
    expected, sink = attend(layer)[0], layer.attn_sink
    beside.compare(layer, found)
    output, theirs = attend(layer)
    assert torch.equal(output, expected)
    assert layer.attn_sink is sink
    (most, apart, size), prefill = found["C4A decode"], found["C4A prefill"]
    error = (output[:3] - theirs[:3])[:, :HEADS].float()
    assert 0.003 < most < 2**-6
    assert apart == pytest.approx(error.square().sum().item(), rel=1e-3)
    assert size == pytest.approx(theirs[:3, :HEADS].float().square().sum().item(), rel=1e-2)
    assert prefill[:2] == [0, 0]
    attend(layer)
    assert found["C4A decode"] == [most, 2 * apart, 2 * size]


def test_a_layer_without_a_number_is_infinitely_apart(beside: ModuleType) -> None:
    layer, found = Ours(1), dict[str, list[float]]()
    ours = layer.forward_mqa
    layer.forward_mqa = lambda q, kv, positions, output: ours(q * torch.nan, kv, positions, output)  # type: ignore[method-assign]
    beside.compare(layer, found)
    attend(layer)
    assert found["window decode"][0] == torch.inf


@pytest.mark.parametrize("context", [{}])
def test_nothing_is_compared_where_vllm_measures_memory(beside: ModuleType) -> None:
    layer, found = Ours(4), dict[str, list[float]]()
    expected = attend(layer)[0]
    beside.compare(layer, found)
    assert torch.equal(attend(layer)[0], expected)
    assert not found
