"""The cache folder, for results that can be computed again."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """The folder for results: `$XDG_CACHE_HOME/mlagen`, or `~/.cache/mlagen`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "mlagen"
