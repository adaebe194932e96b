"""The specs of known models, in a checkout or in an installed package, and copies of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from mlagen.errors import UsageError
from mlagen.spec.load import check, parse, read_text

_SCHEMA_LINE = "# yaml-language-server: $schema=schema.json\n#\n"  # in a checkout the schema is next to the specs


def specs_dir() -> Path:
    """Return the folder of known specs: inside an installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_specs"
    return installed if installed.is_dir() else package.parent / "specs"


def known_names() -> list[str]:
    """Return the names of all known specs, sorted."""
    return sorted(path.stem for path in specs_dir().glob("*.yaml"))


def _meant(typed: str, names: Sequence[str]) -> list[str]:
    """Return the known names that a wrong name may mean: a similar one, or else up to three by their titles."""
    typed = typed.lower().rpartition("/")[2]  # without the owner of a repository
    close = difflib.get_close_matches(typed, names, n=1)
    word = re.sub(r"[^a-z0-9]", "", typed)
    if close or not word:
        return close
    titles = {name: re.search(r"(?m)^title: (.*)$", read_text(specs_dir() / f"{name}.yaml")) for name in names}
    return [name for name, title in titles.items() if title and word in re.sub(r"[^a-z0-9]", "", title[1].lower())][:3]


def known_text(known: str, *, name: str | None = None, targets: Sequence[str] = ()) -> str:
    """Return the text of a known spec, with its comments.

    Args:
        known: name of the spec, for example `dsv32`.
        name: new name.
        targets: the targets to keep; empty: all.

    Raises:
        UsageError: the spec is not known, the new name is invalid, or the spec lacks a target.
    """
    names = known_names()
    if known not in names:
        meant = _meant(known, names)
        hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
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
        if "sm90" not in targets:  # only its kernels share rows
            text = re.sub(r"(?m)^  shared_indices: .*\n", "", text)
    return text
