from __future__ import annotations

import lzma
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_packages import FlashInferModule, MakePackage
from checked_in import spec_of

from mlagen.bench.check import error_limit
from mlagen.bench.families import FAMILIES
from mlagen.bench.families.sparse_fwd import SparseFwdShape, default_shapes, make_inputs, reference
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers import PEERS as PEERS_OF_FAMILIES
from mlagen.bench.peers import cache as cache_peers
from mlagen.bench.peers import libraries
from mlagen.bench.peers.libraries import absence
from mlagen.bench.peers.sparse_fwd import PEERS, FlashInfer, SparseFwdPeer
from mlagen.spec import load
from mlagen.verify.call.facts import Facts

NAMES = [peer.name for peer in PEERS]
SPECS = Path(__file__).parents[3] / "specs"


@pytest.fixture
def without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No peer can be imported, even if it is installed."""
    for name in ("seed_sparse", "vllm", "flash_mla", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)


def test_every_family_has_its_peers() -> None:
    assert list(PEERS_OF_FAMILIES) == list(FAMILIES)


@pytest.mark.parametrize("peer", PEERS, ids=NAMES)
@pytest.mark.usefixtures("without_peers")
def test_a_missing_peer_says_so_in_one_line(peer: SparseFwdPeer, dsv32: BenchPackage, shape: SparseFwdShape) -> None:
    (inputs,) = make_inputs(shape, dsv32.facts, torch.device("cpu"), 0, sets=1)
    with pytest.raises(ImportError) as caught:
        peer.prepare(inputs)
    reason = absence(caught.value)
    assert reason.startswith("not installed (")
    assert "\n" not in reason


@pytest.mark.parametrize("peer", PEERS, ids=NAMES)
def test_peers_run_what_they_are_known_for(peer: SparseFwdPeer, dsv32: BenchPackage) -> None:
    assert [peer.unsupported(each, dsv32.facts) for each in default_shapes(dsv32.facts)] == [None] * 24


@pytest.mark.parametrize("peer", PEERS, ids=NAMES)
def test_peers_refuse_what_they_cannot_run(peer: SparseFwdPeer, dsv32: BenchPackage, shape: SparseFwdShape) -> None:
    odd = Facts.of(load(spec_of("odd")).model_dump(mode="json"))
    assert peer.unsupported(default_shapes(odd)[0], odd)
    assert peer.unsupported(shape, replace(dsv32.facts, block_size=64))


def test_only_some_peers_know_sinks_and_rows_without_rope(dsv32: BenchPackage, shape: SparseFwdShape) -> None:
    sink = replace(dsv32.facts, sink="required")
    bare = replace(dsv32.facts, d_rope=0)
    able = {peer.name: (peer.unsupported(shape, sink), peer.unsupported(shape, bare)) for peer in PEERS}
    assert able["FlashMLA"] == (None, None)
    assert all(able["vLLM Triton"])
    assert all(able["FA3 p1"])
    assert all(able["FlashInfer p1"])


@pytest.mark.parametrize("lengths", [None, "drawn"])
def test_flashinfer_takes_indices_for_pages(
    lengths: str | None, dsv32: BenchPackage, shape: SparseFwdShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "first_module", lambda _: FlashInferModule)
    (inputs,) = make_inputs(shape, dsv32.facts, torch.device("cpu"), 0, sets=1)
    if lengths:
        drawn = torch.randint(1, shape.topk, (shape.tokens,), generator=torch.Generator().manual_seed(0))
        inputs = replace(inputs, topk_length=drawn.int())
    call = FlashInfer().prepare(inputs)
    assert reference(inputs, dsv32.facts).error_of(call) <= error_limit(torch.bfloat16)


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
    monkeypatch.setattr(libraries, "_unpacked", [])
    monkeypatch.syspath_prepend(str(tmp_path))
    libraries._unpack_fa3()
    found = [Path(entry) / "_vllm_fa3_C.abi3.so" for entry in sys.modules["vllm.vllm_flash_attn"].__path__]
    assert [path.read_bytes() for path in found if path.exists()] == [b"a library"]
    assert not (package / "_vllm_fa3_C.abi3.so").exists()
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for unpacked in libraries._unpacked:
        unpacked.cleanup()


@pytest.fixture
def folder_of_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package that holds no library yet."""
    (tmp_path / "some_ops").mkdir()
    (tmp_path / "some_ops" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "some_ops", raising=False)
    return tmp_path / "some_ops"


def test_a_library_that_is_not_there_is_absent(folder_of_ops: Path) -> None:
    with pytest.raises(ImportError, match="some_ops has no _C"):
        libraries.load_packed_library("some_ops", "_C")
    with pytest.raises(ImportError):
        libraries.load_packed_library("no_such_ops", "_C")


def test_a_packed_library_of_ops_is_unpacked_before_it_is_loaded(folder_of_ops: Path) -> None:
    (folder_of_ops / "_C.abi3.so.xz").write_bytes(lzma.compress(b"no library"))
    with pytest.raises(OSError, match=r"_C\.abi3\.so"):  # it is found, unpacked and no library
        libraries.load_packed_library("some_ops", "_C")
    assert Path(libraries._unpacked[-1].name, "_C.abi3.so").read_bytes() == b"no library"


CACHE_KERNELS = {
    "concat_and_cache_mla": cache_peers.writers,
    "quantize_and_insert_k_cache": cache_peers.writers,
    "dequantize_and_gather_k_cache": cache_peers.gathers,
    "gather_and_maybe_dequant_cache": cache_peers.gathers,
}
# Layout: the wrappers that vLLM has a kernel for that knows it.
KNOWN = {
    "bf16": ["concat_and_cache_mla", "gather_and_maybe_dequant_cache"],
    "fp8_per_tensor": ["concat_and_cache_mla", "gather_and_maybe_dequant_cache"],
    "fp8_ds_mla": ["concat_and_cache_mla", "gather_and_maybe_dequant_cache"],
    "ue8m0_v4": ["quantize_and_insert_k_cache", "dequantize_and_gather_k_cache"],
    "nvfp4_ds_mla": [],
    "mxfp8_v41": [],
}


@pytest.mark.parametrize("layout", KNOWN)
def test_vllms_cache_kernels_run_the_layouts_that_they_know(make_package: MakePackage, layout: str) -> None:
    d_c = 448 if layout in ("ue8m0_v4", "mxfp8_v41") else 512
    its_layout = make_package({"concat_and_cache_mla": print}, layout, dims=(d_c, 64, 512)).layouts[0]
    able = [
        name
        for name, peers_of in CACHE_KERNELS.items()
        for peer in peers_of(name, its_layout, 64, torch.bfloat16)
        if peer.unsupported is None
    ]
    assert able == KNOWN[layout]


def test_vllms_cache_kernels_know_no_rows_without_rope(make_package: MakePackage) -> None:
    its_layout = make_package({"concat_and_cache_mla": print}, "fp8_ds_mla", dims=(512, 0, 512)).layouts[0]
    for name, peers_of in CACHE_KERNELS.items():
        assert all(peer.unsupported for peer in peers_of(name, its_layout, 64, torch.bfloat16))
