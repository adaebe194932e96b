"""Worker processes: asked in JSON, a request and an answer a line, each answer within a limit; none is left behind.

A limit counts the work of a process and not its waiting: a process that waits for a CPU is not late.
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
IDLE_SECONDS = 120.0  # without a runnable thread: then a process hangs
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
    """A worker that gave no answer.

    Attributes:
        late: the limit that it passed, such as "used 600 s of CPU"; empty if it ended by itself.
        end: how it ended: the name of a signal, or its exit code.
        words: the last lines that it printed.
    """

    def __init__(self, *, late: str, end: str, words: str) -> None:
        super().__init__(late or end)
        self.late, self.end, self.words = late, end, words


@dataclass(frozen=True)
class Limit:
    """How long an answer may take.

    Attributes:
        work: seconds of CPU of the process and of those that it started. Where the system does not tell, of time.
        wall: seconds of time as well, for work that no CPU does; None: any.
        idle: seconds of time without a process that uses or waits for a CPU.
    """

    work: float
    wall: float | None = None
    idle: float = IDLE_SECONDS

    @property
    def interval(self) -> float:
        """Seconds between two looks at the process."""
        return min(1.0, self.work / 4, self.idle / 4, (self.wall or 4.0) / 4)


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

    def ask(self, request: Mapping[str, Any], limit: Limit) -> dict[str, Any]:
        """The answer to a request.

        Args:
            request: what it is asked.
            limit: that the answer may take.

        Raises:
            WorkerError: there is none.
        """
        self.send(request)
        return self.receive(limit)

    def send(self, request: Mapping[str, Any]) -> None:
        """Sends a request, whose answer `receive` gives."""
        pipe = self._started().stdin
        with contextlib.suppress(BrokenPipeError):  # of a dead worker, which gives no answer
            if pipe is not None:
                pipe.write(json.dumps(request) + "\n")
                pipe.flush()

    def receive(self, limit: Limit) -> dict[str, Any]:
        """The answer to the request sent before, as `ask`."""
        process = self._started()
        watch = _Watch(process, limit)
        watch.start()
        try:
            answer = process.stdout.readline() if process.stdout is not None else ""
            if answer.endswith("\n"):
                found: dict[str, Any] = json.loads(answer)
                return found
            # It is left to be collected, so that its number, and with it that of its group, is nobody else's yet.
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


def first_of_each(tasks: Sequence[Task], kind: Callable[[Task], Hashable]) -> list[Task]:
    """Tasks in their order, but one of each kind first: soon it is known how long each kind takes."""
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
    """Ends a process that was not collected yet and all that it started, at once."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class Usage(NamedTuple):
    """The work of a group of processes so far.

    Attributes:
        seconds: of CPU that they used, and those that they started and that have ended.
        wants: whether one of their threads runs, waits for a CPU, or waits for a disk.
    """

    seconds: float
    wants: bool


def usage(group: int) -> Usage | None:
    """The work of a group of processes so far; None where the system does not tell."""
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
    """The fields of a process or thread behind its name, the state first; none where it is gone."""
    try:
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


class _Watch(threading.Thread):
    """Ends a process that passes a limit.

    Attributes:
        late: the limit that it passed, in words; empty: none.
    """

    def __init__(self, process: subprocess.Popen[str], limit: Limit) -> None:
        super().__init__(daemon=True)
        self._process, self._limit = process, limit
        self._done = threading.Event()
        self.late = ""

    def stop(self) -> None:
        """Lets the process be."""
        self._done.set()
        self.join()

    def run(self) -> None:
        """Looks at the process until it is late or `stop` is called."""
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
                # Looks and not time: while this process is stopped, the other may have nobody to wait for.
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
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
