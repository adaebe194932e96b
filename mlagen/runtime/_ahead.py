"""Kernels in Triton's cache: those that were compiled ahead, and turns of the processes that compile."""

import contextlib
import hashlib
import importlib
import json
import logging
import pathlib
import tarfile
import tempfile
import time
from collections.abc import Iterator
from typing import IO

import triton

from . import _internals

WAIT_SECONDS = 5.0  # a process that waits longer for another one's kernels logs a warning


def take_compiled(name: str) -> None:
    """Copy kernels that were compiled ahead for an architecture to Triton's cache, so that they need no compiler.

    `mlagen build --cache` writes them to kernels-ARCHITECTURE-tritonVERSION-KEY.tar.xz in the package's folder. KEY is
    a hash of Triton's files. Archives for another Triton are ignored.
    """
    folder, known = pathlib.Path(__file__).parent, None
    for archive in folder.glob(f"kernels-{name}-*.tar.xz"):
        known = known or hashlib.sha256(_internals.triton_key().encode()).hexdigest()[:16]
        if archive.name.endswith(f"-{known}.tar.xz"):
            with tarfile.open(archive) as tar:
                _unpack(tar, pathlib.Path(triton.knobs.cache.dir))


def _unpack(tar: tarfile.TarFile, folder: pathlib.Path) -> None:
    """Add an archive's entries to a Triton cache. Existing entries stay as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for member in tar:
            entry, name = pathlib.PurePosixPath(member.name).parts
            if (folder / entry).exists():
                continue
            data = tar.extractfile(member).read()  # type: ignore[union-attr]
            if name.startswith("__grp__"):  # lists the entry's files, by their paths
                paths = {one: str(folder / entry / one) for one in json.loads(data)}
                data = json.dumps({"child_paths": paths}).encode()
            path = pathlib.Path(temporary, entry, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        for unpacked in pathlib.Path(temporary).iterdir():
            with contextlib.suppress(OSError):  # another process was first
                unpacked.rename(folder / unpacked.name)


@contextlib.contextmanager
def taking_turns(name: str) -> Iterator[None]:
    """Inside, one process compiles this package's kernels for an architecture. Others wait, and then find them cached.

    The lock is a file in Triton's cache folder. The system frees it when its process ends, in any way; then all waiting
    processes continue. If no file can be locked there, no process waits.
    """
    folder = pathlib.Path(triton.knobs.cache.dir)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):  # no fcntl, a folder that is read-only, or one without locks
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f".{__package__.rpartition('.')[2]}-{name}.lock"
            _take_turn(stack.enter_context(path.open("a")), path)
        yield


def _take_turn(file: IO[str], path: pathlib.Path) -> None:
    """Lock a file for this process. If another process has it, wait, then share the lock with all others that wait."""
    fcntl = importlib.import_module("fcntl")
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    due = time.monotonic() + WAIT_SECONDS
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        if time.monotonic() >= due:
            due = float("inf")
            logging.getLogger(__name__).warning("%s: waiting for a process that compiles; lock: %s", __package__, path)
        time.sleep(0.05)
