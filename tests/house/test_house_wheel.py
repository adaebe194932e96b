"""The wheel is complete: it contains all files that it needs from the checkout."""

import email
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from checked_in import package_of, spec_of
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
TEXT_ONLY = ("--no-compile", "--no-verify")

RENDER = """
import sys
from pathlib import Path
import mlagen
from mlagen.emit import render
from mlagen.plan import make_plan
from mlagen.spec import load

assert Path(mlagen.__file__).is_relative_to(sys.prefix), mlagen.__file__
print([file.name for file in render(make_plan(load(Path(sys.argv[1])))).files])
"""


def run(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it may name a checkout
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"),
        *("--no-deps", "--no-build-isolation", "-w", folder, ROOT),
        cwd=folder,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel, and of this one the libraries but not the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # A .pth file adds a folder, but does not read the .pth files in it: an editable install stays out of reach.
    (Path(own) / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check"),
        *("--no-deps", "--ignore-installed", wheel),
        cwd=folder,
    )
    return python


def files(folder: str) -> set[str]:
    """The files in a folder of the checkout, without Python's caches."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_wheel_holds_the_code_the_templates_the_specs_and_the_proofs_and_nothing_else(wheel: Path) -> None:
    expected = files("mlagen")
    for folder in ("templates", "specs"):
        expected |= {f"mlagen/_{name}" for name in files(folder)}
    expected |= {f"mlagen/_{name.removeprefix('generated/')}" for name in files("generated/proofs")}
    assert {
        "mlagen/py.typed",
        "mlagen/bench/report/page.html.jinja",
        "mlagen/spec/layouts/bf16.yaml",
        "mlagen/_templates/sparse_fwd.py.jinja",
        "mlagen/_specs/schema.json",
        "mlagen/_specs/dsv32.yaml",
        "mlagen/_proofs/compile.json",
        "mlagen/_specs/tuned/dsv32/sm90.yaml",
    } <= expected
    contents = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert contents == expected


def test_the_wheels_metadata_names_its_version_and_requirements(wheel: Path) -> None:
    (name,) = (each for each in zipfile.ZipFile(wheel).namelist() if each.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))
    required = {Requirement(each).name: Requirement(each).specifier for each in metadata.get_all("Requires-Dist", [])}
    for library, oldest, newest, too_new in (
        ("triton", "3.6.0", "3.9.9", "3.10.0"),
        ("torch", "2.11.0", "2.15.9", "2.16"),
    ):
        assert all(version in required[library] for version in (oldest, newest)), library
        assert too_new not in required[library]
    assert {url.partition(",")[0] for url in metadata.get_all("Project-URL", [])} == {
        "Changelog",
        "Homepage",
        "Repository",
    }
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).startswith("# mlagen")
    assert metadata["Keywords"]


def test_wheel_holds_every_known_spec(wheel: Path) -> None:
    specs = {f"mlagen/_specs/{path.name}" for path in ROOT.glob("specs/*.yaml")}
    assert specs
    assert specs <= set(zipfile.ZipFile(wheel).namelist())


def test_installed_wheel_prints_a_known_spec_that_builds(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        run(installed, "-m", "mlagen", "init", "dsv3_prefill", "--gpu", "all", cwd=tmp_path)
    )
    run(installed, "-m", "mlagen", "build", "my.yaml", "--no-compile", "--no-verify", cwd=tmp_path)
    assert (tmp_path / "generated" / "dsv3_prefill" / "__init__.py").exists()


def test_installed_wheel_has_the_gpu_records_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    records = json.loads((ROOT / "generated" / "proofs" / "gpu.json").read_text())
    script = "import pathlib, mlagen.verify.gpu_records as r; print(*r.records_of(pathlib.Path('generated')))"
    assert run(installed, "-c", script, cwd=tmp_path).split() == list(records)


def test_installed_wheel_renders_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    spec = tmp_path / "odd.yaml"
    spec.write_bytes(spec_of("odd").read_bytes())
    assert "sparse_fwd.py" in run(installed, "-c", RENDER, spec, cwd=tmp_path)


def test_installed_wheel_has_the_command(installed: Path, tmp_path: Path) -> None:
    assert "build" in run(installed, "-m", "mlagen", "--help", cwd=tmp_path)
    assert "build" in run(installed.with_name("mlagen"), "--help", cwd=tmp_path)


def test_installed_wheel_makes_a_benchmarks_page(installed: Path, tmp_path: Path) -> None:
    rows = ROOT / "docs" / "benchmarks" / "older" / "h200-dsv32.json"
    run(installed, "-m", "mlagen", "bench", "--from", rows, "--only", "prefill", "--html", "page.html", cwd=tmp_path)
    assert "<svg" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def known(installed: Path) -> Path:
    """The folder of the specs in the installed wheel."""
    found = run(installed, "-c", "from mlagen.spec.known import specs_dir; print(specs_dir())", cwd=installed.parent)
    return Path(found.strip())


def text_of(folder: Path) -> dict[str, bytes]:
    """The generated files of a package."""
    return {path.name: path.read_bytes() for path in folder.glob("*.py")}


@pytest.mark.parametrize("spec", ["dsv32", "ckv_kpe"])
def test_installed_wheel_builds_its_specs_to_the_same_bytes(
    installed: Path, known: Path, tmp_path: Path, spec: str
) -> None:
    assert known.is_relative_to(installed.parents[1])
    run(installed, "-m", "mlagen", "build", known / f"{spec}.yaml", *TEXT_ONLY, cwd=tmp_path)
    assert text_of(tmp_path / "generated" / spec) == text_of(package_of(spec))
    assert [path.name for path in tmp_path.iterdir()] == ["generated"]


def test_a_spec_copied_out_of_the_wheel_gives_the_same_bytes(installed: Path, known: Path, tmp_path: Path) -> None:
    shutil.copy(known / "dsv3_prefill.yaml", tmp_path)
    run(installed, "-m", "mlagen", "build", "dsv3_prefill.yaml", *TEXT_ONLY, cwd=tmp_path)
    assert text_of(tmp_path / "generated" / "dsv3_prefill") == text_of(ROOT / "generated" / "dsv3_prefill")


def test_a_tuned_spec_copied_out_of_the_wheel_gives_the_same_bytes(
    installed: Path, known: Path, tmp_path: Path
) -> None:
    shutil.copy(known / "dsv32.yaml", tmp_path)
    run(installed, "-m", "mlagen", "build", "dsv32.yaml", *TEXT_ONLY, cwd=tmp_path)
    assert text_of(tmp_path / "generated" / "dsv32") == text_of(ROOT / "generated" / "dsv32")


def test_installed_wheel_shows_the_plan_of_its_specs_with_their_tuned_tiles(
    installed: Path, known: Path, tmp_path: Path
) -> None:
    shown = run(installed, "-m", "mlagen", "show", "plan", known / "dsv32.yaml", "--json", cwd=tmp_path)
    tiles = dict(json.loads(shown)["sparse_fwd"]["tiles"])
    assert any(row["reason"].startswith("tuned: ") for row in tiles["sm90"])


def test_installed_wheel_prints_the_schema_that_it_holds(installed: Path, known: Path, tmp_path: Path) -> None:
    schema = run(installed, "-m", "mlagen", "schema", cwd=tmp_path)
    assert schema == (known / "schema.json").read_text(encoding="utf-8")
