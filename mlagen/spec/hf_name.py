"""A spec's name from where a model's config.json lies, and from its model type."""

from __future__ import annotations

import re
from pathlib import Path

MAX_NAME = 40  # characters of a name that is derived
_PLAIN = ("config", "params", "configuration")  # names of a file that tell nothing
_SIZE = re.compile(r"(?:^|[-_.])(?:\d+x)?\d+(?:\.\d+)?[bB](?:$|[-_.])")  # of a model: 16B, 8x7B
_WORDS = {"text", "moe", "dsa", "lite", "flash", "linear", "next", "note", "large", "vl"}  # of types of any family
_CACHED = re.compile(r"models--[^-].*?--(.+)")  # a repository in the Hub's cache


def slug(text: str) -> str:
    """A text as a spec's name has it: lower-case letters, digits and single underscores; empty if nothing is left."""
    plain = re.sub(r"[^a-z0-9]+", "_", text.lower(), flags=re.ASCII).strip("_")
    return re.sub(r"^[0-9_]+", "", plain)[:MAX_NAME].strip("_")


def told_by(file: Path, types: list[str]) -> str | None:
    """The name that the place of a config tells; None where it tells none.

    A repository in the Hub's cache does, and so does a file's or its folder's name that has a size such as 16B, or a
    word of one of the model's types: DeepSeek-R1 of deepseek_v3.
    """
    stem = file.name.removesuffix(".json")
    places = [] if stem in (*_PLAIN, "stdin") else [stem]
    folder = file.absolute().parent if str(file) != "stdin" else None
    if folder is not None:
        for part in reversed(folder.parts):
            cached = _CACHED.fullmatch(part)
            if cached is not None:
                return slug(cached[1]) or None
        places.append(folder.name)
    words = {word for of in types for word in re.findall("[a-z]{2,}", of)} - _WORDS
    for place in places:
        named = slug(place)
        if named and (_SIZE.search(place) or words & set(re.findall("[a-z]{2,}", named))):
            return named
    return None
