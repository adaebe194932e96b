"""Lists of names in the text of an sm90 kernel: several a line, grouped by meaning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any

from mlagen.backends.triton.common import Signature

WIDTH = 112  # columns of a line of names, which stands eight columns in
NO_BREAK = "\u00a0"  # a space at which `wrap` breaks no line


def _group_of(name: str, kind: str) -> str:
    """Which group of a kernel's arguments one belongs to."""
    if kind.startswith("tensordesc"):
        return "descriptors"
    return next((suffix for suffix in ("ptr", "stride") if name.endswith(f"_{suffix}")), "sizes")


def _lines(groups: Iterable[Iterable[str]]) -> list[str]:
    """Names as the lines of a list, each group of them from a new line on."""
    lines = []
    for group in groups:
        text = "".join(f" {name.replace(' ', NO_BREAK)}," for name in group)
        lines += [line.replace(NO_BREAK, " ") for line in wrap(text.strip(), WIDTH)]
    return lines


def interface(arguments: Signature, *constexprs: str) -> dict[str, Any]:
    """How a kernel's run-time arguments stand in its text: as parameters, in `Call`, and by name.

    Args:
        arguments: with their Triton types.
        constexprs: what it is compiled for beside, behind them.
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
    """How what a kernel has in shared memory stands in its text: names of `Shared`, and the lines that pack them."""
    return {"shared": [name for group in groups for name in group], "shared_lines": _lines(groups)}
