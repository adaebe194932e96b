"""Reader of specs: returns a validated `Spec`, or every error of the file with line and column.

In a folder named `specs`, a spec has the name of its file, so that `explain`, `build --check` and readers find one from
the other. Elsewhere any name is allowed, so that `mlagen init dsv32 > my.yaml` gives a valid spec.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from mlagen.errors import Place, SpecError, SpecErrors
from mlagen.spec.marked import Document, Loc, Mark, read, refuse
from mlagen.spec.models import Spec
from mlagen.spec.prose import Finding, Guide

SPECS = "specs"  # in this folder, files have the names of their specs
MAX_BYTES = 64 * 1024  # a spec has 1 or 2 KiB; PyYAML can need seconds for a megabyte


# Byte order marks that editors and PowerShell's > write first.
BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


class FileKind(NamedTuple):
    """The expected kind of a file: its name and its content in words, and its largest size in bytes."""

    takes: str
    holds: str
    max_bytes: int


SPEC_FILE = FileKind("a YAML file", "spec", MAX_BYTES)


def load(path: Path) -> Spec:
    """Read and validate one spec file.

    Args:
        path: the YAML file; in a folder `specs`, its name without the suffix is the spec's name.

    Raises:
        SpecErrors: every error of the file, sorted by place.
    """
    return parse(read_text(path), path)


def parse(text: str, file: Path) -> Spec:
    """Validate a spec's text.

    Args:
        text: the YAML.
        file: the file's path, for error messages and, in a folder `specs`, for the spec's name.

    Raises:
        SpecErrors: every error of the text, sorted by place.
    """
    document = read(text, file)
    spec, findings = check(document.data, document.plain)
    findings += _misnamed(document, file, findings)
    errors = list(document.errors)
    for finding in findings:
        if not lies_within(finding.loc, document.unread):
            mark = place_of(finding, document)
            errors.append(SpecError(str(finding), place=Place(file, mark.line, mark.column)))
    if spec is None or errors:
        raise refuse(errors)
    return spec


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a spec."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Spec.model_json_schema()}


def schema_text() -> str:
    """Return the text of `specs/schema.json`."""
    return json.dumps(json_schema(), indent=2) + "\n"


def spec_digest(spec: Spec) -> str:
    """Return the SHA-256, in hex, of a validated spec. Comments, order and style of the YAML do not change it."""
    text = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_text(path: Path, kind: FileKind = SPEC_FILE) -> str:
    """Return the text of a file.

    Raises:
        SpecErrors: it is not a regular file, too large or not text.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise _whole(path, f"is a folder; takes {kind.takes}")
        if not stat.S_ISREG(mode):  # reading a pipe or a device may never end
            raise _whole(path, f"is not a regular file; takes {kind.takes}")
        with path.open("rb") as file:
            data = file.read(kind.max_bytes + 1)
    except FileNotFoundError:
        raise _whole(path, "no such file") from None
    except OSError as error:
        raise _whole(path, f"cannot be read: {(error.strerror or type(error).__name__).lower()}") from None
    except ValueError as error:  # an impossible path
        raise _whole(path, f"cannot be read: {error}") from None
    return decode(data, path, kind)


def decode(data: bytes, path: Path, kind: FileKind) -> str:
    """Decode a file's bytes. Raise SpecErrors if they are too many, or neither UTF-8 nor marked UTF-16."""
    if len(data) > kind.max_bytes:
        raise _whole(path, f"is larger than {kind.max_bytes // 1024} KiB; takes a {kind.holds} of at most that size")
    try:
        for bom, encoding in BOMS.items():
            if data.startswith(bom):
                return data.removeprefix(bom).decode(encoding)
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.encoding != "utf-8":
            raise _whole(path, "begins like UTF-16 but is not valid UTF-16; save the file as UTF-8") from None
        before = error.object[: error.start].decode("utf-8")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        message = f"byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise refuse([SpecError(message, place=Place(path, line, column))]) from None


def _whole(path: Path, message: str) -> SpecErrors:
    return refuse([SpecError(message, place=Place(path))])


def check(data: Any, plain: Mapping[Loc, str] | None = None) -> tuple[Spec | None, list[Finding]]:
    """Validate a spec's data.

    Args:
        data: the spec as plain values: mappings as dict, lists as tuple.
        plain: the spelling of each scalar without quotes in the file.

    Returns:
        The spec and no findings, or None and every finding.
    """
    try:
        return Spec.model_validate(data), []
    except ValidationError as error:
        guide = Guide(json_schema(), data, dict(plain or {}))
        return None, guide.findings(error.errors(include_url=False))


def _misnamed(document: Document, file: Path, findings: list[Finding]) -> list[Finding]:
    name = document.data.get("name") if isinstance(document.data, dict) else None
    if not isinstance(name, str) or name == file.stem or any(finding.loc == ("name",) for finding in findings):
        return []
    if file.absolute().parent.name != SPECS:
        return []
    return [
        Finding(
            ("name",),
            "value",
            f"got '{name}', but the file is {file.name}; in a folder named {SPECS}, takes '{file.stem}'",
        )
    ]


def place_of(finding: Finding, document: Document) -> Mark:
    """Return the position of a finding. A missing field has the position of its container."""
    if finding.at == "value" and finding.loc in document.values:
        return document.values[finding.loc]
    loc: Loc = finding.loc
    while loc not in document.keys and loc:
        loc = loc[:-1]
    return document.keys.get(loc) or document.values[()]


def lies_within(loc: Loc, others: set[Loc]) -> bool:
    """Whether a location is one of the others, or inside one."""
    return any(loc[:length] in others for length in range(len(loc) + 1))
