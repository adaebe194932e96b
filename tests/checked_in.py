"""The checked-in specs and packages. Those of known models are in specs/ and generated/, those of tests in GOLDEN.

A package that is kept as a diff is unpacked into a folder of this process.
"""

from __future__ import annotations

import atexit
import tempfile
from functools import cache
from pathlib import Path

from once import once

from mlagen import diffs
from mlagen.emit import render
from mlagen.plan import load_plan
from mlagen.proofs import rendered_key

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "generated"
GOLDEN = ROOT / "tests" / "generated" / "golden"
FOLDERS = {ROOT / "specs": GENERATED, GOLDEN: GOLDEN}  # of packages, by that of their specs
SPECS = sorted((path for folder in FOLDERS for path in folder.glob("*.yaml")), key=lambda path: path.stem)

_unpacked = tempfile.TemporaryDirectory(prefix="packages-")
atexit.register(_unpacked.cleanup)


def spec_of(name: str) -> Path:
    """The spec of a name."""
    return next(path for path in SPECS if path.stem == name)


@cache
def package_of(name: str) -> Path:
    """The folder of the package of a spec."""
    folder = FOLDERS[spec_of(name).parent] / name
    kept = diffs.diff_of(folder)
    return diffs.write_whole(kept, Path(_unpacked.name)) if kept.exists() else folder


def key_of(name: str, shared: Path) -> str:
    """The proofs' key of a spec's package, which the workers of a run compute once."""
    return str(once(shared / f"key-{name}.json", lambda: rendered_key(render(load_plan(spec_of(name))))))


PACKAGES = [package_of(path.stem) for path in SPECS]
