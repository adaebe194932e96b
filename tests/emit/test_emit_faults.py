"""Faults between any two steps of a package's replacement: the package is the old one or the new one, and whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from emit_specs import make_spec

from mlagen.cli.process import ended_by_signals
from mlagen.emit import Package, apply, compare, render, replace
from mlagen.emit.replace import replace_folder, tidy
from mlagen.plan import make_plan

pytestmark = pytest.mark.thorough

# Python's names of the audited calls that change or open files.
STEPS = ("open", "os.", "shutil.", "tempfile.", "fcntl.", "ctypes.dlopen", "ctypes.dlsym")
NOT_REACHED = 77
MINE = {"mine.py": b"import torch\n", "notes/a.md": b"notes"}


@pytest.fixture(scope="module")
def old() -> Package:
    return render(make_plan(make_spec(targets=("sm90",))))


@pytest.fixture(scope="module")
def new() -> Package:
    return render(make_plan(make_spec(targets=("sm90",), lse_base="2")))


@pytest.fixture
def folder(old: Package, tmp_path: Path) -> Path:
    """A folder that holds the old package and files of the user's."""
    folder = tmp_path / "generated" / "dsv32"
    apply(compare(old, folder))
    for name, content in MINE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def in_child(run: Callable[[], Any], number: signal.Signals, step: int) -> int:
    """Runs in a child that sends itself a signal before its step of that number; its exit code, NOT_REACHED after it.

    A signal that a handler takes is raised there and then, wherever the code stands.
    """
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event: str, _: Any) -> None:
            nonlocal count
            if event.startswith(STEPS) and event != "os.kill":
                count += 1
                if count == step:
                    os.kill(os.getpid(), number)

        code = 1
        try:
            with ended_by_signals():
                sys.addaudithook(hook)
                run()
            code = 0 if count >= step else NOT_REACHED
        except SystemExit as ended:
            code = int(str(ended.code))
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def every_step(run: Callable[[], Any], number: signal.Signals) -> Iterator[int]:
    """The steps of `run`, each after it was faulted there."""
    for step in range(1, 1000):
        code = in_child(run, number, step)
        if code == NOT_REACHED:
            assert step > 30
            return
        assert code in (-number, 128 + number), code
        yield step
    raise AssertionError


def holds(package: Package, folder: Path) -> bool:
    return compare(package, folder) == [] and {name: (folder / name).read_bytes() for name in MINE} == MINE


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if path != folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_at_any_step_leaves_one_package_whole(old, new, folder, number):
    seen = set()
    for step in every_step(lambda: apply(compare(new, folder)), number):
        whole = [package for package in (old, new) if holds(package, folder)]
        assert whole, step
        seen.add(whole[0] is new)
        if number != signal.SIGKILL:
            assert leftovers(folder) == [], step
        apply(compare(old, folder))
        tidy(folder)
        assert holds(old, folder), step
        assert leftovers(folder) == [], step
    assert seen == {False, True}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_at_any_step_leaves_one_folder_of_folders_whole(tmp_path, number):
    folder, seen = tmp_path / "kernel", []
    one = {"a/b/c.py": b"one", "a/d.py": b"one", "e.json": b"one"}
    other = {"a/b/c.py": b"other", "f/g.py": b"other", "e.json": b"other"}

    def contents() -> dict[str, bytes]:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    replace_folder(folder, one)
    for step in every_step(lambda: replace_folder(folder, other), number):
        assert contents() in (one, other), step
        seen.append(contents() == other)
        replace_folder(folder, one)
        assert contents() == one, step
        assert leftovers(folder) == [], step
    assert set(seen) == {False, True}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_without_an_exchange_in_one_step_the_next_run_brings_the_package_back(old, new, folder, number, monkeypatch):
    """Some file systems have none: between two renames there is no package, which the next run sees."""
    monkeypatch.setattr(replace, "_exchange", lambda one, other: False)
    gone = 0
    for step in every_step(lambda: apply(compare(new, folder)), number):
        gone += not folder.exists()
        tidy(folder)
        assert holds(old, folder) or holds(new, folder), step
        assert leftovers(folder) == [], step
        apply(compare(old, folder))
    assert gone == (1 if number == signal.SIGKILL else 0)


def test_two_processes_do_not_remove_what_the_other_stages(old, new, folder):
    with replace._staging(folder) as outer:
        apply(compare(new, folder))
        assert outer.exists()
    assert leftovers(folder) == []


def mount(place: Path, kilobytes: int) -> bool:
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_a_full_disk_leaves_the_old_package(old, new, tmp_path):
    disk = tmp_path / "disk"
    size = sum(-(-len(file.text.encode()) // 4096) * 4 for file in old.files)
    if not mount(disk, size + 60):
        pytest.skip("no file system may be mounted here")
    try:
        folder = disk / "dsv32"
        apply(compare(old, folder))
        fill = disk / "fill"
        with contextlib.suppress(OSError), open(fill, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(OSError, match="No space left") as caught:
            apply(compare(new, folder))
        assert str(caught.value.filename).startswith(str(folder))
        assert compare(old, folder) == []
        assert leftovers(folder) == ["fill"]
        fill.unlink()
        apply(compare(new, folder))
        assert compare(new, folder) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
