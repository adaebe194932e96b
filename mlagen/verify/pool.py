"""Starts worker processes and gathers what they answer; needs neither torch nor Triton here."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from mlagen.errors import ToolError, UsageError
from mlagen.verify.results import CaseResult

DEFAULT_WORKERS = {"cpu": 2, "cuda": 4}  # on a GPU most of the time goes to compiling
STDERR_LINES = 15
START_SECONDS = 120.0  # that importing torch and Triton may take on a loaded machine
ROOT = Path(__file__).resolve().parents[2]

Answer = CaseResult | int | BaseException | None  # of a shard: a result, how many there will be, what broke, the end


def verify_package(
    package_dir: Path,
    *,
    device: str = "cpu",
    targets: Sequence[str] | None = None,
    workers: int | None = None,
    only: Sequence[str] | None = None,
    on_count: Callable[[int], None] | None = None,
    on_start: Callable[[str, str], None] | None = None,
    on_done: Callable[[CaseResult], None] | None = None,
    timeout: float = 600.0,
) -> list[CaseResult]:
    """Runs a generated package's cases in worker processes.

    Args:
        package_dir: folder of the package.
        device: "cpu" runs the kernels in Triton's interpreter, "cuda" on a GPU.
        targets: on a CPU, whose tiles to run: all cases with the first's, a few with each other's; None: the spec's.
        workers: processes; None: 2 on a CPU, 4 on a GPU.
        only: shell patterns; cases whose name none matches are left out.
        on_count: called with the number of results to come, as far as workers have said it; the last time with all.
        on_start: called in a worker's thread with each case and target as it begins.
        on_done: called with each result as it comes.
        timeout: seconds a case may take.

    Returns:
        One result a case and target, in the order of the cases. A case in which its worker dies or hangs has failed.

    Raises:
        UsageError: an unknown device, or no case matches `only`.
        ToolError: a worker broke outside any case; the message ends with its last words.
    """
    if device not in DEFAULT_WORKERS:
        raise UsageError(f"device is {device!r}, takes one of {', '.join(DEFAULT_WORKERS)}")
    count = workers or DEFAULT_WORKERS[device]
    answers: queue.Queue[Answer] = queue.Queue()
    job = {
        "package_dir": str(package_dir),
        "device": device,
        "targets": list(targets) if targets else None,
        "only": list(only) if only else None,
    }
    shards = [_Shard({**job, "shard": [number, count]}, answers, on_start, timeout) for number in range(count)]
    results: list[CaseResult] = []
    counted = 0
    try:
        for shard in shards:
            shard.start()
        running = count
        while running:
            answer = answers.get()
            if answer is None:
                running -= 1
            elif isinstance(answer, BaseException):
                raise answer
            elif isinstance(answer, int):
                counted += answer
                if on_count:
                    on_count(counted)
            else:
                results.append(answer)
                if on_done:
                    on_done(answer)
    finally:
        for shard in shards:
            shard.stop()
        for shard in shards:
            shard.join()
    if only and not results:
        raise UsageError(f"no case matches {', '.join(only)}")
    order = {key: place for place, key in enumerate(_interleaved([shard.seen for shard in shards]))}
    return sorted(results, key=lambda result: order[result.case, result.target])


def _interleaved(seen: Sequence[Sequence[tuple[str, str]]]) -> Iterator[tuple[str, str]]:
    """The shards' cases in the order they were dealt."""
    for turn in range(max(map(len, seen), default=0)):
        for cases in seen:
            if turn < len(cases):
                yield cases[turn]


class _Shard(threading.Thread):
    """Runs one shard of the cases, with a fresh worker after each one that dies in a case."""

    def __init__(
        self,
        job: dict[str, Any],
        answers: queue.Queue[Answer],
        on_start: Callable[[str, str], None] | None,
        timeout: float,
    ) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[str, str]] = []
        self._counted = False
        self._job = job
        self._answers = answers
        self._on_start = on_start
        self._timeout = timeout
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def run(self) -> None:
        try:
            while not self._stopped and not self._run_worker():
                pass
            self._answers.put(None)
        except BaseException as error:
            self._answers.put(error)

    def stop(self) -> None:
        """Ends the worker, if one runs."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _run_worker(self) -> bool:
        """Runs a worker on the cases that are not done; whether it came to the end."""
        done = len(self.seen)
        started: tuple[str, str] | None = None
        finished = False
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr, self._spawn(stderr) as process:
            watch = _Watch(process)
            watch.expect(max(self._timeout, START_SECONDS))
            assert process.stdout is not None
            for line in process.stdout:
                watch.expect(self._timeout)
                answer = json.loads(line)
                event = answer.pop("event")
                if event == "start":
                    started = (answer["case"], answer["target"])
                    self.seen.append(started)
                    if self._on_start:
                        self._on_start(*started)
                elif event == "count":
                    if not self._counted:  # a fresh worker counts the shard again
                        self._counted = True
                        self._answers.put(answer["cases"])
                elif event == "result":
                    started = None
                    self._answers.put(CaseResult.from_json(answer))
                else:
                    finished = True
            watch.cancel()
            code = process.wait()
            stderr.seek(0)
            words = stderr.read().strip().splitlines()[-STDERR_LINES:]
        if finished or self._stopped:
            return True
        if started is None and len(self.seen) == done:
            raise ToolError(f"the verification worker {_end(code)}:\n" + "\n".join(words))
        if started is not None:
            what = f"no answer for {self._timeout:g} s" if watch.late else f"the worker {_end(code)}"
            detail = ": ".join([what, *words[-1:]])
            package = Path(self._job["package_dir"]).name
            self._answers.put(CaseResult(package, *started, False, None, (), 0.0, detail))
        return False

    def _spawn(self, stderr: IO[str]) -> subprocess.Popen[str]:
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-m", "mlagen.verify.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=env,
            text=True,
        )
        self._process = process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            json.dump({**self._job, "done": self.seen}, pipe)
        return process


class _Watch:
    """Ends a process that is silent for too long."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.late = False
        self._process = process
        self._timer: threading.Timer | None = None

    def expect(self, seconds: float) -> None:
        """Gives the process so long, from now, until the next call."""
        self.cancel()
        self._timer = threading.Timer(seconds, self._kill)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Lets the process be."""
        if self._timer is not None:
            self._timer.cancel()

    def _kill(self) -> None:
        self.late = True
        self._process.kill()


def _end(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
