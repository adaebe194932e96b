"""Who competes in a run, on a CPU that stands for a device; times are made up."""

from __future__ import annotations

import sys

import pytest
import torch
from bench_packages import MakePackage

from mlagen.bench import run
from mlagen.bench.families.indices import CONVERT
from mlagen.bench.package import BenchPackage
from mlagen.bench.roofline import Roof
from mlagen.bench.shapes import Batch
from mlagen.bench.trial import Setting

BATCH = Batch("indices", CONVERT, 6, 2, 8)


def convert(
    requests: torch.Tensor, table: torch.Tensor, indices: torch.Tensor, block_size: int, **options: int
) -> torch.Tensor:
    assert options == {"NUM_TOPK_TOKENS": indices.shape[1]}
    return table[requests.long()[:, None], indices.long() // block_size] * block_size + indices % block_size


class CpuSetting(Setting):
    copy_roof = Roof(1e15, 1e15, "none")  # type: ignore[assignment]


@pytest.fixture
def package(make_package: MakePackage, monkeypatch: pytest.MonkeyPatch) -> BenchPackage:
    """A package with an index kernel; nothing of vLLM is installed, and every call takes a microsecond."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(run, "flush_l2", lambda device: None)
    monkeypatch.setattr(run, "check_device", lambda after: None)
    monkeypatch.setattr(run, "warm_up", lambda call: call())
    monkeypatch.setattr(run, "graph_timer", lambda calls, keep_results: lambda: 1e-6)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a CPU")
    return make_package({CONVERT: convert})


@pytest.mark.parametrize(("peers", "names"), [(True, ["ours", "vLLM Triton"]), (False, ["ours"])])
def test_peers_compete_with_ours_where_they_are_asked_for(package: BenchPackage, peers: bool, names: list[str]) -> None:
    setting = CpuSetting(package, torch.device("cpu"), 1 << 10)
    row = run._Bench(setting, rounds=3, peers=peers).measure(BATCH)
    assert [each.name for each in row.contenders] == names
    assert (row.ours.seconds, row.ours.error, row.peers) == (1e-6, 0.0, ())
    assert all((each.absent or "").startswith("not installed (") for each in row.contenders[1:])
