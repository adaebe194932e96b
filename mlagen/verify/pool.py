"""Starts worker processes and collects their results. Needs neither torch nor Triton itself."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlagen.errors import ToolError, UsageError
from mlagen.verify.call.results import CaseResult
from mlagen.workers import IDLE_SECONDS, Limit, Worker, WorkerError, first_of_each, spread

LEAST_WORKERS = {"cpu": 2, "cuda": 4}  # by device; on a GPU most of the time goes to compiling
MOST_WORKERS = 8  # they share one memory, and a case that does not get enough of it is skipped
START_SECONDS = 120.0  # of CPU, that importing torch and Triton may take
ROOT = Path(__file__).resolve().parents[2]


def verify_package(
    package_dir: Path,
    *,
    device: str = "cpu",
    targets: Sequence[str] | None = None,
    workers: int | None = None,
    only: Sequence[str] | None = None,
    families: Sequence[str] | None = None,
    every: bool = True,
    choose: Callable[[Sequence[Task]], Sequence[Task]] = lambda tasks: tasks,
    on_totals: Callable[[dict[str, int]], None] | None = None,
    on_tasks: Callable[[Sequence[Task]], None] | None = None,
    on_start: Callable[[str, str], None] | None = None,
    on_done: Callable[[CaseResult], None] | None = None,
    timeout: float = 600.0,
) -> list[CaseResult]:
    """Runs a generated package's cases in worker processes.

    Args:
        package_dir: folder of the package.
        device: "cpu" runs the kernels in Triton's interpreter, "cuda" on a GPU.
        targets: on a CPU, targets of the tiles: all cases run the first's, a few each other's; None: the spec's.
        workers: processes; None: one a core, at least LEAST_WORKERS and at most MOST_WORKERS.
        only: shell patterns of names of cases; None: all.
        families: names of families to run; None: all.
        every: run all cases of these families; off: a representative set, see `mlagen.verify.worker`.
        choose: picks the cases that run from those.
        on_totals: called first, with the number of all cases of each family.
        on_tasks: called with the cases to come, before the first result.
        on_start: called in a worker's thread with each case and target as it begins.
        on_done: called with each result as it comes.
        timeout: seconds of CPU a case may take; on a GPU of time.

    Returns:
        One result a case and target, in the order of the cases. A case has failed if its worker dies or hangs.

    Raises:
        UsageError: an unknown device, or no case matches `only`.
        ToolError: a worker broke outside any case; the message ends with its last words.
    """
    if device not in LEAST_WORKERS:
        raise UsageError(f"device is {device!r}, takes one of {', '.join(LEAST_WORKERS)}")
    workers = workers or min(max(len(os.sched_getaffinity(0)), LEAST_WORKERS[device]), MOST_WORKERS)
    job = {
        "package_dir": str(package_dir),
        "device": device,
        "targets": list(targets) if targets else None,
        "only": list(only) if only else None,
        "families": None if families is None else list(families),
        "every": every,
    }

    def verified(worker: _Verifier, task: Task) -> tuple[int, CaseResult]:
        worker.open()
        if on_start:
            on_start(task.case, task.target)
        return task.number, worker.verify(task, package_dir.name)

    results: dict[int, CaseResult] = {}
    with contextlib.ExitStack() as stack:
        pool = [_Verifier(job, timeout) for _ in range(workers)]
        for worker in pool:
            stack.callback(worker.close)
            worker.start()
        tasks = choose(pool[0].open())
        if only and not tasks:
            raise UsageError(f"no case matches {', '.join(only)}")
        if on_totals:
            on_totals(pool[0].totals)
        if on_tasks:
            on_tasks(tasks)
        for number, result in stack.enter_context(
            contextlib.closing(spread(first_of_each(tasks, _kind), pool, verified))
        ):
            results[number] = result
            if on_done:
                on_done(result)
    return [results[task.number] for task in tasks]


class Task(NamedTuple):
    """A case and target of a job, which of them it is, and the name of its family."""

    number: int
    case: str
    target: str
    family: str


def _kind(task: Task) -> tuple[str, str]:
    """The family and the target of a case: those that agree in both take about as long."""
    return task.target, task.case.partition(":")[0]


class _Verifier(Worker):
    """A worker that runs cases of a job; a fresh process takes the place of one that died in a case.

    Args:
        job: see mlagen/verify/worker.py.
        timeout: see `verify_package`.
    """

    def __init__(self, job: dict[str, Any], timeout: float) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        super().__init__([sys.executable, "-m", "mlagen.verify.worker"], {**os.environ, "PYTHONPATH": path})
        self._job = job
        self._timeout = timeout
        self._tasks: list[Task] | None = None  # of a process that is ready
        self.totals: dict[str, int] = {}  # how many cases each family has
        # A thread that waits for a GPU spins or sleeps, and is idle in neither case.
        wall = timeout if job["device"] == "cuda" else None
        self._limit = Limit(timeout, wall=wall, idle=min(timeout, IDLE_SECONDS) if wall is None else timeout)

    def start(self) -> None:
        """Starts a process, which gets itself ready while others are waited for."""
        self._tasks = None
        self.send(self._job)

    def open(self) -> list[Task]:
        """The cases of the job, once a process is ready to run them.

        Raises:
            ToolError: the process died, or was not ready in time.
        """
        if not self.running:
            self.start()
        if self._tasks is None:
            try:
                answer = self.receive(Limit(max(self._timeout, START_SECONDS)))
            except WorkerError as error:
                how = error.late or f"died ({error.end})"
                raise ToolError(f"the verification worker {how}:\n{error.words}") from None
            self._tasks = [Task(number, *each) for number, each in enumerate(answer["cases"])]
            self.totals = answer["of"]
        return self._tasks

    def verify(self, task: Task, package: str) -> CaseResult:
        """Runs a case. It has failed if the worker dies, or if it takes too long."""
        try:
            answer = self.ask({"case": task.number}, self._limit)
        except WorkerError as error:
            what = f"no answer: the worker {error.late}" if error.late else f"the worker died ({error.end})"
            detail = ": ".join([what, *error.words.splitlines()[-1:]])
            return CaseResult(package, task.case, task.target, False, None, (), 0.0, detail, task.family)
        if answer.pop("broken"):
            self.end()
        return CaseResult.from_json(answer)
