"""Kernels compiled ahead: a package with its archive compiles nothing; without it, or with another's, everything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from mlagen.compile import installed, write_kernels
from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan

pytestmark = pytest.mark.compilation

SPEC = """\
name: ahead
title: A writer of rows
model: {num_heads: 4, kv_lora_rank: 64, qk_rope_head_dim: 16, v_head_dim: 64, dtype: bf16}
cache: {layout: bf16}
wrappers: [concat_and_cache_mla]
targets: [sm90]
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of a small package for sm90, in the package's own folder."""
    folder = tmp_path_factory.mktemp("ahead")
    (folder / "ahead.yaml").write_text(SPEC)
    package = folder / "generated" / "ahead"
    apply(compare(render(load_plan(folder / "ahead.yaml")), package))
    return write_kernels(package, "sm90", package, toolchain=installed())


def taken(package: Path, cache: Path) -> dict[str, int]:
    """How many kernels Triton compiled, and how many it found in its cache, once the package took its archives."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(Path(__file__).with_name("taken.py")), str(package), "sm90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def copied(archive: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(archive.parent, tmp_path / "elsewhere" / "ahead"))


def test_a_package_with_its_archive_compiles_nothing_wherever_it_lies(archive: Path, tmp_path: Path) -> None:
    package = copied(archive, tmp_path)
    assert taken(package, tmp_path / "cache") == {"compiled": 0, "taken": 4}
    # Again: existing files do not change.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    assert taken(package, tmp_path / "cache") == {"compiled": 0, "taken": 4}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == before


def test_an_archive_of_another_triton_or_none_is_no_error(archive: Path, tmp_path: Path) -> None:
    package = copied(archive, tmp_path)
    (package / archive.name).rename(package / "kernels-sm90-triton3.8.0-0123456789abcdef.tar.xz")
    assert taken(package, tmp_path / "cache") == {"compiled": 4, "taken": 0}


def test_an_archive_names_no_folder_of_the_machine_that_made_it(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert members
    for name, data in members.items():
        assert len(Path(name).parts) == 2
        assert str(archive.parent).encode() not in data


def test_the_same_text_gives_the_same_kernels(archive: Path, tmp_path: Path) -> None:
    again = write_kernels(archive.parent, "sm90", tmp_path / "again", toolchain=installed())
    with tarfile.open(archive) as first, tarfile.open(again) as second:
        assert first.getnames() == second.getnames()
