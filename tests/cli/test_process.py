"""The command as a process: its exit codes and the files it leaves after signals, full disks and readers that end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rotation import some

pytestmark = pytest.mark.thorough

BUILD = ("build", "--no-compile", "--device", "cpu")
MLAGEN = [sys.executable, "-m", "mlagen"]


@pytest.fixture
def temporary(writer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, and a workspace with an empty cache."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "temporary"


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MLAGEN, *arguments], capture_output=True, text=True, check=False, **options)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*MLAGEN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def processes() -> Iterator[tuple[int, int, str]]:
    """Number, parent and state of each process."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        yield int(path.parent.name), int(parent), state


def children(pid: int) -> list[int]:
    return [number for number, parent, _ in processes() if parent == pid]


def gone(pids: list[int]) -> bool:
    running = {number for number, _, state in processes() if state != "Z"}
    return not running & {*pids}


def wait(until: Callable[[], object]) -> None:
    for _ in range(1200):
        if until():
            return
        time.sleep(0.05)
    raise AssertionError


def at_work(process: subprocess.Popen[str]) -> list[int]:
    """The workers of a build, once they run."""
    wait(lambda: process.poll() is not None or len(children(process.pid)) >= 2)
    assert process.poll() is None, process.communicate()
    return children(process.pid)


def package() -> dict[str, bytes]:
    folder = Path("generated", "writer")
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def imports() -> bool:
    """Whether the package is there and imports, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", "import writer"], cwd="generated", capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["SIGKILL", *some(("SIGHUP", "SIGINT", "SIGTERM"), 1)])
def test_a_signal_ends_the_workers_and_leaves_the_old_package(temporary: Path, writer: Path, name: str) -> None:
    number = signal.Signals[name]
    assert run("build", "--no-compile", "--no-verify").returncode == 0
    before = package()
    writer.write_text(writer.read_text().replace("A small model", "Another model"))
    process = start(*BUILD)
    workers = at_work(process)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in err
    wait(lambda: gone(workers))
    assert package() == before
    assert imports()
    if number != signal.SIGKILL:  # after which nobody is left to clear them
        assert list(temporary.iterdir()) == []
    assert [path.name for path in Path("generated").iterdir()] == ["writer"]


@pytest.mark.interpreter
@pytest.mark.parametrize("force", some([False, True], 1))
def test_an_edit_during_the_build_is_found_before_it_is_overwritten(temporary: Path, writer: Path, force: bool) -> None:
    assert run("build", "--no-compile", "--no-verify").returncode == 0
    writer.write_text(writer.read_text().replace("A small model", "Another model"))
    process = start(*BUILD, *["--force"] * force)
    at_work(process)
    edited = Path("generated", "writer", "cache.py")
    edited.write_text(edited.read_text() + "# mine\n")
    before = package()
    _, err = process.communicate()
    if force:
        assert process.returncode == 0
        assert "# mine" not in edited.read_text()
    else:
        assert process.returncode == 1
        assert "generated/writer/cache.py: edited by hand, and not overwritten" in err
        assert package() == before


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))


def test_a_write_that_fails_is_one_line_with_the_path_and_exit_code_3(temporary: Path, writer: Path) -> None:
    assert run("build", "--no-compile", "--no-verify").returncode == 0
    before = package()
    writer.write_text(writer.read_text().replace("A small model", "Another model"))
    done = run("build", "--no-compile", "--no-verify", preexec_fn=small_files)
    assert done.returncode == 3
    *_, replaced, line = done.stderr.splitlines()
    assert replaced.startswith("generated/writer: ")  # a changed title
    assert line.startswith(str(temporary))  # where the package is staged, which is on the same disk here
    assert line.endswith(".py: File too large")
    assert package() == before
    assert [path.name for path in Path("generated").iterdir()] == ["writer"]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("there", ["generated", "generated/writer", "deep", "link"])
def test_an_output_folder_that_cannot_be_is_named_before_the_first_compilation(writer: Path, there: str) -> None:
    arguments = {"deep": ("--out", "deep/a/b"), "link": ("--out", "link")}.get(there, ())
    if there == "link":
        Path(there).symlink_to("nowhere/at/all")
        Path("nowhere").write_text("")
    else:
        Path(there).parent.mkdir(exist_ok=True)
        Path(there).write_text("")
    done = run("build", *arguments)
    assert done.returncode == 3
    named = Path("nowhere").resolve() if there == "link" else there if "writer" in there else Path(there).resolve()
    assert done.stderr == f"{named}: Not a directory\n"


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (("build", "folder.yaml"), "folder.yaml"),
        (("bench", "--from", "nowhere.json"), "nowhere.json"),
        (("package", "specs/small.yaml", "--for", "vllm", "--out", "file"), "file"),
    ],
)
def test_a_file_that_cannot_be_read_or_made_is_named(workspace: Path, arguments: tuple[str, ...], path: str) -> None:
    Path("folder.yaml").mkdir()
    Path("file").write_text("")
    done = run(*arguments)
    assert done.returncode in (2, 3)
    assert "Traceback" not in done.stderr
    assert path in done.stderr.splitlines()[-1] or path in done.stderr.splitlines()[0]


def unread(*arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a command; nobody reads its stdout."""
    with start(*arguments) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before anything is printed
        return process.wait(), process.stderr.read()


@pytest.mark.parametrize("arguments", [("show", "plan", "specs/small.yaml"), ("schema",), ("show", "layouts")])
def test_a_reader_that_ends_is_no_error(workspace: Path, arguments: tuple[str, ...]) -> None:
    assert unread(*arguments) == (0, "")


def test_ctrl_c_while_modules_are_imported_prints_no_traceback(workspace: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "mlagen", "build"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(line.endswith("mlagen.errors\n") for line in process.stderr)  # the first of mlagen's modules
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)  # a shell shows 130 for both


def test_a_failed_check_is_one_whoever_reads_it(workspace: Path) -> None:
    code, err = unread("build", "--check")
    assert code == 1
    assert err.startswith("12 generated files differ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a disk that is always full")
def test_an_output_that_is_full_is_named(workspace: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*MLAGEN, "schema"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == "stdout: No space left on device\n"
