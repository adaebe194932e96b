"""The manifest of a generated package: its files' hashes, and what each kernel takes of each target."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlagen.compile import Resources
from mlagen.emit import Drift, Package
from mlagen.emit.render import sha256

MANIFEST = "manifest.json"


def manifest_text(package: Package, resources: Sequence[Resources]) -> str:
    """The manifest as text: the same on every machine with the same Triton, one line a file and a kernel."""
    files = {file.name: sha256(file.text) for file in package.files}
    lines = ["{", f'  "triton": {json.dumps(importlib.metadata.version("triton"))},', '  "files": {']
    lines.append(",\n".join(f"    {json.dumps(name)}: {json.dumps(digest)}" for name, digest in files.items()))
    lines.append('  },\n  "resources": [')
    lines.append(",\n".join(f"    {json.dumps(one.to_json())}" for one in resources))
    lines.append("  ]\n}\n")
    return "\n".join(lines)


def proved_with(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """The versions of Triton that a manifest says its package was compiled and judged with.

    Raises:
        KeyError, TypeError: it says none.
    """
    versions = manifest["triton"]
    return (versions,) if isinstance(versions, str) else tuple(versions)


def stale_manifest(package: Package, folder: Path) -> list[Drift]:
    """A drift if the folder's manifest is missing or speaks of other files than the package has."""
    path = folder / MANIFEST
    if not path.exists():
        return [Drift(path, "missing", None, None)]
    text = path.read_text(encoding="utf-8")
    try:
        files = json.loads(text)["files"]
    except (ValueError, KeyError, TypeError):
        files = None
    wanted = {file.name: sha256(file.text) for file in package.files}
    return [] if files == wanted else [Drift(path, "stale", None, None)]
