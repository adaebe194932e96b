"""The command as a process: it cleans up after a signal, and a closed pipe is no error."""

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
    """Make the signals in ENDING raise SystemExit of 128 plus their number, which ends workers and removes folders.

    The second signal is ignored, since it would interrupt this clean-up. A third one interrupts it.
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
    """A standard stream. After its reader closes it, text is dropped and the command goes on to its own exit code."""

    def write(self, data: Any, /) -> int:
        """Write. An error names the stream; later writes are dropped, so that it can be closed."""
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
    """Make stdout and stderr ignore a reader that closes them, as `head` does."""
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
