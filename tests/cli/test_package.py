"""`mlagen package`: wheels by content, repositories of kernels, proofs, kernels compiled ahead, the next commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from cli_specs import SPEC, Run

import mlagen

DENSE = """\
name: r384
title: Own dims
model: {num_heads: 20, kv_lora_rank: 384, qk_rope_head_dim: 32, v_head_dim: 384, dtype: bf16}
attention: {kind: dense}
cache: {layout: bf16, block_size: 64}
wrappers: [flash_mla_with_kvcache]
targets: [sm90]
"""
SERVED = {
    "vllm": "vllm serve MODEL --attention-backend MLAGEN_R384 --kv-cache-dtype auto",
    "sglang": "SGLANG_PLUGINS=mlagen_r384 python -m sglang.launch_server --model-path MODEL "
    "--attention-backend flashmla",
}


@pytest.fixture
def spec(workspace: Path) -> Path:
    (workspace / "my.yaml").write_text(DENSE)
    return workspace / "my.yaml"


def wheels(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


@pytest.mark.parametrize("engine", SERVED)
def test_the_next_commands_are_printed(run: Run, spec: Path, engine: str) -> None:
    result = run("package", "my.yaml", "--for", engine)
    assert result.exit_code == 0
    assert re.fullmatch(rf"dist/mlagen_{engine}_r384-\S+\+g[0-9a-f]{{8}}-py3-none-any\.whl\n", result.stdout)
    unproved = "not proved; fix with: mlagen build my.yaml"
    said = [unproved, f"pip install {result.stdout.strip()}", SERVED[engine]]
    assert result.stderr.splitlines() == said
    as_json = json.loads(run("package", "my.yaml", "--for", engine, "--json").stdout)
    assert as_json == {
        "engine": engine,
        "wheel": result.stdout.strip(),
        "proved": False,
        "serve": SERVED[engine],
    }


def test_a_repository_of_kernels_and_the_next_commands_are_printed(run: Run, spec: Path) -> None:
    result = run("package", "my.yaml", "--for", "hub", "--repo", "me/dense-mla@v2")
    assert (result.exit_code, result.stdout) == (0, "dist/dense-mla\n")
    commands = [
        "LOCAL_KERNELS=me/dense-mla=dist/dense-mla python -c 'from kernels import get_kernel; "
        """get_kernel("me/dense-mla", version=2).warmup()'""",
        "kernel-builder upload dist/dense-mla --repo-id me/dense-mla",
    ]
    assert result.stderr.splitlines() == ["not proved; fix with: mlagen build my.yaml", *commands]
    as_json = json.loads(run("package", "my.yaml", "--for", "hub", "--repo", "me/dense-mla@v2", "--json").stdout)
    wanted = {"repository": "dist/dense-mla", "repo": "me/dense-mla", "next": commands, "proved": False}
    assert as_json == wanted
    assert wheels(Path("dist")) == ["dense-mla"]


def test_a_repository_is_named_for_its_spec(run: Run, spec: Path) -> None:
    assert run("package", "my.yaml", "--for", "hub").stdout == "dist/mlagen-r384\n"
    other = run("package", "my.yaml", "--for", "vllm", "--repo", "me/mla")
    assert (other.exit_code, other.stderr) == (2, "--repo: takes none without --for hub\n")


def test_other_content_is_another_version_in_the_place_of_the_earlier(run: Run, spec: Path) -> None:
    first = run("package", "my.yaml", "--for", "vllm").stdout
    assert run("package", "my.yaml", "--for", "vllm").stdout == first
    spec.write_text(DENSE.replace("num_heads: 20", "num_heads: 10"))
    second = run("package", "my.yaml", "--for", "vllm").stdout
    assert second != first
    assert wheels(Path("dist")) == [Path(second.strip()).name]


def test_a_data_set_of_flashinfer_bench_is_written(run: Run, workspace: Path) -> None:
    (workspace / "mine.yaml").write_text(
        DENSE.replace("384", "512").replace("num_heads: 20", "num_heads: 64").replace("head_dim: 32", "head_dim: 64")
    )
    done = run("package", "mine.yaml", "--for", "flashinfer-bench")
    root = "dist/r512-flashinfer-bench"
    said = ["not proved; fix with: mlagen build mine.yaml", f"flashinfer-bench run --local {root}"]
    assert (done.exit_code, done.stdout, done.stderr.splitlines()) == (0, f"{root}\n", said)
    (Path(root) / "traces").mkdir()
    (Path(root) / "workloads" / "old.jsonl").touch()
    as_json = json.loads(run("package", "mine.yaml", "--for", "flashinfer-bench", "--json").stdout)
    assert len(as_json["definitions"]) == 8
    assert sorted(path.name for path in Path(root).iterdir()) == [
        "blob",
        "definitions",
        "solutions",
        "traces",
        "workloads",
    ]
    assert not (Path(root) / "workloads" / "old.jsonl").exists()


def test_a_spec_that_serves_no_definition_is_refused(run: Run, spec: Path) -> None:
    done = run("package", "my.yaml", "--for", "flashinfer-bench")
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "r384: serves no definition of flashinfer-bench; they need flash_mla_with_kvcache, dense" in done.stderr
    assert not Path("dist").exists()


def test_compiled_kernels_are_refused_for_flashinfer_bench(run: Run, spec: Path) -> None:
    done = run("package", "my.yaml", "--for", "flashinfer-bench", "--compiled", "sm90")
    assert done.exit_code == 2
    assert "--compiled: takes none with --for flashinfer-bench" in done.stderr


@pytest.mark.thorough
def test_pip_replaces_the_earlier_wheel(run: Run, spec: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "fresh", symlinks=True, with_pip=False)
    python = tmp_path / "fresh" / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
    facts = []
    for heads in (20, 10, 20):
        spec.write_text(DENSE.replace("num_heads: 20", f"num_heads: {heads}"))
        wheel = run("package", "my.yaml", "--for", "vllm").stdout.strip()
        subprocess.run([*install, "--no-deps", "--no-index", wheel], check=True, env=clean)
        (init,) = (tmp_path / "fresh").glob("lib/*/site-packages/mlagen_vllm_r384/r384/__init__.py")
        facts.append(f'"num_heads": {heads}' in init.read_text())
    assert facts == [True, True, True]


@pytest.mark.parametrize(
    "other", [DENSE.replace("Own dims", "Other dims"), SPEC.replace("small", "r384")], ids=["dense", "sparse"]
)
def test_a_wheel_of_another_spec_is_not_replaced(run: Run, spec: Path, other: str) -> None:
    run("package", "my.yaml", "--for", "vllm")
    before = wheels(Path("dist"))
    spec.write_text(other)
    result = run("package", "my.yaml", "--for", "vllm")
    assert (result.exit_code, result.stdout, wheels(Path("dist"))) == (2, "", before)
    said = f"dist/{before[0]}: holds 'Attention backend of vLLM: Own dims', not 'Attention backend of vLLM: "
    assert result.stderr.startswith(said)
    assert result.stderr.endswith("; takes another --out, or a spec of another name\n")
    assert run("package", "my.yaml", "--for", "vllm", "--out", "other").exit_code == 0


def test_a_file_that_is_not_a_wheel_is_kept(run: Run, spec: Path) -> None:
    Path("dist").mkdir()
    Path("dist", "mlagen_vllm_r384-0.whl").write_text("mine")
    result = run("package", "my.yaml", "--for", "vllm")
    assert (result.exit_code, Path("dist", "mlagen_vllm_r384-0.whl").read_text()) == (2, "mine")


SMALL = SPEC.replace("targets: [sm80, gfx942]", "targets: [sm80, sm90]").replace(
    "topk: 16", "topk: 16, topk_length: none"
)
FIND = """
import pathlib, sys
from mlagen_vllm_small import small
folder = pathlib.Path(sys.argv[1])
small._launch.triton.knobs.cache.dir = str(folder)
small._ahead.take_compiled("sm90")
variants = {type(one).__name__: one for one in small.variants("sm90")}
print(len([path for path in folder.glob("*/*.cubin")]), len(small.variants("sm90")))
"""


@pytest.mark.compilation
def test_compiled_kernels_are_in_the_wheel_and_found_by_the_package(run: Run, workspace: Path, tmp_path: Path) -> None:
    (workspace / "specs" / "small.yaml").write_text(SMALL)
    result = run("package", "specs/small.yaml", "--for", "vllm", "--compiled", "sm90")
    assert result.exit_code == 0, result.stderr
    plain = run("package", "specs/small.yaml", "--for", "vllm", "--out", "plain").stdout
    assert Path(plain.strip()).name != Path(result.stdout.strip()).name
    with zipfile.ZipFile(result.stdout.strip()) as archive:
        (kernels,) = (name for name in archive.namelist() if name.endswith(".tar.xz"))
        assert re.fullmatch(r"mlagen_vllm_small/small/kernels-sm90-triton[\d.]+-[0-9a-f]{16}\.tar\.xz", kernels)
        archive.extractall(tmp_path / "site")
    cache = tmp_path / "cache"
    (tmp_path / "site" / "mlagen_vllm_small" / "__init__.py").write_text("")  # vLLM is not here
    found = subprocess.run(
        [sys.executable, "-c", FIND, str(cache)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{Path(mlagen.__file__).parents[1]}"},
        capture_output=True,
        text=True,
        check=True,
    )
    in_cache, variants = map(int, found.stdout.split())
    assert in_cache == variants > 0


def test_compiled_takes_the_specs_targets_and_triton_goes_with_it(run: Run, spec: Path) -> None:
    other = run("package", "my.yaml", "--for", "vllm", "--compiled", "sm80")
    assert (other.exit_code, other.stderr) == (2, "--compiled: got sm80; takes a target of r384: sm90\n")
    alone = run("package", "my.yaml", "--for", "vllm", "--triton", "3.8")
    assert alone.stderr == "--triton needs --compiled TARGET, since it compiles those kernels\n"
    assert not Path("dist").exists()
