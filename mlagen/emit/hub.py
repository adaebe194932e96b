"""A package as a repository of Hugging Face's `kernels`: build variants, their metadata, a card and a benchmark.

The repository is the same bytes from the same spec. It holds a list of its files with their hashes. A later run
replaces the folder only if it holds these files and no others.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlagen import GENERATOR
from mlagen.backends.engines.hub import LICENSE, Repo, Variant, alias_file, benchmark_file, card_file, variants_of
from mlagen.backends.parts.base import GeneratedFile
from mlagen.emit.render import Package, bodies, render, render_files
from mlagen.emit.replace import check_place, replace_folder
from mlagen.errors import UsageError
from mlagen.plan import Plan
from mlagen.plan.tritons import TRITONS

LIST = "mlagen.json"  # names the files of a repository
CARD = "build/CARD.md"  # where `kernel-builder upload` takes the card
BENCHMARK = "benchmarks/benchmark.py"


def hub_repository(
    plan: Plan,
    repo: Repo,
    tritons: Sequence[str] = TRITONS,
    *,
    verified: bool = False,
    archives: Mapping[str, bytes] | None = None,
) -> dict[str, bytes]:
    """The files of a kernel repository, by path.

    Args:
        plan: the plan.
        repo: the place on the Hub that the card and the metadata name.
        tritons: the versions under which all kernels of the package are known to compile within their limits.
        verified: cases of every family passed.
        archives: kernels compiled ahead, by file name.

    Raises:
        UsageError: the kernel's name is that of a module of the package.
    """
    package = render(plan, tritons)
    if f"{repo.module}.py" in {file.name for file in package.files}:
        raise UsageError(f"--repo: got the name {repo.name}, takes one that no module of the package has")
    files: dict[str, bytes] = {}
    for variant in variants_of(plan):
        of_variant = {name: data for name, data in (archives or {}).items() if name.split("-")[1] in variant.targets}
        for name, data in _variant(plan, repo, variant, package, tritons, of_variant).items():
            files[f"build/{variant.name}/{name}"] = data
    benchmark = benchmark_file(plan, repo)
    if benchmark is not None:
        files[BENCHMARK] = _only(plan, benchmark)
    ((_, card, _),) = bodies([card_file(plan, repo, _exports(package), tritons, verified=verified)])
    files[CARD] = card.encode()
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    listed = {"generator": GENERATOR, "title": plan.spec.title, "files": hashes}
    files[LIST] = _json(listed)
    return files


def write_repository(files: Mapping[str, bytes], folder: Path) -> None:
    """Writes a kernel repository as a folder, whole or not at all.

    Raises:
        UsageError: the folder holds files that no run of mlagen wrote there, or a repository of another spec.
        OSError: the folder could not be replaced, and is as it was.
    """
    check_place(folder)
    if folder.is_dir() and any(folder.iterdir()):
        _check_own(folder, json.loads(files[LIST])["title"])
    replace_folder(folder, files)


def _variant(
    plan: Plan, repo: Repo, variant: Variant, package: Package, tritons: Sequence[str], archives: Mapping[str, bytes]
) -> dict[str, bytes]:
    """The files of a build variant, by path below its folder.

    `kernels` imports the package under the name `id`, which has to be another for other content: two versions of a
    kernel can be loaded in one process. Operators of torch have the same name as their namespace.
    """
    content = {file.name: file.text.encode() for file in package.files} | dict(archives)
    key = hashlib.sha256("".join(f"{name} {_digest(data)}\n" for name, data in content.items()).encode())
    identity = f"_{repo.module}_{variant.backend}_{key.hexdigest()[:8]}"
    if plan.ops is not None:
        named = dataclasses.replace(plan, ops=dataclasses.replace(plan.ops, namespace=identity))
        content |= {file.name: file.text.encode() for file in render(named, tritons).files}
    alias = alias_file(repo, identity)
    content[alias.name] = _only(plan, alias)
    metadata = {
        "name": repo.name,
        "id": identity,
        "version": repo.version,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": variant.backend, "archs": list(variant.archs)},
        "digest": {"algorithm": "sha256", "files": {name: _digest(data) for name, data in sorted(content.items())}},
    }
    return content | {"metadata.json": _json(metadata)}


def _only(plan: Plan, file: GeneratedFile) -> bytes:
    """The text of one Python file, with its header."""
    (rendered,) = render_files(plan.spec.name, plan, [file]).files
    return rendered.text.encode()


def _exports(package: Package) -> list[str]:
    """Names that a package exports, all functions."""
    (init,) = (file.text for file in package.files if file.name == "__init__.py")
    names = init.partition("\n__all__ = [\n")[2].partition("\n]\n")[0]
    return [name for name in (line.strip(' ",') for line in names.splitlines()) if name.islower()]


def _check_own(folder: Path, title: str) -> None:
    """Raises UsageError: a folder holds anything that is not as mlagen wrote it for the spec of that title."""
    elsewhere = "takes another --out, or --repo with another name"
    try:
        listed = json.loads((folder / LIST).read_bytes())
        found, hashes = listed["title"], dict(listed["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{folder}: is no kernel repository of mlagen's; {elsewhere}") from None
    if found != title:
        raise UsageError(f"{folder}: holds {found!r}, not {title!r}; {elsewhere}")
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()):
        name = path.relative_to(folder).as_posix()
        if name == LIST or "__pycache__" in path.parts:
            continue
        if name not in hashes:
            raise UsageError(f"{path}: not a file of mlagen's, and not removed; move it elsewhere")
        if path.is_symlink() or hashlib.sha256(path.read_bytes()).hexdigest() != hashes[name]:
            raise UsageError(f"{path}: edited by hand, and not overwritten; move it elsewhere")


def _digest(data: bytes) -> str:
    """A file's hash as metadata has it."""
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def _json(value: object) -> bytes:
    return f"{json.dumps(value, indent=2)}\n".encode()
