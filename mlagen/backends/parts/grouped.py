"""Lists of names in the text of an sm90 kernel, grouped by meaning, several per line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any

from mlagen.backends.parts.common import Signature

WIDTH = 112  # columns of a line of names, after an indent of eight
NO_BREAK = "\u00a0"  # a space where `wrap` does not break lines


def _group_of(name: str, kind: str) -> str:
    """Return the group of a kernel argument."""
    if kind.startswith("tensordesc"):
        return "descriptors"
    return next((suffix for suffix in ("ptr", "stride") if name.endswith(f"_{suffix}")), "sizes")


def _lines(groups: Iterable[Iterable[str]]) -> list[str]:
    """Return names as lines of a list. Each group starts a new line."""
    lines = []
    for group in groups:
        text = "".join(f" {name.replace(' ', NO_BREAK)}," for name in group)
        lines += [line.replace(NO_BREAK, " ") for line in wrap(text.strip(), WIDTH)]
    return lines


def interface(arguments: Signature, *constexprs: str) -> dict[str, Any]:
    """Return the text of a kernel's run-time arguments: as parameters, as fields of `Call`, and by name.

    Args:
        arguments: names and Triton types.
        constexprs: constexpr arguments, which follow them.
    """
    groups = [list(group) for _, group in groupby(arguments, lambda argument: _group_of(*argument))]
    parameters = [[f"{name}: gl.int64" if kind == "i64" else name for name, kind in group] for group in groups]
    descriptor, tensor = "tma.tensor_descriptor", "gl.tensor"
    return {
        "num_arguments": len(arguments),
        "argument_lines": _lines([name for name, _ in group] for group in groups),
        "parameter_lines": _lines([*parameters, [f"{name}: gl.constexpr" for name in constexprs]]),
        "call_fields": [
            f"{name}: {descriptor if kind.startswith('tensordesc') else tensor}" for name, kind in arguments
        ],
    }


def shared(*groups: Sequence[str]) -> dict[str, Any]:
    """Return the text of a kernel's shared memory: the fields of `Shared`, and the lines that pack them."""
    return {"shared": [name for group in groups for name in group], "shared_lines": _lines(groups)}
