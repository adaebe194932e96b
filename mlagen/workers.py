"""Worker processes: asked in JSON, a request and an answer a line, each answer within a time; none is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

LAST_LINES = 20

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")


class WorkerError(Exception):
    """A worker that gave no answer.

    Attributes:
        late: it took too long, and was ended.
        end: how it ended: the name of a signal, or its exit code.
        words: the last lines that it printed.
    """

    def __init__(self, *, late: bool, end: str, words: str) -> None:
        super().__init__(end)
        self.late, self.end, self.words = late, end, words


class Worker:
    """A process that answers requests; it is started when it is first asked, and anew after it ended.

    Args:
        command: starts it. It reads requests from stdin until that ends, and writes nothing but answers to stdout.
        env: its environment.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._command, self._env = command, env
        self._lock = threading.Lock()
        self._killed = False
        self._process: subprocess.Popen[str] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the worker
        self._began = 0  # where what the process printed begins

    @property
    def running(self) -> bool:
        """Whether it was started and has not been found dead since."""
        return self._process is not None

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a request.

        Args:
            request: what it is asked.
            seconds: that the answer may take.

        Raises:
            WorkerError: there is none.
        """
        self.send(request)
        return self.receive(seconds)

    def send(self, request: Mapping[str, Any]) -> None:
        """Sends a request, whose answer `receive` gives."""
        pipe = self._started().stdin
        with contextlib.suppress(BrokenPipeError):  # of a dead worker, which gives no answer
            if pipe is not None:
                pipe.write(json.dumps(request) + "\n")
                pipe.flush()

    def receive(self, seconds: float) -> dict[str, Any]:
        """The answer to the request sent before, as `ask`."""
        process, late = self._started(), threading.Event()

        def stop() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        timer.start()
        try:
            answer = process.stdout.readline() if process.stdout is not None else ""
        finally:
            timer.cancel()
        if answer.endswith("\n"):
            found: dict[str, Any] = json.loads(answer)
            return found
        code = process.wait()
        words = self.words(self._began)
        self.end()
        raise WorkerError(late=late.is_set(), end=_end(code), words=words)

    def _started(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._killed:
                raise WorkerError(late=False, end=signal.SIGKILL.name, words="")
            if self._process is None:
                self._began = self.printed()
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._stderr,
                    text=True,
                    env=dict(self._env),
                    start_new_session=True,  # a group of its own, so that what it started dies with it
                )
            return self._process

    def printed(self) -> int:
        """Bytes that it has printed so far, to stderr."""
        return os.fstat(self._stderr.fileno()).st_size

    def words(self, since: int) -> str:
        """The last lines that it printed after so many bytes."""
        # pread, since the process writes where this file stands.
        text = os.pread(self._stderr.fileno(), self.printed() - since, since).decode(errors="replace")
        return "\n".join(text.splitlines()[-LAST_LINES:])

    def end(self) -> None:
        """Ends the process; it starts anew when it is asked again."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            _kill(process)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()

    def kill(self) -> None:
        """Ends the process for good, from another thread: the one that waits for an answer gets a WorkerError."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                _kill(self._process)

    def close(self) -> None:
        """Ends the process for good."""
        self.kill()
        self.end()
        self._stderr.close()


AnyWorker = TypeVar("AnyWorker", bound=Worker)


def spread(
    tasks: Sequence[Task], workers: Iterable[AnyWorker], do: Callable[[AnyWorker, Task], Outcome]
) -> Generator[Outcome, None, None]:
    """Spreads tasks over workers, and gives outcomes as they come; leaves no process behind, however it is left.

    Args:
        tasks: what is to be done, in the order in which it begins.
        workers: who does it.
        do: does a task with a worker, in a thread of that worker's own. What it raises is raised here.
    """
    waiting: SimpleQueue[Task] = SimpleQueue()
    outcomes: SimpleQueue[tuple[Outcome] | BaseException] = SimpleQueue()
    for task in tasks:
        waiting.put(task)

    def serve(worker: AnyWorker) -> None:
        with contextlib.suppress(Empty):
            while True:
                task = waiting.get_nowait()
                try:
                    outcomes.put((do(worker, task),))
                except BaseException as error:
                    outcomes.put(error)
                    return

    # Left in reverse: each worker is killed, its thread sees that and ends, the pipes close.
    with contextlib.ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.close)
            thread = threading.Thread(target=serve, args=(worker,), daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(worker.kill)
        for _ in tasks:
            outcome = outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome[0]


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends a process and what it started, at once."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _end(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
