"""A package for vLLM is an ordinary wheel, and a spec that vLLM has no call for has none."""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from packaging.specifiers import SpecifierSet
from padded_spec import PADDED, spec_of
from rotation import some

from mlagen import __version__
from mlagen.cli import main
from mlagen.emit import render, render_plugin
from mlagen.emit.wheel import engine_wheel
from mlagen.layout import compose
from mlagen.layout.codec import encode
from mlagen.plan import load_plan
from mlagen.spec.stored import NAMED_LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
SPECS = sorted(path.stem for path in ROOT.glob("specs/*.yaml"))
TAKEN = {
    *("dsv2_lite", "dsv3", "dsv3_fp8", "dsv32", "dsv32_fp8", "glm47_flash", "glm5", "glm53", "kimi_k2", "kimi_k3"),
    *("minicpm3", "mistral_large3", "mistral_large4", "kimi_linear", "axk2_light", "dots3"),
    *("dsv3_fp8_products", "dsv41_fp8", "dsv4_flash", "dsv4_pro"),
    *("dsv3_prefill", "dsv3_prefill_tma", "glm5_prefill", "minicpm3_prefill"),
}
FIND = """
import json
from importlib.metadata import entry_points, requires
(found,) = entry_points(group="vllm.general_plugins")
print(json.dumps([found.name, found.value, found.load().__name__, requires("mlagen-vllm-dsv32")]))
"""


def stem_of(wheel: Path) -> str:
    """Name and version of a wheel."""
    return wheel.name.removesuffix("-py3-none-any.whl")


def test_wheel_holds_the_plugin_and_the_package_and_nothing_else(wheel_of) -> None:
    package = {f"mlagen_vllm_dsv32/dsv32/{file.name}" for file in render(load_plan(ROOT / "specs/dsv32.yaml")).files}
    plugin = {f"mlagen_vllm_dsv32/{name}.py" for name in ("__init__", "backend", "indexer")}
    stem = stem_of(wheel_of("dsv32"))
    information = {f"{stem}.dist-info/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt", "RECORD")}
    assert re.fullmatch(rf"mlagen_vllm_dsv32-{re.escape(__version__)}\+g[0-9a-f]{{8}}", stem)
    assert set(zipfile.ZipFile(wheel_of("dsv32")).namelist()) == package | plugin | information


@pytest.mark.parametrize(
    ("less", "parts"),
    [
        (("fp8_fp4_mqa_logits",), {"pick"}),
        (("top_k_per_row_decode",), {"score"}),
        (("fp8_fp4_mqa_logits", "top_k_per_row_decode"), None),
        ((), {"score", "pick"}),
    ],
)
def test_the_plugin_replaces_the_indexer_functions_that_the_package_has(
    less: tuple[str, ...], parts: set[str] | None, tmp_path: Path
) -> None:
    lines = (ROOT / "specs" / "dsv32.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "dsv32.yaml").write_text("".join(line for line in lines if line[4:].strip() not in less))
    files = {file.name: file.text for file in render_plugin(load_plan(tmp_path / "dsv32.yaml"), "vllm").files}
    assert ("indexer.install()" in files["__init__.py"]) == (parts is not None)
    found = files.get("indexer.py")
    assert (found and {part for part in ("score", "pick") if f"def {part}()" in found}) == parts
    if found is None:
        return
    (tmp_path / "indexer.py").write_text(found)
    for command in (["check"], ["format", "--diff"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
        done = subprocess.run([*ruff, "indexer.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_package_in_the_wheel_is_the_one_that_build_writes(wheel_of) -> None:
    archive = zipfile.ZipFile(wheel_of("dsv32_fp8"))
    paths = [*(ROOT / "generated" / "dsv32_fp8").glob("*.py")]
    assert paths
    for path in paths:
        assert archive.read(f"mlagen_vllm_dsv32_fp8/dsv32_fp8/{path.name}") == path.read_bytes()


def test_rows_without_rope_are_the_bytes_that_vllm_writes(tmp_path: Path) -> None:
    padded = load_plan(spec_of(PADDED, tmp_path)).layout
    assert padded is not None
    written = compose(NAMED_LAYOUTS["fp8_ds_mla"], 512, 64)
    rows = torch.randn(50, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    (ours,), (theirs,) = encode(padded, rows), encode(written, torch.cat((rows, torch.zeros(50, 64)), 1).bfloat16())
    assert ours.shape == (50, 656)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "takes"),
    [
        ({"bytes: 128": "bytes: 112"}, "cache.layout: got 'fp8_ds_mla_without_rope'"),
        ({"tile: 128": "tile: 64", "bytes: 128": "bytes: 112"}, "cache.layout: got 'fp8_ds_mla_without_rope'"),
        ({"{kind: pad, bytes: 128}": "{kind: pad, bytes: 64}\n      - {kind: pad, bytes: 64}"}, None),
    ],
)
def test_rows_of_other_bytes_are_refused(change: dict[str, str], takes: str | None, tmp_path: Path) -> None:
    path = spec_of(PADDED, tmp_path)
    text = path.read_text(encoding="utf-8")
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    done = CliRunner().invoke(main, ["package", str(path), "--for", "vllm", "--out", str(tmp_path)])
    assert done.exit_code == (2 if takes else 0), done.output
    assert takes is None or takes in done.stderr


def test_shorter_rows_without_rope_are_refused_with_vllms_size(tmp_path: Path) -> None:
    command = ["package", str(ROOT / "specs" / "glm53_fp8.yaml"), "--for", "vllm", "--out", str(tmp_path)]
    said = CliRunner().invoke(main, command).stderr
    assert "got rows of 528 bytes; a package for vLLM takes the 656 that vLLM writes as fp8_ds_mla" in said


def test_record_names_every_file_with_its_hash(wheel_of) -> None:
    archive = zipfile.ZipFile(wheel_of("dsv3"))
    (record,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
    rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
    assert [row[0] for row in rows] == archive.namelist()
    for name, digest, size in rows[:-1]:
        data = archive.read(name)
        wanted = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={wanted}", str(len(data)))


def test_wheel_is_the_same_bytes_each_time() -> None:
    plan = load_plan(ROOT / "specs" / "dsv32.yaml")
    assert engine_wheel(plan, "vllm") == engine_wheel(plan, "vllm")


def test_metadata_asks_for_the_tritons_that_are_proved_and_not_for_vllm(wheel_of) -> None:
    archive = zipfile.ZipFile(wheel_of("dsv32"))
    metadata = email.message_from_bytes(archive.read(f"{stem_of(wheel_of('dsv32'))}.dist-info/METADATA"))
    asked = dict(line.split(">=") if ">=" in line else (line, "") for line in metadata.get_all("Requires-Dist"))
    assert set(asked) == {"torch", "triton"}
    proved = load_plan(ROOT / "specs" / "dsv32.yaml")
    takes = SpecifierSet(f">={asked['triton']}")
    assert all(f"{version}.0" in takes for version in ("3.6", "3.7", "3.8", "3.9"))
    assert "3.10.0" not in takes
    assert metadata["Version"] == stem_of(wheel_of("dsv32")).partition("-")[2]
    assert metadata["Summary"].endswith(proved.spec.title)


def test_pip_installs_it_and_its_entry_point_is_found(wheel_of, tmp_path: Path) -> None:
    venv.create(tmp_path / "fresh", symlinks=True, with_pip=False)
    python = tmp_path / "fresh" / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel_of("dsv32"))], check=True, env=clean)
    done = subprocess.run(
        [str(python), "-c", FIND], cwd=tmp_path, env=clean, capture_output=True, text=True, check=True
    )
    name, value, function, asked = json.loads(done.stdout)
    assert (name, value, function) == ("mlagen_dsv32", "mlagen_vllm_dsv32:register", "register")
    assert not any("vllm" in one for one in asked)


@pytest.mark.parametrize("name", [*sorted({*SPECS} - TAKEN), *some(TAKEN, 10)])
def test_a_spec_has_a_package_for_vllm_or_one_line_that_says_why_not(name: str, tmp_path: Path) -> None:
    command = ["package", str(ROOT / "specs" / f"{name}.yaml"), "--for", "vllm", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, command)
    if name in TAKEN:
        assert done.exit_code == 0, done.output
        (wheel,) = tmp_path.iterdir()
        assert done.stdout == f"{wheel}\n"
        assert stem_of(wheel).startswith(f"mlagen_vllm_{name}-{__version__}+g")
    else:
        assert done.exit_code == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"{ROOT / 'specs' / f'{name}.yaml'}: ")
        assert "; a package for vLLM takes " in line
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("topk: 2048", "topk: 2048\n  window: 64"), "attention.window: got 64; a package for vLLM takes none"),
        (("attn_sink: optional", "attn_sink: required"), "attention.attn_sink: got 'required'"),
        (("layout: bf16", "layout: bf16\n  block_size: 64"), "cache.block_size: got 64"),
        (("  - flash_mla_sparse_fwd", "#"), "wrappers: got triton_mla_sparse_attention, concat_and_cache_mla"),
    ],
)
def test_specs_with_arguments_that_vllm_does_not_pass_are_refused(
    change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    text = (ROOT / "specs" / "dsv32.yaml").read_text(encoding="utf-8")
    assert change[0] in text
    (tmp_path / "dsv32.yaml").write_text(text.replace(*change, 1), encoding="utf-8")  # the first is attention's
    done = CliRunner().invoke(main, ["package", str(tmp_path / "dsv32.yaml"), "--for", "vllm", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert said in done.stderr
    assert not list(tmp_path.glob("*.whl"))
