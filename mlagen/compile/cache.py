"""What compilations measured, kept by the content they were made from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlagen.compile.binary import Measured

# Counts up whenever the same content would be measured or stored in another way.
_FORMAT = 2


def default_cache_dir() -> Path:
    """The folder for results: `$XDG_CACHE_HOME/mlagen`, or `~/.cache/mlagen`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "mlagen"


def tritons_dir() -> Path:
    """The folder for Tritons beside the installed one, each in a folder that is named after its version."""
    return default_cache_dir() / "triton"


def cached_tritons() -> tuple[str, ...]:
    """The versions of Triton that lie there, oldest first."""
    found = (path.parent.parent.name for path in tritons_dir().glob("*/triton/__init__.py"))
    return tuple(sorted(found, key=lambda version: [int(number) for number in re.findall(r"\d+", version)]))


def content_key(*parts: Any) -> str:
    """Hash plain JSON values, and this cache's format, into a key of hexadecimal digits."""
    return hashlib.sha256(json.dumps([_FORMAT, *parts], sort_keys=True).encode()).hexdigest()


class ResultCache:
    """A folder of results; every failure of the folder is a miss, never an error.

    Args:
        folder: where results lie; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "compile"

    def get(self, key: str) -> Measured | None:
        """The result of a key; None if there is none, or none that can be read."""
        try:
            return Measured.from_json(json.loads((self._folder / f"{key}.json").read_bytes()))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def put(self, key: str, measured: Measured) -> None:
        """Write a result so that other processes see all of it or nothing."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=f".{key}.")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(asdict(measured), file)
                os.replace(name, self._folder / f"{key}.json")
            except OSError:
                os.unlink(name)
                raise
