"""The spec's name, from the path of a model's config.json and from its model type."""

from __future__ import annotations

import re
from pathlib import Path

MAX_NAME = 40  # most characters of a derived name
_PLAIN = ("config", "params", "configuration")  # file names without information
_SIZE = re.compile(r"(?:^|[-_.])(?:\d+x)?\d+(?:\.\d+)?[bB](?:$|[-_.])")  # size of a model: 16B, 8x7B
_WORDS = {
    "text",
    "moe",
    "dsa",
    "lite",
    "flash",
    "linear",
    "next",
    "note",
    "large",
    "vl",
}  # words in model types of any family
_CACHED = re.compile(r"models--[^-].*?--(.+)")  # a repository in the Hub's cache


def slug(text: str) -> str:
    """Reduce a text to lower-case letters, digits and single underscores. The result may be empty."""
    plain = re.sub(r"[^a-z0-9]+", "_", text.lower(), flags=re.ASCII).strip("_")
    return re.sub(r"^[0-9_]+", "", plain)[:MAX_NAME].strip("_")


def named_by(file: Path, types: list[str]) -> str | None:
    """Return the name in the path of a config, or None.

    The name is that of a repository in the Hub's cache, or that of the file or its folder if it has a size, for example
    16B, or a word of one of the model's types: DeepSeek-R1 for deepseek_v3.
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
