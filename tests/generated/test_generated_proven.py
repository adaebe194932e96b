"""A package warns once, at its import, of a Triton that it was not compiled with."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from checked_in import PACKAGES, package_of
from rotation import drawn

from mlagen.bench import load_package
from mlagen.compile import default_cache_dir
from mlagen.plan.tritons import TRITONS, minor, minors

PROVEN = Path(__file__).with_name("proven.py")
OTHERS = [default_cache_dir() / "triton" / version for version in TRITONS]
OLDEST_MINOR, NEWEST_MINOR = minor(TRITONS[0]), minor(TRITONS[-1])
SOME = [folder for folder in PACKAGES if folder.name in drawn([folder.name for folder in PACKAGES], 3)]

WITHIN = ("3.6.0", "3.8.0+git123", "3.9.7", "3.9.0rc1")
OUTSIDE = ("3.5.1", "3.10.0.dev20270101", "4.0", "main")


def said(
    folder: Path | str = "", versions: Sequence[str] = (), packages: Sequence[Path] = PACKAGES
) -> dict[str, dict[str, dict]]:
    """Warnings and launches by version and package."""
    arguments = [str(folder), ",".join(versions), *map(str, packages)]
    command = [sys.executable, "-I", "-B", "-W", "error", str(PROVEN), *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert all(list(each) == [package.name for package in packages] for each in found.values())
    return found


def warnings_of(name: str, version: str) -> list[list[str]]:
    """The warnings of a package under a Triton: one, of the line that imports it, unless SPEC names the version."""
    known = load_package(package_of(name)).root.SPEC["triton"]
    if set(minors([version])) <= set(known):
        return []
    slower = "" if OLDEST_MINOR <= minor(version) <= NEWEST_MINOR else ", and each launch takes the host longer"
    text = f"{name} was compiled with Triton {', '.join(known)}, not with {version}: "
    return [["RuntimeWarning", f"{text}its kernels may spill or not compile{slower}", str(PROVEN)]]


@pytest.mark.parametrize("folder", ["", *OTHERS], ids=lambda folder: getattr(folder, "name", "installed"))
def test_a_package_warns_of_a_triton_that_it_was_not_compiled_with(folder: Path | str) -> None:
    if isinstance(folder, Path) and not folder.is_dir():
        pytest.skip(f"no Triton {folder.name} in {folder.parent}")
    ((version, packages),) = said(folder, packages=SOME if folder else PACKAGES).items()
    assert version == (folder.name if isinstance(folder, Path) else importlib.metadata.version("triton"))
    for name, package in packages.items():
        assert package == {"warnings": warnings_of(name, version), "public": 1, "kept": 1}


@pytest.fixture(scope="module")
def stand_ins() -> dict[str, dict[str, dict]]:
    """The same of some packages under the installed Triton, which calls itself otherwise."""
    return said(versions=(*WITHIN, *OUTSIDE), packages=SOME)


@pytest.mark.parametrize("version", WITHIN)
def test_a_minor_version_stands_for_its_releases(stand_ins: dict, version: str) -> None:
    for name, package in stand_ins[version].items():
        assert package == {"warnings": warnings_of(name, version), "public": 1, "kept": 1}


@pytest.mark.parametrize("version", OUTSIDE)
def test_outside_the_range_a_package_warns_once_and_launches_by_the_public_call(stand_ins: dict, version: str) -> None:
    for name, package in stand_ins[version].items():
        assert package == {"warnings": warnings_of(name, version), "public": 3, "kept": 0}


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_the_range_is_the_one_that_the_package_says(folder: Path) -> None:
    package = load_package(folder)
    assert set(package.root.SPEC["triton"]) <= set(minors(TRITONS))
    assert package.root.SPEC["triton"]
    assert importlib.import_module(f"{folder.name}._launch").SUPPORTED == (OLDEST_MINOR, NEWEST_MINOR)
