"""Who competes in a run, on a CPU that stands for a device; times are made up."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
import torch
from bench_packages import MakePackage

from mlagen.bench import run
from mlagen.bench.families.indices import CONVERT
from mlagen.bench.package import BenchPackage
from mlagen.bench.report.origin import Origin
from mlagen.bench.roofline import Roof
from mlagen.bench.shapes import Batch
from mlagen.bench.trial import Call, Setting

ORIGIN = Origin("580.95.05", "2026-11-26", "0123456789ab")
BATCH = Batch("indices", CONVERT, 6, 2, 8)


def convert(
    requests: torch.Tensor, table: torch.Tensor, indices: torch.Tensor, block_size: int, **options: int
) -> torch.Tensor:
    assert options == {"NUM_TOPK_TOKENS": indices.shape[1]}
    return table[requests.long()[:, None], indices.long() // block_size] * block_size + indices % block_size


class CpuSetting(Setting):
    copy_roof = Roof(1e15, 1e15, "none")  # type: ignore[assignment]


class GraphTimer:
    """Stands for a graph: replays call by call, and takes a microsecond each."""

    def __init__(self, calls: Sequence[Call], *, keep_results: bool) -> None:
        self.calls = calls

    def __call__(self) -> float:
        return 1e-6

    def result(self) -> object:
        return self.calls[0]()


class BehindTimer(GraphTimer):
    def __call__(self) -> float:
        return 2e-6


@pytest.fixture
def package(make_package: MakePackage, monkeypatch: pytest.MonkeyPatch) -> BenchPackage:
    """A package with an index kernel; nothing of vLLM is installed, and every call takes a microsecond."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(run, "flush_l2", lambda device: None)
    monkeypatch.setattr(run, "check_device", lambda after: None)
    monkeypatch.setattr(run, "warm_up", lambda call: call())
    monkeypatch.setattr(run, "GraphTimer", GraphTimer)
    monkeypatch.setattr(run, "BehindTimer", BehindTimer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a CPU")
    return make_package({CONVERT: convert})


@pytest.mark.parametrize(("peers", "names"), [(True, ["ours", "vLLM Triton"]), (False, ["ours"])])
def test_peers_compete_with_ours_where_they_are_asked_for(package: BenchPackage, peers: bool, names: list[str]) -> None:
    setting = CpuSetting(package, torch.device("cpu"), 1 << 10)
    row = run._Bench(setting, 3, ORIGIN, peers=peers).measure(BATCH)
    assert [each.name for each in row.contenders] == names
    assert (row.ours.seconds, row.ours.error, row.peers) == (1e-6, 0.0, ())
    assert all((each.absent or "").startswith("not installed (") for each in row.contenders[1:])
    assert (row.driver, row.date, row.commit) == (ORIGIN.driver, ORIGIN.date, ORIGIN.commit)


def test_short_calls_are_timed_behind_another_kernel_too(
    package: BenchPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = run._Bench(CpuSetting(package, torch.device("cpu"), 1 << 10), 3, ORIGIN, peers=False)
    row = bench.measure(BATCH)
    assert (row.ours.seconds, row.ours.behind_seconds, row.ours.behind_ratio) == (1e-6, 2e-6, 1.0)
    assert (row.ours.quoted_seconds, row.ours.quoted_ratio) == (2e-6, 1.0)
    monkeypatch.setattr(run, "SHORT_S", 1e-6)
    row = bench.measure(BATCH)
    assert (row.ours.seconds, row.ours.behind_seconds, row.ours.quoted_seconds) == (1e-6, None, 1e-6)


def test_a_wrong_replay_is_no_time(package: BenchPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may be right when it is called, and wrong where a graph runs it against itself."""

    class Overlapping(GraphTimer):
        def result(self) -> object:
            out = self.calls[0]()
            out[-1] += 1
            return out

    monkeypatch.setattr(run, "GraphTimer", Overlapping)
    bench = run._Bench(CpuSetting(package, torch.device("cpu"), 1 << 10), 3, ORIGIN, peers=False)
    ours = bench.measure(BATCH).ours
    assert ours.seconds is None
    assert (ours.absent or "").startswith("wrong result: error 0.1")
