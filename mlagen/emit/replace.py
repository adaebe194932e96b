"""Replaces a folder as a whole: the new one is staged next to it, written through to the disk, and exchanged with it.

A full disk, a signal or a power cut leaves the old folder or the new one, never a mixture. If a process is killed while
it stages a folder, the next process removes the staged files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux' renameat2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_NEW, _OLD = "new", "old"


def check_place(folder: Path) -> None:
    """Checks that a folder, which need not exist, can be made or replaced.

    Raises:
        OSError: it cannot; names the path that is in the way.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    above = folder.resolve().parent
    while not os.path.lexists(above):
        above = above.parent
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(above))
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(above))


def replace_files(folder: Path, texts: Mapping[str, str | None]) -> None:
    """Replaces files of a folder, all at once; all other files and folders in it are kept.

    Args:
        folder: made if it is not there.
        texts: by name, each new file's text; None: the file is removed.

    Raises:
        OSError: the folder is as it was before; names the path.
    """
    with _replacing(folder) as (place, new):
        if place.exists():
            _keep(place, new, {*texts, "__pycache__"})
        for name, text in texts.items():
            if text is not None:
                with naming(folder / name):
                    _write(new / name, text.encode())


def replace_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replaces a folder with all that is in it, at once.

    Args:
        folder: made if it is not there.
        files: by path below the folder, each file's bytes.

    Raises:
        OSError: the folder is as it was before; names the path.
    """
    with _replacing(folder) as (_, new):
        for name, data in files.items():
            path = new / name
            with naming(folder / name):
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, data)
        for inner in {(new / name).parent for name in files}:
            _sync(inner)


def tidy(folder: Path) -> None:
    """Clears up after a killed process: removes its staged files, and brings back a folder that it had moved away."""
    for outer in folder.parent.glob(f".{folder.name}.staged-*"):
        with contextlib.suppress(OSError), _locked(outer):  # another process is at it
            _remove(outer, folder)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that a reader sees the old bytes or the new ones, never a part, also where the power goes.

    Raises:
        OSError: the file is as it was before; names the path.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with naming(path):
        try:
            _write(temporary, data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within, an OSError names a path, and not a temporary file or nothing, as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[tuple[Path, Path]]:
    """A folder's place, and an empty folder that takes the place at the end."""
    place = folder.resolve()  # a link stays, and its target is replaced
    place.parent.mkdir(parents=True, exist_ok=True)
    tidy(place)
    with _staging(place) as outer:
        new = outer / _NEW
        new.mkdir()
        if place.exists():
            shutil.copymode(place, new)
        yield place, new
        _sync(new)
        with naming(folder):
            _put(new, place, outer / _OLD)
        _sync(place.parent)


def _write(path: Path, data: bytes) -> None:
    """Writes a file through to the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o644)


def _sync(folder: Path) -> None:
    """Writes the names in a folder through to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _keep(old: Path, new: Path, without: set[str]) -> None:
    """Gives a folder the files of another: as hard links, or as copies where the file system has no such links."""
    for entry in os.scandir(old):
        if entry.name in without:
            continue
        path = new / entry.name
        with naming(Path(entry.path)):
            if entry.is_dir(follow_symlinks=False):
                path.mkdir()
                shutil.copymode(entry.path, path)
                _keep(Path(entry.path), path, set())
                continue
            try:
                os.link(entry.path, path, follow_symlinks=False)
            except OSError:
                shutil.copy2(entry.path, path, follow_symlinks=False)


@contextlib.contextmanager
def _staging(place: Path) -> Iterator[Path]:
    """A hidden folder next to a place; it is removed at the end."""
    outer = place.with_name(f".{place.name}.staged-{secrets.token_hex(8)}")
    try:
        with naming(place):
            outer.mkdir(0o700)
        with _locked(outer):
            yield outer
    finally:
        try:
            _remove(outer, place)
        except BaseException:  # a signal meanwhile
            _remove(outer, place)
            raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Within, no other process has the folder; raises BlockingIOError where one has."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _put(new: Path, place: Path, old: Path) -> None:
    """Puts a folder in the place of another, if there is one; in one step where the system can."""
    if not place.exists():
        os.rename(new, place)
    elif not _exchange(new, place):
        os.rename(place, old)  # `_remove` brings it back where the next step is not reached
        os.rename(new, place)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two paths in one step; whether the system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def _remove(outer: Path, place: Path) -> None:
    """Removes a staged folder; an old folder in it goes back to its place first."""
    if (outer / _OLD).exists() and not place.exists():
        os.rename(outer / _OLD, place)
    shutil.rmtree(outer, ignore_errors=True)
