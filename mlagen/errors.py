"""The errors of mlagen, each with its place, a hint and an exit code."""

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
        message: the value found and the values allowed, in one line.
        place: position of the error; shown before the message.
        hint: the command or change that fixes it; shown on its own line.
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
    """A spec has an invalid value."""

    exit_code = 2


class SpecErrors(MlagenError):  # noqa: N818 - several SpecError, as the name says
    """All errors of a spec file at once."""

    exit_code = 2

    def __init__(self, errors: Sequence[SpecError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = tuple(errors)


class UsageError(MlagenError):
    """The command line or an argument is invalid."""

    exit_code = 2


class DriftError(MlagenError):
    """Generated files differ from their spec, or were edited by hand."""

    exit_code = 1


class LimitError(MlagenError):
    """A kernel exceeds a limit of a target: of shared memory or of spills."""

    exit_code = 1


class UnprovedError(MlagenError):
    """A package is not proved with the installed Triton, or an sm90 kernel has no GPU record."""

    exit_code = 1


class ProofError(MlagenError):
    """A proof that was computed again has another result."""

    exit_code = 1


class MismatchError(MlagenError):
    """A kernel's result differs from the reference."""

    exit_code = 1


class ToolError(MlagenError):
    """A compiler, worker process or other tool broke."""

    exit_code = 3
