"""What every back end gives of the files that it generates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GeneratedFile:
    """One file of a package: its name, the template that makes it and the values the template asks for."""

    name: str
    template: str
    context: Mapping[str, Any]

    @property
    def module(self) -> str:
        """The module that it is."""
        return self.name.removesuffix(".py")


@dataclass(frozen=True)
class Module:
    """A module that callers of a package may import.

    Attributes:
        file: the module.
        exports: names that the package takes from it; empty: its wrappers are called through the module.
    """

    file: GeneratedFile
    exports: Sequence[str]


def generated(module: str, context: Mapping[str, Any], template: str | None = None) -> GeneratedFile:
    """The file of a module, whose template has its name or another one."""
    return GeneratedFile(f"{module}.py", f"{template or module}.py.jinja", context)
