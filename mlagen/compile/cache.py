"""Cache of compilation figures, by the content that was compiled."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlagen.compile.binary import Measured

# Part of every key; kept when results change, so that a kernel is named by the same key before and after.
_KEYS = 3
# Counts up whenever the same content would be measured or stored in another way: results of another count are not read.
_FORMAT = 4


def result_format() -> int:
    """Return the version of the format of results."""
    return _FORMAT


def content_key(*parts: Any) -> str:
    """Hash plain JSON values into a key of hexadecimal digits."""
    return hashlib.sha256(json.dumps([_KEYS, *parts], sort_keys=True).encode()).hexdigest()


class ResultCache:
    """A folder of results; every failure of the folder is a miss, never an error.

    Args:
        folder: where results lie; made when the first one is written.

    Attributes:
        folder: the same, of this format: a file `KEY.json` a result.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / f"compile-{_FORMAT}"

    def get(self, key: str) -> Measured | None:
        """The result of a key; None if there is none, or none that can be read."""
        try:
            return Measured.from_json(json.loads((self.folder / f"{key}.json").read_bytes()))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def put(self, key: str, measured: Measured) -> None:
        """Keep a result."""
        self._write(key, asdict(measured))

    def get_list(self, key: str) -> list[dict[str, Any]] | None:
        """A list of plain mappings, as `get`."""
        try:
            found = json.loads((self.folder / f"{key}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, list) and all(isinstance(each, dict) for each in found) else None

    def put_list(self, key: str, values: list[dict[str, Any]]) -> None:
        """Keep a list of plain mappings."""
        self._write(key, values)

    def _write(self, key: str, value: Any) -> None:
        """Write so that other processes see all of it or nothing."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=f".{key}.")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(value, file)
                os.replace(name, self.folder / f"{key}.json")
            except OSError:
                os.unlink(name)
                raise
