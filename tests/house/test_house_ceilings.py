"""Files and functions stay of a size that a reader holds, and those that are larger already may only shrink."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from checked_in import GOLDEN

ROOT = Path(__file__).resolve().parents[2]

# Lines at most, or conditions. Of a function its docstring does not count, which says as much as there is to say.
CEILINGS = {
    "Python file": 500,
    "function": 60,
    "template": 500,
    "template's conditions": 40,
    "generated file": 900,
    "page of performance": 120,
}
# A condition of a template: an if, elif, else or for tag, or an inline if.
CONDITION = re.compile(r"\{%-?\+?\s*(?:if|elif|else|for)\b|\{\{(?:(?!\}\}).)*?\sif\s")

# Larger files and functions, with their figures today. A change that makes one smaller lowers its number here.
LARGER: dict[str, dict[str, int]] = {
    "Python file": {},
    "function": {
        "tests/generated/alone.py arguments": 113,
    },
    "template": {},
    "template's conditions": {},
    "page of performance": {},
    "generated file": {  # the longest of all packages, by the file's name
        "_sparse_decode_sm90.py": 1401,
    },
}

# Lines of all files of generated/ together.
MOST_GENERATED = 115_000

# Commits up to here have subjects of any length.
OLD_SUBJECTS = "5bbf6ad227e4cf3af65b1fd740a1f0f62b68fa89"
MOST_CHARACTERS = 72


def sizes(kind: str) -> Iterator[tuple[str, int]]:
    """Every name of a kind with its lines."""
    if kind == "template":
        for path in ROOT.glob("templates/**/*.jinja"):
            yield _name(path), _lines(path)
    elif kind == "template's conditions":
        for path in ROOT.glob("templates/**/*.jinja"):
            yield _name(path), len(CONDITION.findall(path.read_text(encoding="utf-8")))
    elif kind == "page of performance":
        for path in ROOT.glob("docs/performance/*.md"):
            if path.name != "log.md":  # it only grows: experiments, and races of the past
                yield _name(path), _lines(path)
    elif kind == "generated file":
        for path in (*ROOT.glob("generated/*/*.py"), *GOLDEN.glob("*/*.py")):
            yield path.name, _lines(path)
    else:
        for path in (
            *ROOT.glob("mlagen/**/*.py"),
            *(each for each in ROOT.glob("tests/**/*.py") if GOLDEN not in each.parents),
        ):
            if kind == "function":
                yield from _functions(path)
            else:
                yield _name(path), _lines(path)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            docstring = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
            said = docstring.end_lineno - docstring.lineno + 1 if docstring and docstring.end_lineno else 0
            yield f"{_name(path)} {node.name}", node.end_lineno - node.lineno + 1 - said


def faults(found: Mapping[str, int], ceiling: int, larger: Mapping[str, int], unit: str = "lines") -> Iterator[str]:
    """Return wrong sizes, each with its fix."""
    for name in sorted({*found, *larger}):
        size, known = found.get(name, 0), larger.get(name)
        if size > ceiling and size > (known or 0):
            yield f"{name}: {size} {unit}, more than {known or ceiling}: split it"
        elif known is not None and size <= ceiling:
            yield f"{name}: {size or 'no'} {unit}, within {ceiling}: take it out of LARGER"
        elif known is not None and size < known:
            yield f"{name}: {size} {unit}, fewer than {known}: write {size} into LARGER"


@pytest.mark.parametrize("kind", CEILINGS)
def test_files_stay_below_their_ceilings_and_exceptions_shrink(kind: str) -> None:
    found: dict[str, int] = {}
    for name, size in sizes(kind):
        found[name] = max(size, found.get(name, 0))
    assert found
    unit = "conditions" if kind.endswith("conditions") else "lines"
    assert list(faults(found, CEILINGS[kind], LARGER[kind], unit)) == []


def test_generated_packages_and_proofs_stay_below_their_ceiling() -> None:
    files = [path for path in ROOT.glob("generated/**/*") if path.is_file() and path.suffix != ".pyc"]
    lines = sum(path.read_bytes().count(b"\n") for path in files)
    assert 0 < lines <= MOST_GENERATED, f"generated: {lines:,} lines; keep a package as a diff, or beside the tests"


@pytest.mark.parametrize(
    ("size", "known", "fault"),
    [
        (10, None, None),
        (11, None, "x: 11 lines, more than 10: split it"),
        (15, 15, None),
        (16, 15, "x: 16 lines, more than 15: split it"),
        (14, 15, "x: 14 lines, fewer than 15: write 14 into LARGER"),
        (10, 15, "x: 10 lines, within 10: take it out of LARGER"),
        (None, 15, "x: no lines, within 10: take it out of LARGER"),
    ],
)
def test_a_ceiling_is_a_ratchet(size: int | None, known: int | None, fault: str | None) -> None:
    found, larger = ({} if value is None else {"x": value} for value in (size, known))
    assert list(faults(found, 10, larger)) == ([] if fault is None else [fault])


def test_subjects_of_commits_fit_a_line() -> None:
    git = ("git", "-c", "safe.directory=*", "-C", str(ROOT))
    known = [*git, "merge-base", "--is-ancestor", OLD_SUBJECTS, "HEAD"]
    if not (ROOT / ".git").exists() or subprocess.run(known, capture_output=True, check=False).returncode:
        pytest.skip("not a git checkout with its history")
    command = [*git, "log", "--format=%s", f"{OLD_SUBJECTS}..HEAD"]
    subjects = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [subject for subject in subjects if len(subject) > MOST_CHARACTERS] == []
