"""The specs of known models, which an installed package carries too: where they are, and copies to begin with."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from mlagen.errors import UsageError
from mlagen.spec.load import check, parse, read_text

_SCHEMA_LINE = "# yaml-language-server: $schema=schema.json\n#\n"  # the schema stands beside the specs of a checkout


def specs_dir() -> Path:
    """Where the specs of known models are: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_specs"
    return installed if installed.is_dir() else package.parent / "specs"


def known_names() -> list[str]:
    """The names of all known specs, sorted."""
    return sorted(path.stem for path in specs_dir().glob("*.yaml"))


def known_text(known: str, *, name: str | None = None, targets: Sequence[str] = ()) -> str:
    """The text of a known spec, with its comments.

    Args:
        known: the spec's name, such as `dsv32`.
        name: what to name it instead.
        targets: those of the spec's targets to keep; none given: all.

    Raises:
        UsageError: no spec is known by that name, no spec can have the new one, or the spec lacks a target.
    """
    names = known_names()
    if known not in names:
        close = difflib.get_close_matches(known, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"NAME: got {known!r}; takes one of {', '.join(names)}{hint}")
    path = specs_dir() / f"{known}.yaml"
    text = read_text(path).removeprefix(_SCHEMA_LINE)
    spec = parse(text, path)
    if name is not None:
        _, findings = check({**spec.model_dump(), "name": name})
        if findings:
            raise UsageError(f"--name: {findings[0].text}")
        text = re.sub(r"(?m)^name: \S+", f"name: {name}", text)
    if targets:
        lacking = [target for target in targets if target not in spec.targets]
        if lacking:
            raise UsageError(f"--gpu: got a GPU of {lacking[0]}; {known} takes GPUs of {', '.join(spec.targets)}")
        text = re.sub(r"(?m)^targets: \[.*?\]", f"targets: [{', '.join(targets)}]", text)
        if "sm90" not in targets:  # whose kernels alone share rows
            text = re.sub(r"(?m)^  shared_indices: .*\n", "", text)
    return text
