"""From text to files: only what changed is written, whole or not at all, and never over a hand-edited file."""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mlagen.emit.render import GENERATED, HEADER_LINES, Package, sha256
from mlagen.errors import DriftError

_BODY = re.compile(r"# (?:spec [0-9a-f]{16} template [0-9a-f]{16} )?body ([0-9a-f]{16})")  # two more until 0.1


@dataclass(frozen=True)
class Drift:
    """A file that is not what its spec gives.

    Attributes:
        path: the file.
        kind: `missing`, `changed`, `stale` (no longer generated) or `edited` (by hand).
        old, new: its text on disk, and as it should be; None where there is none.
    """

    path: Path
    kind: str
    old: str | None
    new: str | None

    def diff(self) -> str:
        """Unified diff from the file on disk to what it should be."""
        old, new = (text.splitlines(keepends=True) if text else [] for text in (self.old, self.new))
        return "".join(difflib.unified_diff(old, new, f"{self.path} (on disk)", f"{self.path} (from its spec)"))


def is_hand_edited(text: str) -> bool:
    """Whether a text is not as mlagen wrote it: it has no header, or a body that the header's hash denies."""
    lines = text.split("\n")
    head, rest = lines[:HEADER_LINES], "\n".join(lines[HEADER_LINES:])
    if len(head) < HEADER_LINES or not head[0].startswith(GENERATED) or head[2]:
        return True
    found = _BODY.fullmatch(head[1])
    return not found or sha256(rest)[:16] != found[1]


def compare(package: Package, folder: Path) -> list[Drift]:
    """What differs between a package and the folder that should hold it; empty where they agree byte for byte."""
    drifts = []
    wanted = {file.name: file.text for file in package.files}
    for name, text in wanted.items():
        path = folder / name
        if not path.exists():
            drifts.append(Drift(path, "missing", None, text))
            continue
        old = path.read_bytes().decode("utf-8", errors="replace")
        if old != text:
            drifts.append(Drift(path, "edited" if is_hand_edited(old) else "changed", old, text))
    for path in sorted(folder.glob("*.py")):
        if path.name not in wanted:
            old = path.read_bytes().decode("utf-8", errors="replace")
            drifts.append(Drift(path, "edited" if is_hand_edited(old) else "stale", old, None))
    return drifts


def apply(drifts: Iterable[Drift], *, force: bool = False) -> list[Path]:
    """Makes the folder what the package says, and returns the paths that were written or removed.

    Raises:
        DriftError: a file was edited by hand and `force` is off; nothing is written then.
    """
    drifts = list(drifts)
    edited = [str(drift.path) for drift in drifts if drift.kind == "edited"]
    if edited and not force:
        raise DriftError(
            f"{', '.join(edited)}: edited by hand, and not overwritten",
            hint="move the change into the spec or the template, or overwrite it with --force",
        )
    for drift in drifts:
        if drift.new is None:
            drift.path.unlink()
        else:
            write_atomically(drift.path, drift.new)
    return [drift.path for drift in drifts]


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file so that a reader sees the old bytes or the new ones, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
