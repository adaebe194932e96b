from __future__ import annotations

import lzma
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mlagen.bench import peers
from mlagen.bench.package import BenchPackage, load_package
from mlagen.bench.peers import PEERS, Peer, absence
from mlagen.bench.shapes import Shape, default_shapes, make_inputs

NAMES = [peer.name for peer in PEERS]
GENERATED = Path(__file__).parents[2] / "generated"


@pytest.fixture
def without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No peer can be imported, whatever is installed."""
    for name in ("seed_sparse", "vllm", "flash_mla"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("peer", PEERS, ids=NAMES)
@pytest.mark.usefixtures("without_peers")
def test_a_missing_peer_says_so_in_one_line(peer: Peer, dsv32: BenchPackage, shape: Shape) -> None:
    (inputs,) = make_inputs(shape, dsv32.facts, torch.device("cpu"), 0, sets=1)
    with pytest.raises(ImportError) as caught:
        peer.prepare(inputs)
    reason = absence(caught.value)
    assert reason.startswith("not installed (")
    assert "\n" not in reason


@pytest.mark.parametrize("peer", PEERS, ids=NAMES)
def test_peers_run_what_they_are_known_for(peer: Peer, dsv32: BenchPackage) -> None:
    assert [peer.unsupported(each, dsv32.facts) for each in default_shapes(dsv32.facts)] == [None] * 24


@pytest.mark.parametrize("peer", PEERS, ids=NAMES)
def test_peers_refuse_what_they_cannot_run(peer: Peer, dsv32: BenchPackage, shape: Shape) -> None:
    odd = load_package(GENERATED / "odd").facts
    assert peer.unsupported(default_shapes(odd)[0], odd)
    assert peer.unsupported(shape, replace(dsv32.facts, block_size=64))


def test_only_some_peers_know_sinks_and_rows_without_rope(dsv32: BenchPackage, shape: Shape) -> None:
    sink = replace(dsv32.facts, sink="required")
    bare = replace(dsv32.facts, d_rope=0)
    able = {peer.name: (peer.unsupported(shape, sink), peer.unsupported(shape, bare)) for peer in PEERS}
    assert able["FlashMLA"] == (None, None)
    assert all(able["vLLM Triton"])
    assert all(able["FA3 p1"])


def test_a_failure_of_many_lines_becomes_one() -> None:
    assert absence(RuntimeError("CUDA error: x\nmore\nlines")) == "RuntimeError: CUDA error: x"
    assert absence(ValueError()) == "ValueError"


def test_a_packed_library_is_unpacked_beside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vllm" / "vllm_flash_attn"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "_vllm_fa3_C.abi3.so.xz").write_bytes(lzma.compress(b"a library"))
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(peers, "_unpacked", [])
    monkeypatch.syspath_prepend(str(tmp_path))
    peers._unpack_fa3()
    found = [Path(entry) / "_vllm_fa3_C.abi3.so" for entry in sys.modules["vllm.vllm_flash_attn"].__path__]
    assert [path.read_bytes() for path in found if path.exists()] == [b"a library"]
    assert not (package / "_vllm_fa3_C.abi3.so").exists()
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for unpacked in peers._unpacked:
        unpacked.cleanup()
