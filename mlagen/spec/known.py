"""The specs that come with mlagen."""

from __future__ import annotations

from pathlib import Path


def specs_dir() -> Path:
    """Where the known specs and their tuned tables are: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_specs"
    return installed if installed.is_dir() else package.parent / "specs"
