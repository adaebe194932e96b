"""Spills in loops that single kernel variants may have under a Triton: `allowed.yaml`, by content key."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from mlagen.plan.files import read_checked
from mlagen.plan.tiles.replacements import MinorText
from mlagen.plan.tritons import Minor, minor
from mlagen.spec.base import Model
from mlagen.spec.rules import refused

PATH = Path(__file__).with_name("allowed.yaml")

Key = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


def _ordered(keys: tuple[str, ...]) -> tuple[str, ...]:
    if list(keys) != sorted(set(keys)):
        raise refused("takes keys in ascending order, each once")
    return keys


class _Entry(Model):
    kernel: Annotated[str, Field(description="the kernel's name, for readers")]
    triton: Annotated[MinorText, Field(description="minor version of Triton")]
    spills: Annotated[int, Field(ge=1, description="loads and stores of local memory in loops, at most")]
    reason: Annotated[str, Field(description="where they are, or the attempts to free them")]
    keys: Annotated[
        tuple[Key, ...],
        AfterValidator(_ordered),
        Field(min_length=1, description="content keys of the variants, as manifests have them"),
    ]


class _AllowedTable(Model):
    allowed: Annotated[tuple[_Entry, ...], Field(description="spills in loops, by content key")]

    @model_validator(mode="after")
    def _each_key_once(self) -> _AllowedTable:
        seen: set[tuple[str, str]] = set()
        for index, one in enumerate(self.allowed):
            named = {(key, one.triton) for key in one.keys}
            if seen & named:
                raise refused("names a key and a Triton that an entry above names", "allowed", index, "keys")
            seen |= named
        return self


@dataclass(frozen=True)
class Allowance:
    """Spills in loops of one kernel variant under a Triton.

    Attributes:
        kernel: the kernel's name.
        key: the variant's content key, `Resources.key`.
        triton: the minor version.
        spills: loads and stores of local memory in loops, at most.
        reason: where they are, or the attempts to free them.
    """

    kernel: str
    key: str
    triton: Minor
    spills: int
    reason: str


def read_allowed(path: Path = PATH) -> tuple[Allowance, ...]:
    """The entries of the file, one for each key.

    Raises:
        SpecErrors: the file is invalid: all its errors, each with its line and column.
    """
    table, _ = read_checked(path, _AllowedTable)
    return tuple(
        Allowance(one.kernel, key, minor(one.triton), one.spills, one.reason)
        for one in table.allowed
        for key in one.keys
    )


@functools.cache
def _spills() -> dict[tuple[str, Minor], int]:
    return {(one.key, one.triton): one.spills for one in read_allowed()}


def allowed_spills(key: str, triton: Minor) -> int:
    """Loads and stores of local memory in loops that a kernel variant may have under a Triton; 0 where no entry is."""
    return _spills().get((key, triton), 0)
