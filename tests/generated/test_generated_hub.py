"""Hugging Face's `kernels` loads a kernel repository from the disk and accepts its metadata."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from attention_specs import ROOT
from checked_in import SPECS, spec_of
from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata
from kernels.archs import _supports_cuda_capability
from kernels.backends import CUDA, ROCm
from kernels.variants import _resolve_variant_for_system, get_variants_local
from packaging.version import Version

from mlagen.backends.engines.hub import repo_of
from mlagen.emit.hub import hub_repository, write_repository
from mlagen.plan import load_plan
from mlagen.spec.targets import runs

CALLS = Path(__file__).with_name("hub_calls.py")
CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
WINDOW = """\
name: window
title: A window over few tokens
model: {num_heads: 4, kv_lora_rank: 32, qk_rope_head_dim: 16, v_head_dim: 32, dtype: bf16}
attention: {kind: dense, window: 21}
cache: {layout: bf16, block_size: 16}
wrappers: [flash_mla_with_kvcache, concat_and_cache_mla]
targets: [sm80]
"""
QUANTISED = WINDOW.replace("name: window", "name: quantised").replace(
    "kind: dense, window: 21", "kind: sparse, topk: 16"
)
QUANTISED = QUANTISED.replace("layout: bf16", "layout: fp8_per_tensor")


def repository(spec: Path, folder: Path) -> Path:
    """The repository of a spec, in a folder."""
    plan = load_plan(spec)
    repo = repo_of(plan, None)
    write_repository(hub_repository(plan, repo), folder / repo.name)
    return folder / repo.name


def in_kernels(mode: str, repositories: Sequence[Path], cwd: Path) -> list[str]:
    """Lines that `hub_calls.py` prints in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), environment.get("PYTHONPATH", "")))
    command = [sys.executable, str(CALLS), mode, *map(str, repositories)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.interpreter
def test_kernels_loads_a_repository_and_its_functions_agree_with_plain_torch(tmp_path: Path) -> None:
    specs = [spec_of(name) for name in ("odd", "odd_prefill")]
    other = tmp_path / "odd.yaml"  # a second version of a kernel, in the same process
    other.write_text(specs[0].read_text(encoding="utf-8").replace('lse_base: "2"', "lse_base: e"), encoding="utf-8")
    made = [*(repository(spec, tmp_path) for spec in specs), repository(other, tmp_path / "other")]
    ids = [Metadata.read_from_file(path / "build/torch-cuda/metadata.json").id for path in made]
    lines = [line.partition(" ") for line in in_kernels("call", made, tmp_path)]
    said = {name: sorted(rest for one, _, rest in lines if one == name) for name in ids}
    assert len(said) == 3
    for name, spec in zip(ids, (*specs, other), strict=True):
        plan = load_plan(spec)
        operators = [f"torch.ops.{name}"] if plan.ops else []
        assert said[name] == sorted([*plan.spec.wrappers, *operators])


@pytest.mark.interpreter
def test_benchmarks_agree_with_their_references(tmp_path: Path) -> None:
    specs = [spec_of(name) for name in ("odd", "odd_prefill")]
    for name, text in (("window", WINDOW), ("quantised", QUANTISED)):
        specs.append(tmp_path / f"{name}.yaml")
        specs[-1].write_text(text)
    lines = in_kernels("benchmark", [repository(spec, tmp_path) for spec in specs], tmp_path)
    assert [line.partition(" ")[2] for line in lines] == ["decode", "prefill", "causal", "decode", "decode"]


@pytest.mark.parametrize("name", [path.stem for path in SPECS])
def test_metadata_of_every_spec_is_valid_and_its_digests_are_those_of_the_files(name: str, tmp_path: Path) -> None:
    path = repository(spec_of(name), tmp_path)
    folders = sorted((path / "build").glob("torch-*"))
    assert [one.name for one in folders] in (["torch-cuda"], ["torch-cuda", "torch-rocm"])
    for folder in folders:
        metadata = Metadata.read_from_file(folder / "metadata.json")
        assert (str(metadata.name), metadata.version) == (path.name, 0)
        assert metadata.id.isidentifier()
        assert metadata.digest is not None
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))
        (folder / "__init__.py").write_text("")
        with pytest.raises(DigestValidationError, match=r"__init__\.py"):
            metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))


@pytest.mark.parametrize(
    ("backend", "wanted"), [(CUDA(Version("13.0")), "torch-cuda"), (ROCm(Version("7.2")), "torch-rocm")]
)
def test_kernels_chooses_the_variant_of_the_backend(backend: CUDA | ROCm, wanted: str, tmp_path: Path) -> None:
    variants = get_variants_local(repository(spec_of("odd"), tmp_path) / "build")
    system = {"cpu": "x86_64", "os": "linux", "torch_version": Version("2.13"), "torch_cxx11_abi": True}
    found, _ = _resolve_variant_for_system(variants, backend, **system, tvm_ffi_version=None)
    assert [one.variant_str for one in found] == [wanted]


@pytest.mark.parametrize("name", ["dsv3", "dsv32_fp8_tensor", "dsv3_prefill_tma"])
def test_kernels_takes_the_gpus_that_the_targets_run_on(name: str, tmp_path: Path) -> None:
    path = repository(spec_of(name), tmp_path) / "build/torch-cuda/metadata.json"
    archs = Metadata.read_from_file(path).backend.archs
    assert archs is not None
    targets = load_plan(spec_of(name)).spec.targets
    for major, minor in CAPABILITIES:
        assert _supports_cuda_capability(archs, (major, minor)) == (runs(f"sm{major}{minor}", targets) is not None)


def test_older_kernels_load_it_by_its_own_name(tmp_path: Path) -> None:
    path = repository(spec_of("odd"), tmp_path) / "build/torch-cuda"
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('x1', sys.argv[1])\n"
        "module = sys.modules['x1'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(module.flash_mla_sparse_fwd.__module__)\n"
    )
    command = [sys.executable, "-B", "-c", code, str(path / "mlagen_odd/__init__.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{Metadata.read_from_file(path / 'metadata.json').id}.sparse_fwd\n"


def test_kernels_info_describes_it(tmp_path: Path) -> None:
    path = repository(spec_of("odd"), tmp_path)
    command = [sys.executable, "-c", "import sys; from kernels.cli import main; sys.exit(main())", "info", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert (said["Name"], said["Version"], said["License"]) == ("mlagen-odd", "0", "Apache-2.0")
    assert said["Backends"] == "cuda, rocm"
