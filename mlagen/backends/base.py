"""The files and modules that a back end generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class GeneratedFile:
    """One file of a package.

    Attributes:
        name: file name.
        template: template of the file.
        context: context of the template.
        read: returns further context, from the texts of earlier files by name; None: no further context.
    """

    name: str
    template: str
    context: Mapping[str, Any]
    read: Callable[[Mapping[str, str]], Mapping[str, Any]] | None = None

    def filled(self, texts: Mapping[str, str]) -> GeneratedFile:
        """Return the file with its whole context, from the texts of earlier files."""
        return self if self.read is None else replace(self, context={**self.context, **self.read(texts)}, read=None)

    @property
    def module(self) -> str:
        """Name of the module."""
        return self.name.removesuffix(".py")


@dataclass(frozen=True)
class Module:
    """A public module of a package.

    Attributes:
        file: the module.
        exports: names that the package exports; empty if its wrappers are called through the module.
    """

    file: GeneratedFile
    exports: Sequence[str]


def generated(module: str, context: Mapping[str, Any], template: str | None = None) -> GeneratedFile:
    """Return the file of a module. By default its template has the module's name."""
    return GeneratedFile(f"{module}.py", f"{template or module}.py.jinja", context)
