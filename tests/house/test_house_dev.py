"""./dev on different machines: the Python that it uses, when it installs, and its errors."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALLS = ("pip", "pip")  # of the project, and of flashinfer-bench without its requirements
TOOLS = ("bash", "cat", "chmod", "cksum", "dirname", "flock", "mkdir", "mv", "rm", "sed")

# A Python of VERSION: `-m venv` makes .venv with a pip that notes its call and installs a command `mlagen`.
PYTHON = """#!{bash}
case "$*" in
    *version_info*) echo {version} ;;
    *"import ensurepip"*) exit {lacks_venv} ;;
    "-m venv --clear "*)
        echo "venv {name}" >>log
        rm -rf .venv
        mkdir -p .venv/bin
        cat >.venv/bin/python <<'PIP'
#!{bash}
echo "pip" >>log
[[ ! -e pip_fails ]] || exit 1
cat >.venv/bin/mlagen <<'MLAGEN'
#!{bash}
echo "mlagen $*"
MLAGEN
chmod +x .venv/bin/mlagen
PIP
        chmod +x .venv/bin/python ;;
    *) exit 9 ;;
esac
"""


class Machine:
    """A checkout with ./dev, and a PATH that holds the tools of a shell and the Pythons a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.path = folder / "checkout", folder / "path"
        self.checkout.mkdir()
        self.path.mkdir()
        for name in ("dev", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.checkout)
        for tool in TOOLS:
            found = shutil.which(tool)
            if found:  # flock is not everywhere
                (self.path / tool).symlink_to(found)

    def python(self, name: str, version: str, *, lacks_venv: bool = False) -> None:
        text = PYTHON.format(bash=shutil.which("bash"), name=name, version=version, lacks_venv=int(lacks_venv))
        self.script(name, text)

    def script(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)
        (self.path / name).chmod(0o755)

    def dev(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["./dev", *arguments],
            cwd=self.checkout,
            env={"PATH": str(self.path), "CI": "true"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def log(self) -> list[str]:
        """Environments and packages that were installed since the last call."""
        log = self.checkout / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_takes_the_first_python_that_runs_and_fits(machine: Machine) -> None:
    machine.python("python3", "3.15")
    machine.script("python3.11", f"#!{shutil.which('bash')}\necho 'version manager: not installed' >&2\nexit 127\n")
    machine.python("python3.12", "3.12")
    done = machine.dev("mlagen", "build", "two words")
    assert (done.returncode, done.stdout) == (0, "mlagen build two words\n")
    assert done.stderr.count("\n") == 1
    assert machine.log() == ["venv python3.12", *INSTALLS]


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_takes_each_python_that_the_package_takes(machine: Machine, version: str) -> None:
    machine.python(f"python{version}", version)
    assert machine.dev("mlagen").returncode == 0
    assert machine.log() == [f"venv python{version}", *INSTALLS]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    assert project["requires-python"] == ">=3.11,<3.15"


@pytest.mark.parametrize("version", ["2.7", "3.10", "3.15", "3.110", "3.1"])
def test_without_a_suitable_python_it_names_its_requirements(machine: Machine, version: str) -> None:
    machine.python("python3", version)
    done = machine.dev("mlagen", "--help")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines()[-1].startswith("dev: needs Python 3.11 to 3.14;")
    assert not (machine.checkout / ".venv").exists()


def test_a_missing_venv_module_is_reported(machine: Machine) -> None:
    machine.python("python3", "3.11", lacks_venv=True)
    done = machine.dev("mlagen", "--help")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("dev: Python 3.11 lacks venv or ensurepip")


def test_passes_over_a_python_without_venv(machine: Machine) -> None:
    machine.python("python3", "3.11", lacks_venv=True)
    machine.python("python3.12", "3.12")
    assert machine.dev("mlagen").returncode == 0
    assert machine.log() == ["venv python3.12", *INSTALLS]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_installs_again_only_when_requirements_change(machine: Machine, name: str) -> None:
    machine.python("python3", "3.11")
    machine.dev("mlagen")
    machine.log()
    done = machine.dev("mlagen")
    assert (machine.log(), done.stderr) == ([], "")
    with (machine.checkout / name).open("a") as file:
        file.write("# changed\n")
    machine.dev("mlagen")
    assert machine.log() == [*INSTALLS]


def test_starts_afresh_after_an_install_that_failed(machine: Machine) -> None:
    machine.python("python3", "3.11")
    (machine.checkout / "pip_fails").touch()
    done = machine.dev("mlagen")
    assert (done.returncode, done.stdout) == (3, "")
    assert "dev: pip install failed" in done.stderr
    (machine.checkout / "pip_fails").unlink()
    machine.log()
    assert machine.dev("mlagen").returncode == 0
    assert machine.log() == ["venv python3", *INSTALLS]


def test_starts_afresh_in_a_checkout_that_was_moved(machine: Machine) -> None:
    machine.python("python3", "3.11")
    machine.dev("mlagen")
    machine.log()
    machine.checkout = machine.checkout.rename(machine.checkout.with_name("moved"))
    assert machine.dev("mlagen").returncode == 0
    assert machine.log() == ["venv python3", *INSTALLS]


def test_refuses_a_command_that_the_environment_lacks(machine: Machine) -> None:
    machine.python("python3", "3.11")
    done = machine.dev("mlagne")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == "dev: no command 'mlagne' in .venv/bin"


def test_shows_its_usage_without_a_command(machine: Machine) -> None:
    done = machine.dev()
    assert done.returncode == 2
    assert "./dev test" in done.stderr


def test_dev_test_runs_every_check_and_names_those_that_fail(machine: Machine) -> None:
    machine.python("python3", "3.11")
    machine.dev("mlagen")
    for name, code in (("ruff", 0), ("mypy", 1), ("lint-imports", 0), ("pytest", 1)):
        command = machine.checkout / ".venv" / "bin" / name
        command.write_text(f'#!{shutil.which("bash")}\necho "{name} $*" >>log\necho "{name} speaks"\nexit {code}\n')
        command.chmod(0o755)
    machine.log()
    done = machine.dev("test", "-k", "one or two")
    assert done.returncode == 1
    assert machine.log() == [
        "ruff check .",
        "ruff format --check .",
        "mypy ",
        "lint-imports ",
        "pytest -n auto --dist worksteal -k one or two",
    ]
    assert done.stdout.splitlines() == [
        "ok: ruff check .",
        "ok: ruff format --check .",
        "mypy speaks",
        "failed: mypy",
        "ok: lint-imports",
        "pytest speaks",
    ]
    assert done.stderr.splitlines() == ["dev test: failed: mypy", "dev test: failed: pytest"]


def test_a_quick_test_runs_every_check_and_the_rooms_that_take_seconds(machine: Machine) -> None:
    machine.python("python3", "3.11")
    machine.dev("mlagen")
    for name in ("ruff", "mypy", "lint-imports", "pytest"):
        command = machine.checkout / ".venv" / "bin" / name
        command.write_text(f'#!{shutil.which("bash")}\nprintf "%s|" {name} "$@" >>log\necho >>log\n')
        command.chmod(0o755)
    machine.log()
    done = machine.dev("test", "--quick", "-k", "one or two")
    assert done.returncode == 0
    *checks, pytest_line = machine.log()
    assert len(checks) == 4
    words = pytest_line.removesuffix("|").split("|")
    assert words[:5] == ["pytest", "-n", "auto", "--dist", "worksteal"]
    paths = [word for word in words if word.startswith("tests/")]
    rooms = {"spec", "plan", "layout", "emit", "cli", "generated", "house"}
    assert {path.split("/")[1] for path in paths} == {*rooms, "verify"}
    assert [path for path in paths if "/verify" in path] == ["tests/verify/test_gluon_smoke.py"]
    assert all((ROOT / path).exists() for path in paths)
    assert words[-4:] == [
        "-m",
        "not (compilation or gpu or interpreter or mutants or slow or thorough)",
        "-k",
        "one or two",
    ]
    marks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    assert words[-3] == f"not ({' or '.join(sorted(mark.partition(':')[0] for mark in marks))})"


def test_scripts_are_executable() -> None:
    assert all(os.access(ROOT / script, os.X_OK) for script in ("dev", ".ci/run"))
