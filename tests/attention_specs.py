"""A model's attention without its indexer and prologue. Their functions have tests of their own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from mlagen.spec import NEEDS, load

ROOT = Path(__file__).parents[1]
_spec = cache(load)


def attention_of(name: str) -> dict[str, Any]:
    """The values of a spec of specs/, but for the parts and wrappers of its indexer and its prologue."""
    data: dict[str, Any] = _spec(ROOT / "specs" / f"{name}.yaml").model_dump(exclude={"indexer", "indexer_cache"})
    wrappers = tuple(one for one in data["wrappers"] if NEEDS[one].rows and not NEEDS[one].rope)
    return data | {"model": data["model"] | {"rope": None}, "wrappers": wrappers}
