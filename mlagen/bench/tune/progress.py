"""Progress of a long run: a bar on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import rich.progress
from rich.console import Console


class Progress:
    """Says nothing; the base of those that do."""

    def say(self, line: str) -> None:
        """Reports something in one line."""

    @contextlib.contextmanager
    def steps(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """Counts a stage's steps: each call of the yielded function is one of `total`."""
        yield lambda: None


class Lines(Progress):
    """Plain lines, with seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def say(self, line: str) -> None:
        """Prints the line."""
        print(f"{time.monotonic() - self._start:6.1f} s  {line}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def steps(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """Prints when a stage begins."""
        self.say(f"{name}: {total} to do")
        yield lambda: None


class Bars(Progress):
    """A bar a stage."""

    def __init__(self, bars: rich.progress.Progress) -> None:
        self._bars = bars

    def say(self, line: str) -> None:
        """Prints the line above the bars."""
        self._bars.console.print(line, markup=False, highlight=False)

    @contextlib.contextmanager
    def steps(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """Shows a bar for the stage."""
        task = self._bars.add_task(name, total=total)
        yield lambda: self._bars.advance(task)


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """Bars where stderr is a terminal, lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines()
        return
    with rich.progress.Progress(console=console) as bars:
        yield Bars(bars)
