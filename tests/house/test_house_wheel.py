"""The wheel stands alone: what it needs of the checkout is inside."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

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
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
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


def test_wheel_holds_every_template(wheel: Path) -> None:
    templates = {
        f"mlagen/_templates/{path.relative_to(ROOT / 'templates')}" for path in ROOT.glob("templates/**/*.jinja")
    }
    assert templates
    templates |= {str(path.relative_to(ROOT)) for path in ROOT.glob("mlagen/**/*.jinja")}
    assert "mlagen/bench/page.html.jinja" in templates
    assert templates <= set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_every_known_spec(wheel: Path) -> None:
    specs = {f"mlagen/_specs/{path.name}" for path in ROOT.glob("specs/*.yaml")}
    assert specs
    assert specs <= set(zipfile.ZipFile(wheel).namelist())


def test_installed_wheel_prints_a_known_spec_that_builds(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(run(installed, "-m", "mlagen", "init", "odd", cwd=tmp_path))
    run(installed, "-m", "mlagen", "build", "my.yaml", "--no-compile", "--no-verify", cwd=tmp_path)
    assert (tmp_path / "generated" / "odd" / "__init__.py").exists()


def test_installed_wheel_renders_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    spec = tmp_path / "odd.yaml"
    spec.write_bytes((ROOT / "specs" / "odd.yaml").read_bytes())
    assert "sparse_attention.py" in run(installed, "-c", RENDER, spec, cwd=tmp_path)


def test_installed_wheel_has_the_command(installed: Path, tmp_path: Path) -> None:
    assert "build" in run(installed, "-m", "mlagen", "--help", cwd=tmp_path)
    assert "build" in run(installed.with_name("mlagen"), "--help", cwd=tmp_path)


def test_installed_wheel_makes_a_benchmarks_page(installed: Path, tmp_path: Path) -> None:
    rows = ROOT / "docs" / "benchmarks" / "h200-dsv32.json"
    run(installed, "-m", "mlagen", "bench", "--from", rows, "--only", "prefill", "--html", "page.html", cwd=tmp_path)
    assert "<svg" in (tmp_path / "page.html").read_text(encoding="utf-8")
