"""The errors mlagen raises: each knows its place, what to do about it, and the exit code it ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """A position in a text file; line and column count from 1."""

    file: Path
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)


class MlagenError(Exception):
    """Base of every error that mlagen raises on purpose; renders as one line, `place: message`.

    Args:
        message: what was found and what is allowed, in one line.
        place: where; shown before the message.
        hint: the command or change that fixes it; shown on a line of its own.
    """

    exit_code = 3

    def __init__(self, message: str, *, place: Place | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


class SpecError(MlagenError):
    """A spec says something that mlagen does not take."""

    exit_code = 2


class SpecErrors(MlagenError):  # noqa: N818 - several SpecError, as the name says
    """All errors of a spec file at once."""

    exit_code = 2

    def __init__(self, errors: Sequence[SpecError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = tuple(errors)


class UsageError(MlagenError):
    """The command line or an argument is off."""

    exit_code = 2


class DriftError(MlagenError):
    """Generated files differ from what their spec gives, or were edited by hand."""

    exit_code = 1


class LimitError(MlagenError):
    """A kernel does not fit a target: shared memory over the limit, or registers spilled."""

    exit_code = 1


class UnprovedError(MlagenError):
    """A package is not proved with the Triton at hand, or an sm90 kernel has no record of a GPU."""

    exit_code = 1


class ProofError(MlagenError):
    """A proof that was computed again says something else than it did."""

    exit_code = 1


class MismatchError(MlagenError):
    """A kernel's result differs from the reference."""

    exit_code = 1


class ToolError(MlagenError):
    """A compiler, worker process or other tool broke."""

    exit_code = 3
