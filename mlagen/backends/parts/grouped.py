"""Lists of names in the text of an sm90 kernel, grouped by meaning, several per line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap

from mlagen.backends.parts.common import LINE_LENGTH, Signature

WIDTH = LINE_LENGTH - 8  # columns of a line of names, after their indent
NO_BREAK = "\u00a0"  # a space where `wrap` does not break lines


@dataclass(frozen=True)
class Parameters:
    """Text of a kernel's parameters.

    Attributes:
        num_arguments: number of run-time arguments.
        parameter_lines: the parameters, as lines of a list.
    """

    num_arguments: int
    parameter_lines: Sequence[str]


@dataclass(frozen=True)
class Interface(Parameters):
    """Text of a kernel's parameters, and of its run-time arguments.

    Attributes:
        argument_lines: the arguments by name, as lines of a list.
        call_fields: the arguments as fields of `Call`.
    """

    argument_lines: Sequence[str]
    call_fields: Sequence[str]


@dataclass(frozen=True)
class SharedMemory:
    """Text of a kernel's shared memory.

    Attributes:
        shared: the fields of `Shared`.
        shared_lines: the same as lines of a list, to pack them.
    """

    shared: Sequence[str]
    shared_lines: Sequence[str]


def _group_of(name: str, kind: str) -> str:
    """Return the group of a kernel argument."""
    if kind.startswith("tensordesc"):
        return "descriptors"
    return next((suffix for suffix in ("ptr", "stride") if name.endswith(f"_{suffix}")), "sizes")


def _groups(arguments: Signature) -> list[list[str]]:
    """Return the names of arguments by group."""
    return [[name for name, _ in group] for _, group in groupby(arguments, lambda argument: _group_of(*argument))]


def _lines(groups: Iterable[Iterable[str]]) -> list[str]:
    """Return names as lines of a list. Each group starts a new line."""
    lines = []
    for group in groups:
        text = "".join(f" {name.replace(' ', NO_BREAK)}," for name in group)
        lines += [line.replace(NO_BREAK, " ") for line in wrap(text.strip(), WIDTH)]
    return lines


def parameters(arguments: Signature, *constexprs: str) -> Parameters:
    """Return the text of a kernel's parameters.

    Args:
        arguments: names and Triton types.
        constexprs: constexpr arguments, which follow them.
    """
    wide = {name for name, kind in arguments if kind == "i64"}
    groups = [[f"{name}: gl.int64" if name in wide else name for name in group] for group in _groups(arguments)]
    return Parameters(len(arguments), _lines([*groups, [f"{name}: gl.constexpr" for name in constexprs]]))


def interface(arguments: Signature, *constexprs: str) -> Interface:
    """Return the text of a kernel's parameters and run-time arguments; see `parameters`."""
    descriptor, tensor = "tma.tensor_descriptor", "gl.tensor"
    return Interface(
        **vars(parameters(arguments, *constexprs)),
        argument_lines=_lines(_groups(arguments)),
        call_fields=[f"{name}: {descriptor if kind.startswith('tensordesc') else tensor}" for name, kind in arguments],
    )


def shared(*groups: Sequence[str]) -> SharedMemory:
    """Return the text of a kernel's shared memory."""
    return SharedMemory(shared=[name for group in groups for name in group], shared_lines=_lines(groups))
