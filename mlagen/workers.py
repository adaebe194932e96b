"""Worker processes with requests and answers in JSON, one per line. Answers have limits; no process is left behind.

A limit counts the work of a process, not its waiting: a process that waits for a CPU is not late.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

LAST_LINES = 20
IDLE_SECONDS = 120.0  # without a runnable thread; longer means that a process hangs
_PROC = Path("/proc")

# Starts a command. The kernel kills it as soon as the starting thread ends, even by SIGKILL.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]): sys.exit("the starting process is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")


class WorkerError(Exception):
    """A worker gave no answer.

    Attributes:
        late: the limit that it exceeded, for example "used 600 s of CPU"; empty if it ended by itself.
        end: how it ended: the name of a signal, or its exit code.
        words: the last lines that it printed.
    """

    def __init__(self, *, late: str, end: str, words: str) -> None:
        super().__init__(late or end)
        self.late, self.end, self.words = late, end, words


@dataclass(frozen=True)
class Limit:
    """Time limits of an answer.

    Attributes:
        work: CPU seconds of the process and its children; wall-clock seconds if the system does not report them.
        wall: wall-clock seconds as well, for work outside the CPU; None: no limit.
        idle: wall-clock seconds without a process that uses or waits for a CPU.
    """

    work: float
    wall: float | None = None
    idle: float = IDLE_SECONDS

    @property
    def interval(self) -> float:
        """Seconds between two checks of the process."""
        return min(1.0, self.work / 4, self.idle / 4, (self.wall or 4.0) / 4)


class Worker:
    """A process that answers requests. It starts with the first request, and again after it ended.

    Args:
        command: command line. The process reads requests from stdin until its end, and writes only answers to stdout.
        env: its environment.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._command, self._env = command, env
        self._lock = threading.Lock()
        self._killed = False
        self._process: subprocess.Popen[str] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the worker
        self._began = 0  # position of this process's first output

    @property
    def running(self) -> bool:
        """Whether it was started and not found dead since."""
        return self._process is not None

    def ask(self, request: Mapping[str, Any], limit: Limit) -> dict[str, Any]:
        """Return the answer to a request.

        Args:
            request: the request.
            limit: time limits of the answer.

        Raises:
            WorkerError: there is no answer.
        """
        self.send(request)
        return self.receive(limit)

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request. `receive` returns its answer."""
        pipe = self._started().stdin
        with contextlib.suppress(BrokenPipeError):  # of a dead worker, which gives no answer
            if pipe is not None:
                pipe.write(json.dumps(request) + "\n")
                pipe.flush()

    def receive(self, limit: Limit) -> dict[str, Any]:
        """Return the answer to the request sent before, as `ask` does."""
        process = self._started()
        watch = _Watch(process, limit)
        watch.start()
        try:
            answer = process.stdout.readline() if process.stdout is not None else ""
            if answer.endswith("\n"):
                found: dict[str, Any] = json.loads(answer)
                return found
            # It stays uncollected, so that no other process gets its id or its group's id yet.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            watch.stop()
        _kill(process)  # those that it started
        code = process.wait()
        words = self.words(self._began)
        self.end()
        raise WorkerError(late=watch.late, end=_end(code), words=words)

    def _started(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._killed:
                raise WorkerError(late="", end=signal.SIGKILL.name, words="")
            if self._process is None:
                self._began = self.printed()
                self._process = subprocess.Popen(
                    [sys.executable, "-IS", "-c", _TIED, str(os.getpid()), *self._command]
                    if _PROC.is_dir()
                    else self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._stderr,
                    text=True,
                    env=dict(self._env),
                    start_new_session=True,  # its own group, so that its children die with it
                )
            return self._process

    def printed(self) -> int:
        """Return the number of bytes that it has printed to stderr."""
        return os.fstat(self._stderr.fileno()).st_size

    def words(self, since: int) -> str:
        """Return its last lines of output after this many bytes."""
        # pread, since the process writes where this file stands.
        text = os.pread(self._stderr.fileno(), self.printed() - since, since).decode(errors="replace")
        return "\n".join(text.splitlines()[-LAST_LINES:])

    def end(self) -> None:
        """End the process. The next request starts it again."""
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
        """End the process for good, from another thread. A thread that waits for an answer gets a WorkerError."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                _kill(self._process)

    def close(self) -> None:
        """End the process for good."""
        self.kill()
        self.end()
        self._stderr.close()


AnyWorker = TypeVar("AnyWorker", bound=Worker)


def first_of_each(tasks: Sequence[Task], kind: Callable[[Task], Hashable]) -> list[Task]:
    """Return tasks in their order, but one of each kind first, so that the time of each kind is soon known."""
    seen: set[Hashable] = set()
    first: list[Task] = []
    others: list[Task] = []
    for task in tasks:
        (others if kind(task) in seen else first).append(task)
        seen.add(kind(task))
    return first + others


def spread(
    tasks: Sequence[Task], workers: Iterable[AnyWorker], do: Callable[[AnyWorker, Task], Outcome]
) -> Generator[Outcome, None, None]:
    """Spread tasks over workers, and yield outcomes as they arrive. No process is left behind at the end.

    Args:
        tasks: tasks in the order of their start.
        workers: the workers.
        do: does a task with a worker, in the worker's own thread. Its exceptions are raised here.
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

    # Closed in reverse order: each worker is killed, its thread ends, the pipes close.
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
    """Kill an uncollected process and its children."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class Usage(NamedTuple):
    """The work of a group of processes so far.

    Attributes:
        seconds: CPU seconds of the processes and of their children that have ended.
        wants: whether one of their threads runs, waits for a CPU, or waits for a disk.
    """

    seconds: float
    wants: bool


def usage(group: int) -> Usage | None:
    """Return the work of a group of processes so far; None if the system does not report it."""
    ticks, wants, tick = 0, False, os.sysconf("SC_CLK_TCK")
    if not _PROC.is_dir():
        return None
    for folder in _PROC.iterdir():
        if folder.name.isdigit() and (fields := _stat(folder / "stat")) and int(fields[2]) == group:
            ticks += sum(map(int, fields[11:15]))
            with contextlib.suppress(OSError):
                threads = [_stat(thread / "stat") for thread in (folder / "task").iterdir()]
                wants |= any(thread[0] in "RD" for thread in threads if thread)
    return Usage(ticks / tick, wants)


def _stat(path: Path) -> list[str]:
    """Return the fields of a process or thread after its name, the state first; empty if it is gone."""
    try:
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


class _Watch(threading.Thread):
    """Ends a process that exceeds a limit.

    Attributes:
        late: the exceeded limit in words; empty: none.
    """

    def __init__(self, process: subprocess.Popen[str], limit: Limit) -> None:
        super().__init__(daemon=True)
        self._process, self._limit = process, limit
        self._done = threading.Event()
        self.late = ""

    def stop(self) -> None:
        """Stop watching the process."""
        self._done.set()
        self.join()

    def run(self) -> None:
        """Check the process until it is late or `stop` is called."""
        limit, begin, idle = self._limit, time.monotonic(), 0.0
        first: Usage | None = None  # taken at the first look, since most answers come before it
        last = Usage(0.0, False)
        while not self._done.wait(limit.interval):
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                _kill(self._process)  # it ended, but those that it started hold the pipe open
                return
            took, now = time.monotonic() - begin, usage(self._process.pid)
            first = first or now
            if now is None or first is None:
                worked, idle = took, 0.0
            else:
                worked = now.seconds - first.seconds
                # Counts checks and not time: while this process is stopped, the other may wait for it.
                idle = 0.0 if now.wants or now.seconds > last.seconds else idle + limit.interval
                last = now
            for passed, words in (
                (worked > limit.work, f"used {limit.work:g} s of CPU"),
                (idle > limit.idle, f"did nothing for {limit.idle:g} s"),
                (took > (limit.wall or took), f"gave no answer for {limit.wall or took:g} s"),
            ):
                if passed:
                    self.late = words
                    _kill(self._process)
                    return


def _end(code: int) -> str:
    """Return how a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
