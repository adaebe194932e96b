"""What every back end gives of the files that it generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class GeneratedFile:
    """One file of a package.

    Attributes:
        name: its name.
        template: the template that makes it.
        context: the values that the template asks for.
        read: what else it asks for, from the texts of the files before it by their names; None: nothing.
    """

    name: str
    template: str
    context: Mapping[str, Any]
    read: Callable[[Mapping[str, str]], Mapping[str, Any]] | None = None

    def filled(self, texts: Mapping[str, str]) -> GeneratedFile:
        """The file with all that its template asks for, from the texts of the files before it."""
        return self if self.read is None else replace(self, context={**self.context, **self.read(texts)}, read=None)

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
