"""The command as a process: a signal ends it as an error does, and a reader that goes away is no error."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within, the signals in ENDING raise SystemExit of 128 plus their number: workers end and temporary folders go.

    The second signal is ignored, since it would interrupt this clean-up; a third one does interrupt it.
    """
    seen = 0

    def end(number: int, _: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen != 2:
            raise SystemExit(128 + number)

    earlier = {number: signal.signal(number, end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


class _Descriptor(io.FileIO):
    """A standard stream. Once nobody reads it, the text is dropped, and the command goes on to its own exit code."""

    def write(self, data: Any, /) -> int:
        """Writes; an error names the stream, after which it takes anything, so that it can be closed."""
        try:
            return super().write(data) or 0
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if isinstance(error, BrokenPipeError):
                return len(data)
            raise type(error)(error.errno, error.strerror, str(self.name)) from None


def bearing_streams() -> None:
    """Makes stdout and stderr such that a reader which ends, as `head` does, is no error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and stream is not None and not stream.isatty():
            setattr(sys, name, _rebuilt(stream, name))


def _rebuilt(stream: TextIO, name: str) -> TextIO:
    stream.flush()
    raw = _Descriptor(stream.fileno(), "w", closefd=False)
    raw.name = name
    writer = io.BufferedWriter(raw)
    return io.TextIOWrapper(writer, stream.encoding, stream.errors, line_buffering=name == "stderr")
