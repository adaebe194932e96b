"""Digests of source text: a generated package, the code that compiles, the code that a family's cases run through."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from mlagen.compile.cache import result_format
from mlagen.digest import SourceDigests, dump, parse
from mlagen.emit import Package

MLAGEN = Path(__file__).resolve().parents[1]
VERIFY = "mlagen.verify"
CALL = f"{VERIFY}.call"  # the cases of every family run through it
SIMULATOR = f"{VERIFY}.gluon.functions"  # the worker imports it
OPS = "ops"  # this family's cases call the wrappers of all others
DIGITS = 16
# Entries of a package's SPEC about its spec's bytes, its generator and the Tritons that proved it.
_NAMING = ("spec_sha256", "generator", "triton")
_IMPORT = re.compile(rf"^ *from ({VERIFY.replace('.', '[.]')}[\w.]*) import (?:\(([^)]*)\)|(.+))$", re.MULTILINE)
# The functions that give a compilation its figures, by module of mlagen/compile.
_MEASURING = (
    ("worker", "compile_job"),
    ("binary", "read_cubin"),
    ("binary", "read_amdgcn"),
    ("process", "request_of"),
    ("process", "_environment"),
)


def digest_of(parts: Iterable[str]) -> str:
    """Hash texts into a key."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:DIGITS]


def package_key(texts: Mapping[str, str]) -> str:
    """Hash the meaning of a package: its modules' syntax trees and its spec.

    Comments, docstrings, the package's name and title, and the Tritons that it names do not count.

    Args:
        texts: the text of each file, by name.

    Raises:
        SyntaxError: a file does not parse.
    """
    return digest_of(f"{name} {_module(text)}" for name, text in sorted(texts.items()))


def rendered_key(package: Package) -> str:
    """The key of a rendered package."""
    return package_key({file.name: file.text for file in package.files})


def _module(text: str) -> str:
    """A generated module's syntax tree, without the names of the package and its Tritons."""
    return " ".join(dump(_without_names(node)) for node in parse(text).body)


def _without_names(node: ast.stmt) -> ast.stmt:
    """SPEC without the entries that name, no namespace of operators; any other statement as it is."""
    assigned = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
    if assigned == "NAMESPACE":
        return ast.Pass()
    if assigned != "SPEC" or not isinstance(node, ast.Assign):
        return node
    try:
        said = ast.literal_eval(node.value)
        kept = {name: value for name, value in said.items() if name not in _NAMING}
        kept["spec"] = {name: value for name, value in said["spec"].items() if name not in ("name", "title")}
    except (ValueError, AttributeError, KeyError, TypeError):
        return node
    return ast.Expr(ast.Constant(json.dumps(kept)))


@cache
def measuring_code() -> str:
    """Hash the code that compiles and reads figures from machine code, and the count of their format."""
    digests = SourceDigests(MLAGEN / "compile")
    return digest_of([str(result_format()), *(digests.digest(*each) for each in _MEASURING)])


@cache
def family_names() -> tuple[str, ...]:
    """The families of `mlagen.verify`, known by their files and without importing them."""
    return (*sorted(_folders()), OPS)


def _folders() -> dict[str, tuple[Path, ...]]:
    """The modules of each family but OPS: those of its folder, or the one of a chain."""
    verify = MLAGEN / "verify"
    chains = [path for path in (verify / "chains").glob("*.py") if path.stem not in ("__init__", OPS)]
    folders = [path.parent for path in (*verify.glob("*/cases.py"), *verify.glob("chains/*/cases.py"))]
    return {path.stem: (path,) for path in chains} | {path.name: (*path.glob("*.py"),) for path in folders}


@cache
def family_code(family: str) -> str:
    """Hash the code that a family's cases run through.

    That is the family's modules with their imports from `mlagen.verify`, the worker with its imports from that folder
    itself and from CALL, the simulator of sm90 kernels, `mlagen/layout` and `mlagen/workers.py`.
    """
    folders = _folders()
    paths = [path for name, found in folders.items() if family in (name, OPS) for path in found]
    own = {".".join(("mlagen", *path.relative_to(MLAGEN).with_suffix("").parts)) for path in paths}
    own |= {f"{VERIFY}.chains.{OPS}"} if family == OPS else set()
    modules = _closure({f"{VERIFY}.worker"}, deep=False) | _closure({*own, SIMULATOR}, deep=True)
    files = {*filter(None, map(_file, modules)), *(MLAGEN / "layout").glob("*.py"), MLAGEN / "workers.py"}
    return digest_of(f"{path.relative_to(MLAGEN).as_posix()} {_tree(path)}" for path in sorted(files))


def _closure(start: set[str], *, deep: bool) -> set[str]:
    """Modules of `mlagen.verify` that some import, but for the list of families. If not deep, only CALL of folders."""
    seen: set[str] = set()
    pending = list(start)
    while pending:
        name = pending.pop()
        if name in seen or name == f"{VERIFY}.families" or _file(name) is None:
            continue
        is_nested = name.count(".") > VERIFY.count(".") + 1 and not name.startswith(f"{CALL}.")
        if name not in start and not deep and is_nested:
            continue
        seen.add(name)
        pending += _imports(name)
    return seen


@cache
def _imports(name: str) -> tuple[str, ...]:
    """The names that a module imports from `mlagen.verify`, modules among them."""
    file, found = _file(name), []
    assert file is not None
    for module, *names in _IMPORT.findall(file.read_text(encoding="utf-8")):
        found += [f"{module}.{one}" for one in re.findall(r"\w+", "".join(names))]
        found += [module] if module != VERIFY else []
    return tuple(found)


@cache
def _file(name: str) -> Path | None:
    """The file of a module of mlagen; None if it is no module."""
    path = MLAGEN.joinpath(*name.split(".")[1:])
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def _tree(path: Path) -> str:
    """A hash of a file's syntax tree."""
    return digest_of([dump(parse(path.read_bytes()))])
