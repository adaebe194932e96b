"""Results that sm90 kernels have computed again, as simulated launches show them.

Some kernels leave NaN where a format overflows, and compute such rows again. A fault that gives NaN would hide there,
so cases ask that nothing is computed again unless the inputs need it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mlagen.verify.call.case import CaseFailedError

ARGUMENT = "recompute_ptr"  # of kernels that flag groups of tokens for a later launch
FUNCTION = "_recompute_heads"  # computes some heads of a token again, in the same launch


@dataclass
class Noted:
    """Launches within `noted`.

    Attributes:
        flags: i32 [groups] after each launch, by the name of its kernel.
        calls: of FUNCTION.
        watched: a kernel of a module with FUNCTION ran.
    """

    flags: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    calls: int = 0
    watched: bool = False

    def after(self, kernel: str) -> torch.Tensor:
        """Flags of all groups after a kernel's launches, bool [groups]."""
        return torch.cat(self.flags.get(kernel, [torch.empty(0)])) != 0


_current: list[Noted] = []


@contextlib.contextmanager
def noted() -> Iterator[Noted]:
    """Within, simulated launches are noted."""
    _current.append(Noted())
    try:
        yield _current[-1]
    finally:
        _current.pop()


def note_launch(kernel: str, arguments: Mapping[str, Any], names: Container[str]) -> None:
    """Takes note of a launch that is done: its kernel's name and arguments, and the names of the kernel's module."""
    for one in _current[-1:]:
        one.watched |= FUNCTION in names
        if isinstance(arguments.get(ARGUMENT), torch.Tensor):
            one.flags.setdefault(kernel, []).append(arguments[ARGUMENT].clone())


def note_call() -> None:
    """Takes note of a call of FUNCTION."""
    for one in _current[-1:]:
        one.calls += 1


def require_flags(stage: str, found: torch.Tensor, needed: torch.Tensor, allowed: torch.Tensor) -> None:
    """Raises CaseFailedError unless flagged groups are among the allowed ones, and the needed ones are flagged."""
    for groups, problem in ((found & ~allowed, "though nothing asks for it"), (needed & ~found, "")):
        if bool(groups.any()):
            listed = ", ".join(str(number) for number in groups.nonzero()[:8, 0].tolist())
            which = f"{stage}: groups {listed} of {len(found)} are"
            raise CaseFailedError(f"{which} {'to be' if problem else 'not to be'} computed again {problem}".rstrip())


def require_calls(found: Noted, asked: bool) -> None:
    """Raises CaseFailedError if heads were computed again that need not be, or none where some had to be."""
    if found.watched and asked != bool(found.calls):
        raise CaseFailedError(
            "no head was computed again, though some do not fit fp16"
            if asked
            else f"{found.calls} blocks of heads were computed again, though all fit fp16"
        )
