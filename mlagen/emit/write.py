"""Writer of packages: only changed files, all of a package or none, and never over a file edited by hand.

A package that is kept as a diff (`mlagen.diffs`) is compared and written in that form.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mlagen import diffs
from mlagen.emit.render import GENERATED, HEADER_LINES, Package, sha256
from mlagen.emit.replace import replace_files, write_atomically
from mlagen.errors import DriftError, ToolError

_BODY = re.compile(r"# body ([0-9a-f]{16})")
_CONFLICT = re.compile(r"<<<<<<< .*|\|\|\|\|\|\|\| .*|=======|>>>>>>> .*")


@dataclass(frozen=True)
class Drift:
    """A file that differs from its spec.

    Attributes:
        path: the file; for an orphan, the folder.
        kind: `missing`, `changed`, `stale` (no longer generated), `edited` (by hand), `foreign` (a user's file with
            the name of a generated one) or `orphan` (a package without a spec).
        old, new: its text on disk and the expected text; None if there is none.
        note: the cause of the difference, if its text shows it; else empty.
    """

    path: Path
    kind: str
    old: str | None
    new: str | None
    note: str = ""

    def diff(self) -> str:
        """Unified diff from the file on disk to the text it should have; line ends do not count."""
        old, new = ([f"{line}\n" for line in (text or "").splitlines()] for text in (self.old, self.new))
        return "".join(difflib.unified_diff(old, new, f"{self.path} (on disk)", f"{self.path} (from its spec)"))


def is_hand_edited(text: str) -> bool:
    """Whether a text was edited: it has no header, or a body that does not match the header's hash."""
    lines = text.split("\n")
    head, rest = lines[:HEADER_LINES], "\n".join(lines[HEADER_LINES:])
    if len(head) < HEADER_LINES or not head[0].startswith(GENERATED) or head[2]:
        return True
    found = _BODY.fullmatch(head[1])
    return not found or sha256(rest)[:16] != found[1]


def has_header(text: str) -> bool:
    """Whether mlagen wrote a text, edited or not."""
    return any(line.startswith(GENERATED) or _BODY.fullmatch(line) for line in text.splitlines())


def compare(package: Package, folder: Path) -> list[Drift]:
    """Return the drifts between a package and its folder, or its diff; empty if they agree byte for byte.

    Files in the folder that are neither the package's nor mlagen's are the user's, and no drift.

    Raises:
        UsageError: the package is kept as a diff from one that does not exist.
    """
    drifts = []
    wanted = {file.name: file.text for file in package.files}
    if diffs.base_of(kept := diffs.diff_of(folder)) is not None:
        return _diff_drifts(kept, package.name, wanted)
    for name, text in wanted.items():
        path = folder / name
        if not path.exists():
            drifts.append(Drift(path, "missing", None, text))
            continue
        old = _text(path)
        if old != text:
            drifts.append(_drift(path, old, text))
    for path in sorted(folder.glob("*.py")):
        if path.name not in wanted and has_header(old := _text(path)):
            drifts.append(_drift(path, old, None))
    return drifts


def _diff_drifts(path: Path, name: str, wanted: dict[str, str]) -> list[Drift]:
    """Return the drift of a package that is kept as a diff, if it has one."""
    base, old = diffs.base_of(path), _text(path)
    assert base is not None
    start = diffs.read_package(path.parent / base)
    with contextlib.suppress(ToolError):  # it does not fit the package it starts from, which has changed
        if not is_hand_edited(old) and diffs.unpack(path) == wanted:
            return []
    return [_drift(path, old, diffs.diff_text(base, start, name, wanted))]


def orphans(folder: Path, names: Iterable[str]) -> list[Drift]:
    """Return a drift for each package without a spec, and for each folder next to the package's diff.

    Args:
        folder: of packages.
        names: of all specs.
    """
    known = {*names}
    kept = {path.stem: path for path in sorted(folder.glob(f"*{diffs.SUFFIX}")) if diffs.base_of(path)}
    found = [path.parent for path in sorted(folder.glob("*/__init__.py")) if has_header(_text(path))]
    gone = [path for path in (*found, *kept.values()) if path.stem not in known]
    twice = [path for path in found if path.name in known & kept.keys()]
    return [
        *(Drift(path, "orphan", None, None, "its spec is gone") for path in gone),
        *(Drift(path, "orphan", None, None, f"the package is kept as {kept[path.name].name}") for path in twice),
    ]


def removable(package: Path) -> list[Path]:
    """Return the removable paths of a package without a spec: its diff, its folder, or its generated files."""
    if package.suffix == diffs.SUFFIX:
        return [package]
    entries = sorted(package.iterdir())
    generated = [path for path in entries if path.suffix == ".py" and has_header(_text(path))]
    others = {path.name for path in entries} - {path.name for path in generated}
    return generated if others - {"__pycache__"} else [package]


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace")


def _drift(path: Path, old: str, new: str | None) -> Drift:
    """Return the cause of a file's difference, if its text shows it."""
    unix = old.replace("\r\n", "\n")
    note = "its lines end with CRLF" if unix != old else ""
    conflicts = [str(number) for number, line in enumerate(old.splitlines(), 1) if _CONFLICT.fullmatch(line)]
    if conflicts and "\n<<<<<<< " in f"\n{old}":
        note = f"merge-conflict markers in lines {', '.join(conflicts)}"
    elif not is_hand_edited(unix) or not old.strip():
        return Drift(path, "stale" if new is None else "changed", old, new, note)
    return Drift(path, "edited" if has_header(old) else "foreign", old, new, note)


def check_edits(drifts: Iterable[Drift], *, force: bool = False) -> None:
    """Check that no file edited by hand would be overwritten.

    Raises:
        DriftError: a file was never mlagen's, or was edited by hand and `force` is off.
    """
    drifts = list(drifts)
    foreign = [str(drift.path) for drift in drifts if drift.kind == "foreign"]
    if foreign:
        raise DriftError(
            f"{', '.join(foreign)}: not a file of mlagen's, and not overwritten",
            hint="move it elsewhere: a generated file has its name",
        )
    edited = [f"{drift.path}{drift.note and f' ({drift.note})'}" for drift in drifts if drift.kind == "edited"]
    if edited and not force:
        raise DriftError(
            f"{', '.join(edited)}: edited by hand, and not overwritten",
            hint="move the change into the spec or the template, or overwrite it with --force",
        )


def apply(drifts: Iterable[Drift], *, force: bool = False) -> list[Path]:
    """Write packages to their folders, each as a whole, and return the written or removed paths.

    Raises:
        DriftError: see `check_edits`; nothing is written then.
        OSError: a folder could not be replaced, and is as it was.
    """
    drifts = list(drifts)
    check_edits(drifts, force=force)
    for drift in drifts:
        if drift.path.suffix == diffs.SUFFIX and drift.new is not None:
            write_atomically(drift.path, drift.new)
    modules = [drift for drift in drifts if drift.path.suffix != diffs.SUFFIX]
    for folder, group in itertools.groupby(modules, key=lambda drift: drift.path.parent):
        replace_files(folder, {drift.path.name: drift.new for drift in group})
    return [drift.path for drift in drifts]
