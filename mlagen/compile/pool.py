"""Compiles jobs in worker processes, one a core, and asks the cache first."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from mlagen.compile.binary import Measured
from mlagen.compile.cache import ResultCache, content_key, default_cache_dir
from mlagen.compile.digest import SourceDigests
from mlagen.compile.process import Worker, request_of
from mlagen.compile.resources import Resources
from mlagen.plan.jobs import CompileJob
from mlagen.plan.targets import TARGETS


def compile_jobs(
    package_dir: Path,
    jobs: Sequence[CompileJob],
    *,
    workers: int | None = None,
    cache_dir: Path | None = None,
    on_done: Callable[[Resources], None] | None = None,
) -> list[Resources]:
    """Compile kernels of a generated package for their targets; needs no GPU.

    Args:
        package_dir: folder of the generated package.
        jobs: what to compile.
        workers: processes at most; the number of cores if None.
        cache_dir: folder of earlier results; `default_cache_dir()` if None.
        on_done: called in this thread with each result as it comes, cached ones first.

    Returns:
        What each job's kernel takes, in the order of `jobs`.

    Raises:
        ToolError: a kernel does not compile or does not fit its job, or a worker died or took too long.
    """
    package_dir = package_dir.resolve()
    cache = ResultCache(cache_dir or default_cache_dir())
    digest, triton = functools.cache(SourceDigests(package_dir).digest), triton_version()
    results: dict[int, Resources] = {}
    # Rows of a tile table may ask for the same compilation.
    missing: dict[str, list[int]] = {}

    def done(index: int, measured: Measured, *, cached: bool) -> None:
        results[index] = _resources(jobs[index], measured, cached=cached)
        if on_done is not None:
            on_done(results[index])

    for index, job in enumerate(jobs):
        request = request_of(job)
        key = content_key(triton, digest(job.module, job.kernel), request)
        if key not in missing and (measured := cache.get(key)) is not None:
            done(index, measured, cached=True)
        else:
            missing.setdefault(key, []).append(index)

    if missing:
        tasks = [_Task(key, jobs[indices[0]]) for key, indices in missing.items()]
        # closing: workers end before an exception, or Ctrl-C, leaves here.
        with contextlib.closing(_run(package_dir, tasks, workers or os.cpu_count() or 1)) as outcomes:
            for task, measured in outcomes:
                cache.put(task.key, measured)
                for place, index in enumerate(missing[task.key]):
                    done(index, measured, cached=place > 0)
    return [results[index] for index in range(len(jobs))]


@dataclass(frozen=True)
class _Task:
    """A compilation to do: its key in the cache, and the first job that asks for it."""

    key: str
    job: CompileJob


def _run(package_dir: Path, tasks: list[_Task], workers: int) -> Generator[tuple[_Task, Measured], None, None]:
    """Spread tasks over worker processes; gives results as they come and leaves no process behind."""
    queue: SimpleQueue[_Task] = SimpleQueue()
    for task in tasks:
        queue.put(task)
    outcomes: SimpleQueue[tuple[_Task, Measured] | Exception] = SimpleQueue()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlagen-compile-")))
        for number in range(min(workers, len(tasks))):
            worker = stack.enter_context(contextlib.closing(Worker(package_dir, folder / str(number))))
            thread = threading.Thread(target=_serve, args=(worker, queue, outcomes), daemon=True)
            thread.start()
            # Left in reverse: the worker is killed, its thread sees that and ends, the pipes close.
            stack.callback(thread.join)
            stack.callback(worker.kill)
        for _ in tasks:
            outcome = outcomes.get()
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome


def _serve(
    worker: Worker, queue: SimpleQueue[_Task], outcomes: SimpleQueue[tuple[_Task, Measured] | Exception]
) -> None:
    """Feed one worker until no task is left or one fails; runs in a thread."""
    with contextlib.suppress(Empty):
        while True:
            task = queue.get_nowait()
            try:
                outcomes.put((task, worker.compile(task.job)))
            except Exception as error:
                # The other thread raises it, whatever it is.
                outcomes.put(error)
                return


def _resources(job: CompileJob, measured: Measured, *, cached: bool) -> Resources:
    return Resources(
        module=job.module,
        kernel=job.kernel,
        variant=job.variant,
        target=job.target,
        num_warps=job.num_warps,
        num_stages=job.num_stages,
        registers=measured.registers,
        scalar_registers=measured.scalar_registers,
        spills=measured.spills,
        loop_spills=measured.loop_spills,
        shared=measured.shared,
        shared_limit=TARGETS[job.target].shared_limit,
        expected_shared=job.expected_shared,
        expected_products=job.expected_products,
        tensor_memory=measured.tensor_memory,
        instructions=measured.instructions,
        seconds=measured.seconds,
        cached=cached,
    )


def triton_version() -> str:
    """The version of the Triton that compiles."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        # A build for ROCm goes by another name.
        import triton

        return str(triton.__version__)
