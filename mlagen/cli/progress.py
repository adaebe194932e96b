"""Progress of long work on stderr: a bar on a terminal, and a line now and then in a file or a pipe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from mlagen.cli.console import err
from mlagen.cli.estimate import Estimate, kind_of

FIRST_LINE_S = 2.0  # seconds without a line, also over several stages, after which a stage prints its first
LINE_S = 30.0  # seconds between two lines of a stage
SHORT_S = 0.2  # a stage that takes less prints no line

_last_line = time.monotonic()


class Stage:
    """The progress of a stage: a bar if stderr is a terminal, else lines."""

    def __init__(self, progress: Progress, task: TaskID, title: str) -> None:
        self._progress = progress
        self._task = task
        self._title = title
        self._begin = time.monotonic()
        self._estimate = Estimate(())

    def expect(self, tasks: Sequence[Any]) -> None:
        """Set the jobs or cases to do, once they are known."""
        self._begin = time.monotonic()
        self._estimate = Estimate(map(kind_of, tasks))
        self._progress.update(self._task, total=len(tasks))

    def step(self, result: Any) -> None:
        """Count one task as done, given its result."""
        self._estimate.done(kind_of(result), None if getattr(result, "cached", False) else result.seconds)
        now = time.monotonic()
        left = self._estimate.seconds_left(now - self._begin)
        self._progress.update(self._task, advance=1, end=None if left is None else now + left)

    def show(self, job: str) -> None:
        """Show the current job behind the stage's title."""
        self._progress.update(self._task, description=f"{self._title}: {job}")

    def line(self) -> str:
        """Return the title, how many tasks of how many are done, and the time left, as far as they are known."""
        (task,) = self._progress.tasks
        if task.total is None:
            return task.description
        left = _left(task)
        return f"{self._title}: {task.completed:,.0f} of {task.total:,.0f} done{left and f', {left}'}"


def _left(task: Task) -> str:
    """Return the estimated time left; empty if there is no estimate."""
    end = task.fields.get("end")
    if end is None:
        return ""
    minutes, seconds = divmod(max(int(end - time.monotonic()), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left"


class _LeftColumn(ProgressColumn):
    """The estimated time left, if there is an estimate."""

    def render(self, task: Task) -> Text:
        return Text(_left(task), style="progress.remaining")


@contextmanager
def stage(title: str) -> Iterator[Stage]:
    """Show the progress of a stage. `Stage.expect` sets its steps."""
    columns = (
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _LeftColumn(),
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True)),  # cut where the line ends
    )
    if err.file.isatty():  # with FORCE_COLOR, is_terminal is true of a pipe as well
        with Progress(*columns, console=err, expand=True, transient=True) as progress:
            yield Stage(progress, progress.add_task(title, total=None), title)
        return
    progress = Progress(console=err, disable=True)
    shown, over = Stage(progress, progress.add_task(title, total=None), title), threading.Event()
    thread = threading.Thread(target=say, args=(shown, over.wait), daemon=True)
    thread.start()
    try:
        yield shown
    finally:
        over.set()
        thread.join()


def say(shown: Stage, wait: Callable[[float], bool]) -> None:
    """Print the line of a stage now and then.

    Args:
        shown: the stage.
        wait: waits for seconds at most, and returns whether the stage is over.
    """
    global _last_line
    pause = FIRST_LINE_S - (time.monotonic() - _last_line)
    while not wait(max(pause, SHORT_S)):
        err.print(shown.line(), markup=False, soft_wrap=True)
        _last_line, pause = time.monotonic(), LINE_S
