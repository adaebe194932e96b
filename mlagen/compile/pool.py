"""Compilation of jobs in worker processes, one per core, after a look-up in the cache."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlagen.compile.binary import Measured
from mlagen.compile.cache import ResultCache, content_key
from mlagen.compile.folder import default_cache_dir
from mlagen.compile.job import CompileJob
from mlagen.compile.process import Compiler, compiler, job_of, request_of
from mlagen.compile.resources import Resources
from mlagen.compile.toolchain import Toolchain, installed
from mlagen.digest import SourceDigests
from mlagen.errors import ToolError
from mlagen.plan.targets import SM90, TARGETS
from mlagen.workers import first_of_each, spread

KEY_DIGITS = 16  # of a key as people and proofs see it


def list_variants(
    package_dir: Path,
    targets: Sequence[str],
    *,
    toolchain: Toolchain | None = None,
    cache_dir: Path | None = None,
) -> list[CompileJob]:
    """List every kernel variant that a call of a generated package can launch, as its own `variants` enumerates them.

    Args:
        package_dir: folder of the generated package.
        targets: names of the targets.
        toolchain: the Triton of the package's import, which selects rows of its tables; None: the installed one.
        cache_dir: folder of earlier results; `default_cache_dir()` if None.

    Returns:
        A job per variant, by target in the given order, then in the package's order.

    Raises:
        ToolError: the package cannot be imported or does not list them, or the worker died or took too long.
    """
    package_dir, toolchain = package_dir.resolve(), toolchain or installed()
    cache = ResultCache(cache_dir or default_cache_dir())
    text = [(path.name, path.read_text(encoding="utf-8")) for path in sorted(package_dir.glob("*.py"))]
    found: dict[str, list[CompileJob]] = {}
    missing = {}
    for target in targets:
        key = content_key("variants", toolchain.version, text, target)
        described = cache.get_list(key)
        if described is None:
            missing[target] = key
        else:
            found[target] = [job_of(target, each) for each in described]
    if missing:
        with compiler(package_dir, toolchain) as worker:
            for target, key in missing.items():
                found[target] = worker.variants(target)
                cache.put_list(key, [request_of(job) for job in found[target]])
    return [job for target in targets for job in found[target]]


def compile_jobs(
    package_dir: Path,
    jobs: Sequence[CompileJob],
    *,
    toolchain: Toolchain | None = None,
    workers: int | None = None,
    cache_dir: Path | None = None,
    kernels_dir: Path | None = None,
    known: Callable[[str], Measured | None] = lambda key: None,
    fresh: bool = False,
    on_start: Callable[[CompileJob], None] | None = None,
    on_done: Callable[[Resources], None] | None = None,
) -> list[Resources]:
    """Compile kernels of a generated package for their targets; needs no GPU.

    Args:
        package_dir: folder of the generated package.
        jobs: the compilations.
        toolchain: the Triton that compiles; the installed one if None.
        workers: processes at most; the number of cores if None.
        cache_dir: folder of earlier results; `default_cache_dir()` if None.
        kernels_dir: folder for Triton's cache, which keeps all binaries. Earlier results are then not used. None:
            binaries are not kept.
        known: returns the known result of a `Resources.key`, or None.
        fresh: compile every job, and take no result from `known` or `cache_dir`.
        on_start: called in a worker's thread with each compiled job at its start; not for cached results.
        on_done: called in this thread with each result as it arrives, cached ones first.

    Returns:
        The resources of each job's kernel, in the order of `jobs`.

    Raises:
        ToolError: a kernel does not compile or does not fit its job, or a worker died or took too long.
    """
    package_dir, toolchain = package_dir.resolve(), toolchain or installed()
    if toolchain.folder is None and toolchain.version != installed().version:
        raise ToolError(f"triton {toolchain.version} is not available: {installed().version} is installed")
    cache = ResultCache(cache_dir or default_cache_dir())
    contents = _contents(package_dir)
    results: dict[int, Resources] = {}
    # Rows of a tile table may ask for the same compilation.
    missing: dict[str, list[int]] = {}

    def done(index: int, measured: Measured, *, cached: bool) -> None:
        job = jobs[index]
        results[index] = _resources(job, measured, toolchain.version, contents(job), cached=cached)
        if on_done is not None:
            on_done(results[index])

    for index, job in enumerate(jobs):
        key, measured = content_key(toolchain.version, contents(job)), None
        if key not in missing and kernels_dir is None and not fresh:
            measured = known(contents(job)[:KEY_DIGITS]) or cache.get(key)
        if measured is not None:
            done(index, measured, cached=True)
        else:
            missing.setdefault(key, []).append(index)

    if missing:
        tasks = [_Task(key, jobs[indices[0]]) for key, indices in missing.items()]
        tasks.sort(key=lambda task: task.job.target != SM90)  # sm90 first, since its kernels take longest
        tasks = first_of_each(tasks, lambda task: (task.job.target, task.job.kernel))
        started = workers or os.cpu_count() or 1
        by_ir = cache if kernels_dir is None and not fresh else None

        def compiled(worker: Compiler, task: _Task) -> tuple[_Task, Measured, bool]:
            if on_start is not None:
                on_start(task.job)
            return task, *worker.compile(task.job, by_ir)

        with tempfile.TemporaryDirectory(prefix="mlagen-compile-") as temporary:
            folders = [Path(temporary) / str(number) for number in range(min(started, len(tasks)))]
            compilers = [Compiler(package_dir, folder, toolchain, kernels_dir) for folder in folders]
            # closing: workers end before an exception, or Ctrl-C, leaves here.
            with contextlib.closing(spread(tasks, compilers, compiled)) as outcomes:
                for task, measured, by_known_ir in outcomes:
                    cache.put(task.key, measured)
                    for place, index in enumerate(missing[task.key]):
                        done(index, measured, cached=by_known_ir or place > 0)
    return [results[index] for index in range(len(jobs))]


def content_keys(package_dir: Path, jobs: Sequence[CompileJob]) -> list[str]:
    """Return the `Resources.key` of each job: a hash of its compilation's inputs except Triton."""
    return [contents(job)[:KEY_DIGITS] for contents in (_contents(package_dir.resolve()),) for job in jobs]


def _contents(package_dir: Path) -> Callable[[CompileJob], str]:
    digest = functools.cache(SourceDigests(package_dir).digest)
    return lambda job: content_key(digest(job.module, job.kernel), request_of(job))


@dataclass(frozen=True)
class _Task:
    """A compilation to do: its key in the cache, and the first job that asks for it."""

    key: str
    job: CompileJob


def _resources(job: CompileJob, measured: Measured, triton: str, content: str, *, cached: bool) -> Resources:
    return Resources(
        module=job.module,
        kernel=job.kernel,
        variant=job.variant,
        target=job.target,
        num_warps=job.num_warps,
        num_stages=job.num_stages,
        triton=triton,
        key=content[:KEY_DIGITS],
        registers=measured.registers,
        scalar_registers=measured.scalar_registers,
        spills=measured.spills,
        loop_spills=measured.loop_spills,
        shared=measured.shared,
        shared_limit=TARGETS[job.target].shared_limit,
        block_h=job.block_h,
        tabled=job.tabled,
        tensor_memory=measured.tensor_memory,
        instructions=measured.instructions,
        seconds=measured.seconds,
        cached=cached,
    )
