"""A kernel repository: its files from its spec, names that no other content has, folders that it may not replace."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from checked_in import SPECS, spec_of
from emit_specs import ROOT, make_spec

from mlagen.backends.engines.hub import LICENSE, repo_of, variants_of
from mlagen.emit import render
from mlagen.emit.hub import BENCHMARK, CARD, hub_repository, write_repository
from mlagen.errors import UsageError
from mlagen.plan import Plan, load_plan, make_plan


def repository(plan: Plan, text: str | None = None, **options: object) -> dict[str, bytes]:
    return hub_repository(plan, repo_of(plan, text), **options)


def below(files: dict[str, bytes], folder: str) -> dict[str, bytes]:
    return {name.removeprefix(folder): data for name, data in files.items() if name.startswith(folder)}


def on_disk(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def identity(files: dict[str, bytes], variant: str = "torch-cuda") -> str:
    return json.loads(files[f"build/{variant}/metadata.json"])["id"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return load_plan(spec_of("odd"))


@pytest.fixture(scope="module")
def files(plan: Plan) -> dict[str, bytes]:
    return repository(plan)


@pytest.fixture
def folder(files: dict[str, bytes], tmp_path: Path) -> Path:
    write_repository(files, tmp_path / "kernel")
    return tmp_path / "kernel"


def test_repository_is_the_same_bytes_each_time(plan: Plan, files: dict[str, bytes]) -> None:
    assert repository(plan) == files


def test_variants_hold_the_package_under_digests(plan: Plan, files: dict[str, bytes]) -> None:
    package = {file.name: file.text.encode() for file in render(plan).files}
    for variant in ("torch-cuda", "torch-rocm"):
        of_variant = below(files, f"build/{variant}/")
        metadata = json.loads(of_variant.pop("metadata.json"))
        digests = {name: base64.b64encode(hashlib.sha256(data).digest()).decode() for name, data in of_variant.items()}
        assert metadata["digest"] == {"algorithm": "sha256", "files": digests}
        namespace = b'NAMESPACE = "odd"', f'NAMESPACE = "{metadata["id"]}"'.encode()
        assert of_variant["ops.py"].partition(b"\n\n")[2] == package["ops.py"].replace(*namespace).partition(b"\n\n")[2]
        assert {name: data for name, data in of_variant.items() if name in package and name != "ops.py"} == {
            name: data for name, data in package.items() if name != "ops.py"
        }
        assert set(of_variant) == {*package, "mlagen_odd/__init__.py"}


def test_targets_decide_on_the_variants() -> None:
    for targets, wanted in (
        (("sm90", "sm100"), {"cuda": ("9.0", "10.0")}),
        (("gfx942",), {"rocm": ("gfx942",)}),
        (("gfx950", "sm120", "sm86"), {"cuda": ("12.0", "8.6"), "rocm": ("gfx950",)}),
    ):
        found = variants_of(make_plan(make_spec(targets=targets)))
        assert {one.backend: one.archs for one in found} == wanted


def test_other_content_has_another_module_name(plan: Plan, files: dict[str, bytes]) -> None:
    other = make_plan(make_spec(targets=("sm90",)))
    also = make_plan(make_spec(targets=("sm90",), lse_base="2"))
    names = [identity(files), identity(files, "torch-rocm"), *(identity(repository(one)) for one in (other, also))]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


def test_kernels_compiled_ahead_are_in_the_variant_of_their_target(plan: Plan, files: dict[str, bytes]) -> None:
    archives = {f"kernels-{target}-triton3.7.1-0123456789abcdef.tar.xz": b"kernels" for target in ("sm90", "gfx942")}
    found = repository(plan, archives=archives)
    assert {name: data for name, data in found.items() if data == b"kernels"} == {
        f"build/{variant}/kernels-{target}-triton3.7.1-0123456789abcdef.tar.xz": b"kernels"
        for variant, target in (("torch-cuda", "sm90"), ("torch-rocm", "gfx942"))
    }
    assert identity(found) != identity(files)


def test_card_names_functions_and_says_what_is_proved(plan: Plan) -> None:
    card = repository(plan, "me/attention@v3", tritons=(), verified=False)[CARD].decode()
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    assert 'get_kernel("me/attention", version=3)' in card
    assert all(f"- `{name}`" in card for name in plan.spec.wrappers)
    assert "Not verified: `mlagen build`" in card
    card = repository(plan, tritons=("3.6.0", "3.7.1"), verified=True)[CARD].decode()
    assert "under Triton\n3.6.0, 3.7.1.\n" in card
    assert "agree with a float64 reference" in card
    assert "Not verified" not in card


def test_license_is_that_of_the_project() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["license"] == LICENSE


@pytest.mark.parametrize(
    "text",
    ["mla", "me/MLA", "me/a", "me/-mla", "me/mla-", "me/mla@3", "me/mla@v", "../mla", "a/b/c", "me/my_mla"],
)
def test_a_repository_of_another_form_is_refused(plan: Plan, text: str) -> None:
    with pytest.raises(UsageError, match=r"^--repo: got .*, takes ORG/NAME or ORG/NAME@vN"):
        repo_of(plan, text)


def test_a_name_of_a_module_is_refused(plan: Plan) -> None:
    with pytest.raises(UsageError, match="got the name merge-states, takes one that no module of the package has"):
        repository(plan, "me/merge-states")


def test_repository_takes_the_place_of_an_earlier_one(plan: Plan, files: dict[str, bytes], folder: Path) -> None:
    (folder / "build/torch-cuda/__pycache__").mkdir()
    (folder / "build/torch-cuda/__pycache__/ops.pyc").write_bytes(b"")
    named = repository(plan, "me/attention@v3")
    write_repository(named, folder)
    assert on_disk(folder) == named
    assert list(folder.parent.iterdir()) == [folder]


def changed(folder: Path, how: str) -> None:
    """Makes a folder one that may not be replaced."""
    if how == "more":
        (folder / "build" / "notes.md").write_text("mine")
    elif how == "edited":
        (folder / CARD).write_text("mine")
    elif how == "linked":
        (folder / CARD).unlink()
        os.symlink(folder / BENCHMARK, folder / CARD)
    elif how == "other":
        path = folder / "mlagen.json"
        path.write_text(path.read_text().replace("Odd sizes", "Even sizes"))
    elif how == "broken":
        (folder / "mlagen.json").write_text("[]")
    else:
        (folder / "mlagen.json").unlink()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("more", "build/notes.md: not a file of mlagen's, and not removed; move it elsewhere"),
        ("edited", "build/CARD.md: edited by hand, and not overwritten; move it elsewhere"),
        ("linked", "build/CARD.md: edited by hand, and not overwritten; move it elsewhere"),
        ("other", ": holds 'Even sizes"),
        ("broken", ": is no kernel repository of mlagen's; takes another --out"),
        ("foreign", ": is no kernel repository of mlagen's; takes another --out"),
    ],
)
def test_a_folder_with_other_files_is_left_alone(files: dict[str, bytes], folder: Path, how: str, said: str) -> None:
    changed(folder, how)
    before = on_disk(folder)
    with pytest.raises(UsageError) as error:
        write_repository(files, folder)
    assert said in str(error.value)
    assert on_disk(folder) == before


@pytest.mark.parametrize("name", [path.stem for path in SPECS])
def test_benchmark_reads_as_written_by_hand(name: str, tmp_path: Path) -> None:
    files = repository(load_plan(spec_of(name)))
    # Two quantised caches with different writers; a rotated output; a cache in two tensors.
    if name in ("odd_fp8", "dsv4_flash_out_rope", "dsv4_flash_out_fp8", "ckv_kpe"):
        assert BENCHMARK not in files
        return
    (tmp_path / "benchmark.py").write_bytes(files[BENCHMARK])
    for command in (["check"], ["format", "--diff"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
        done = subprocess.run([*ruff, "benchmark.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
