"""The files and modules that a back end generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

TEMPLATE_SUFFIX = ".jinja"


@dataclass(frozen=True)
class GeneratedFile:
    """One file of a package.

    Attributes:
        name: file name.
        template: template of the file, or a module of `mlagen/runtime` that is copied.
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
    def is_copied(self) -> bool:
        """Whether the file is a copy of a module of `mlagen/runtime`."""
        return not self.template.endswith(TEMPLATE_SUFFIX)

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


def generated(
    module: str,
    context: Mapping[str, Any],
    template: str | None = None,
    read: Callable[[Mapping[str, str]], Mapping[str, Any]] | None = None,
) -> GeneratedFile:
    """Return the file of a module. By default its template has the module's name."""
    return GeneratedFile(f"{module}.py", f"{template or module}.py.jinja", context, read)


def copied(module: str) -> GeneratedFile:
    """Return the file of a module of `mlagen/runtime`, which packages contain verbatim."""
    return GeneratedFile(f"{module}.py", f"{module}.py", {})
