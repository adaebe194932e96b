"""The manifest of a generated package: hashes of files and templates, and what a kernel variant takes, by Triton."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlagen.compile import Resources, Toolchain, content_keys, list_variants
from mlagen.emit import Drift, Package
from mlagen.emit.render import sha256

MANIFEST = "manifest.json"
COLUMNS = ("registers", "scalar_registers", "spills", "loop_spills", "shared")  # of what a version measured


@dataclass(frozen=True)
class Manifest:
    """What a package was proved with.

    Attributes:
        tritons: the Triton versions, oldest first, under which every variant that a call can launch holds.
        files: the SHA-256 of each file, by name.
        templates: a hash of the template of each file, and of all that it takes in, by the file's name.
        variants: what tells a variant from the others, by its key, in the package's order.
        measured: what a version measured, by key: COLUMNS, of the versions in `tritons`.
    """

    tritons: tuple[str, ...]
    files: dict[str, str]
    templates: dict[str, str]
    variants: dict[str, dict[str, Any]]
    measured: dict[str, dict[str, tuple[int | None, ...]]]

    def holds_under(self) -> dict[str, list[str]]:
        """The versions under which each variant holds, by its key."""
        return {key: [version for version in self.tritons if key in self.measured[version]] for key in self.variants}

    def text(self) -> str:
        """The manifest as text: the same on every machine, one line a file and a variant."""
        lines = ["{", f'  "triton": {json.dumps(list(self.tritons))},', f'  "columns": {json.dumps(list(COLUMNS))},']
        for what, hashes in (("files", self.files), ("templates", self.templates)):
            listed = ",\n".join(f"    {json.dumps(name)}: {json.dumps(one)}" for name, one in hashes.items())
            lines += [f'  "{what}": {{', listed, "  },"]
        rows = [
            json.dumps({**variant, **{version: taken[key] for version, taken in self.measured.items() if key in taken}})
            for key, variant in self.variants.items()
        ]
        return "\n".join([*lines, '  "variants": [', ",\n".join(f"    {row}" for row in rows), "  ]", "}", ""])


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a package; None where it has none, or one that cannot be read."""
    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if data["columns"] != list(COLUMNS):
            return None
        tritons = tuple(map(str, data["triton"]))
        variants: dict[str, dict[str, Any]] = {}
        measured: dict[str, dict[str, tuple[int | None, ...]]] = {version: {} for version in tritons}
        for row in data["variants"]:
            key = row["key"]
            for version in tritons:
                if version in row:
                    measured[version][key] = tuple(row.pop(version))
            variants[key] = row
        return Manifest(tritons, dict(data["files"]), dict(data.get("templates", {})), variants, measured)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def make_manifest(
    package: Package, proofs: Mapping[str, Sequence[Resources]], earlier: Manifest | None = None
) -> Manifest:
    """The manifest of a package.

    Args:
        package: its files.
        proofs: by Triton version, what every variant takes.
        earlier: one whose versions, where `proofs` lacks them, still hold.
    """
    variants: dict[str, dict[str, Any]] = {}
    measured: dict[str, dict[str, tuple[int | None, ...]]] = {}
    for version, resources in proofs.items():
        for one in resources:
            variants.setdefault(one.key, _description(one))
        measured[version] = {one.key: tuple(getattr(one, column) for column in COLUMNS) for one in resources}
    for version in earlier.tritons if earlier else ():
        if earlier is not None and version not in proofs:
            measured[version] = earlier.measured[version]
            for key in earlier.measured[version]:
                variants.setdefault(key, earlier.variants[key])
    tritons = tuple(sorted(measured, key=lambda version: [int(part) for part in version.split(".")[:2]]))
    files, templates = _hashes(package)
    order = sorted(
        variants, key=lambda key: (variants[key]["target"], variants[key]["module"], variants[key]["kernel"])
    )
    ordered = {key: variants[key] for key in order}
    return Manifest(tritons, files, templates, ordered, {one: measured[one] for one in tritons})


def _hashes(package: Package) -> tuple[dict[str, str], dict[str, str]]:
    """Of each file of a package, and of its template."""
    files = {file.name: sha256(file.text) for file in package.files}
    return files, {file.name: file.template for file in package.files}


def _description(one: Resources) -> dict[str, Any]:
    names = ("key", "target", "module", "kernel", "variant", "num_warps", "num_stages")
    return {name: getattr(one, name) for name in names}


def still_proved(
    earlier: Manifest | None, folder: Path, targets: Iterable[str], versions: Iterable[str]
) -> Manifest | None:
    """What of an earlier manifest holds for a package as it is now: its content is what was compiled then.

    Args:
        earlier: the manifest; None: nothing holds.
        folder: folder of the package as it is now.
        targets: the package's targets.
        versions: the versions of the manifest to look at; others are left out.

    Returns:
        The manifest with those of the versions that hold.
    """
    if earlier is None:
        return None
    held = []
    for version in versions:
        taken = earlier.measured.get(version)
        if taken is not None and set(keys_under(folder, targets, version)) == taken.keys():
            held.append(version)
    return Manifest(tuple(held), {}, {}, earlier.variants, {version: earlier.measured[version] for version in held})


def keys_under(folder: Path, targets: Iterable[str], version: str) -> list[str]:
    """The keys of all that calls of a package can launch under a Triton version, which need not be installed."""
    return content_keys(folder, list_variants(folder, list(targets), toolchain=Toolchain(version)))


def proved_with(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """The versions of Triton that a manifest says its package was compiled and judged with.

    Raises:
        KeyError, TypeError: it says none.
    """
    versions = manifest["triton"]
    return (versions,) if isinstance(versions, str) else tuple(versions)


def stale_manifest(package: Package, folder: Path) -> list[Drift]:
    """A drift if the folder's manifest is missing or speaks of files or templates that the package does not have."""
    path = folder / MANIFEST
    if not path.exists():
        return [Drift(path, "missing", None, None)]
    manifest = read_manifest(folder)
    holds = manifest is not None and (manifest.files, manifest.templates) == _hashes(package)
    return [] if holds else [Drift(path, "stale", None, None)]
