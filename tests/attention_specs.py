"""A model's attention without its indexer. The indexer's functions have tests of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlagen.spec import NEEDS, load

ROOT = Path(__file__).parents[1]


def attention_of(name: str) -> dict[str, Any]:
    """The values of a spec of specs/, but for its indexer's parts and wrappers."""
    data: dict[str, Any] = load(ROOT / "specs" / f"{name}.yaml").model_dump(exclude={"indexer", "indexer_cache"})
    return data | {"wrappers": tuple(one for one in data["wrappers"] if NEEDS[one].rows)}
