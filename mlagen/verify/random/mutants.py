"""Synchronisation mutants: copies of packages without one wait, arrive, barrier or fence, under random calls on a GPU.

    python -m mlagen.verify.random.mutants generated/dsv32 generated/dsv3 --processes 12 --report mutants.json

Each mutant runs in a process of its own, forked from one that has imported torch and Triton: a hang is ended by a time
limit and counts as noticed. Which shapes of random calls reach a module, and compile soonest, is found first, by calls
of the package as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mlagen.errors import UsageError
from mlagen.verify.random.delays import delayed
from mlagen.verify.random.reached import REACHED, modules_of
from mlagen.verify.random.syncs import Sync, sm90_files, syncs_of, without
from mlagen.verify.random.tally import Station, Tally
from mlagen.verify.worker import import_package, prepare

SCOUTED = 24  # shapes that are tried for a module
VOID = ("not compiled", "slow")  # outcomes that say nothing of a mutant
UNCAPTURED = ("once", "twice", "in a row", "beside")  # the watch asks for events, which a capture forbids
PER_KERNEL = 2  # shapes that are kept for a kernel of it


@dataclass(frozen=True)
class Task:
    """Work of a process.

    Attributes:
        package: folder of the package as it is generated.
        module: the module of the mutant.
        sync: the sync that is dropped; None: none is, and shapes are sought.
        shapes: of random calls that reach the module.
    """

    package: Path
    module: str
    sync: Sync | None = None
    shapes: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Its name."""
        return f"{self.package.name}/{self.sync.name}" if self.sync else f"{self.module}: shapes"


@dataclass
class Outcome:
    """Outcome of a task.

    Attributes:
        how: "wrong", "hang", "crash", "survived", or "shapes"; "not compiled" and "slow" say nothing of the mutant.
        detail: the finding.
        calls, seconds: that it took.
        shapes: that reach the module.
    """

    how: str
    detail: str = ""
    calls: int = 0
    seconds: float = 0.0
    shapes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """How mutants run.

    Attributes:
        seed: of all that is drawn.
        calls, seconds: most calls of a shape, and seconds of them.
        limit: seconds of a mutant in all.
        hang: a launched kernel that does not end within this many seconds hangs.
        processes: mutants side by side.
        delays: delays stand in front of the other syncs.
    """

    seed: int
    calls: int
    seconds: float
    limit: float
    hang: float
    processes: int
    delays: bool


def mutated(task: Task, work: Path, delays: bool) -> Path:
    """A copy of the task's package, without its sync, in `work`."""
    copy = work / task.package.name
    shutil.copytree(task.package, copy)
    for path in sm90_files(copy):
        text = path.read_text(encoding="utf-8")
        if task.sync and path.stem == task.module:
            text = without(text, task.sync)
        path.write_text(delayed(text) if delays else text, encoding="utf-8")
    return copy


def _leave(work: Path, outcome: Outcome) -> None:
    """Ends the process; the outcome stays in a file."""
    with contextlib.suppress(OSError):
        (work / "outcome.json").write_text(json.dumps(asdict(outcome)))
    os._exit(0)


class Watch(threading.Thread):
    """Ends the process with a hang if a launched kernel does not end.

    Args:
        launch: the package's function of that name, as `watched` has replaced it.
        work: folder for the outcome.
        seconds: that a kernel may take.
    """

    def __init__(self, launch: Any, work: Path, seconds: float) -> None:
        super().__init__(daemon=True)
        self._work, self._seconds = work, seconds
        self._last: tuple[Any, float] | None = None
        launch.after = self._launched

    def _launched(self) -> None:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._last = event, time.monotonic()

    def run(self) -> None:
        """Looks at the last launch, again and again; the file "alive" is as old as the last look."""
        while True:
            time.sleep(0.2)
            if self._last is not None:
                (self._work / "alive").touch()
                event, begin = self._last
                if time.monotonic() - begin > self._seconds and not event.query():
                    _leave(self._work, Outcome("hang", f"a kernel ran for {self._seconds:g} s"))


def perform(task: Task, settings: Settings, work: Path) -> Outcome:
    """Does a task, in a process of its own."""
    from mlagen.verify.call.subject import launch_of
    from mlagen.verify.random.station import Tester

    package = import_package(mutated(task, work, settings.delays))
    station = Station(task.package.name, *REACHED[task.module])
    tester = Tester(station, package, "cuda", settings.seed, ways=UNCAPTURED)
    Watch(launch_of(package).launch, work, settings.hang).start()
    if task.sync is None:
        return _scout(task, tester, settings)
    calls = 0
    for shape in task.shapes:
        tally = tester.batch(shape, 0, settings.calls, settings.seconds, lambda _: None, stop=True)
        calls += tally.calls
        if tally.failures:
            number, way, detail = tally.failures[0]
            compiled = "CompilationError" not in detail and "PassManager" not in detail
            return Outcome("wrong" if compiled else "not compiled", f"{shape}.{number} {way}: {detail}", calls)
    return Outcome("survived", calls=calls)


def _scout(task: Task, tester: Any, settings: Settings) -> Outcome:
    """Shapes that reach the module's kernels and are right, those that compile soonest."""
    found: dict[str, list[tuple[float, int]]] = {}
    wrong = []
    begin = time.monotonic()
    for shape in range(SCOUTED):
        if time.monotonic() - begin > settings.limit / 2:
            break
        tally: Tally = tester.batch(shape, 0, 6, settings.seconds, lambda _: None)
        wrong += [f"{shape}.{number} {way}: {detail}" for number, way, detail in tally.failures]
        for kernel in tally.kernels if not tally.wrong else ():
            if kernel.startswith(f"{task.module}:"):
                found.setdefault(kernel, []).append((tally.first_seconds, shape))
        if tally.broken or (found and all(len(timed) > PER_KERNEL for timed in found.values()) and shape > 5):
            break
    shapes = {shape for timed in found.values() for _, shape in sorted(timed)[:PER_KERNEL]}
    return Outcome("shapes", "; ".join(wrong)[:400], shapes=sorted(shapes))


class Process:
    """A forked process that does a task; it is killed when it takes too long.

    Args:
        task: its work.
        settings: how.
        root: folder for its files.
    """

    def __init__(self, task: Task, settings: Settings, root: Path) -> None:
        self.task, self._limit, self._hang = task, settings.limit, settings.hang
        self._work = Path(tempfile.mkdtemp(dir=root))
        self._begin = time.monotonic()
        self._pid = os.fork()
        if self._pid == 0:
            self._live(settings)

    def _live(self, settings: Settings) -> None:
        """The forked process: leaves the outcome in a file, and ends without a word to its parent's handlers."""
        os.setsid()
        try:
            outcome = perform(self.task, settings, self._work)
        except BaseException as error:
            said = "".join(traceback.format_exception_only(error)).strip()
            outcome = Outcome("crash", said[-400:])
        _leave(self._work, outcome)

    def _stuck(self) -> bool:
        """Whether its watch looks no more: to load a module behind a kernel that hangs blocks all threads."""
        with contextlib.suppress(OSError):
            return time.time() - (self._work / "alive").stat().st_mtime > 3 * self._hang
        return False

    def outcome(self) -> Outcome | None:
        """The outcome; None while it runs."""
        seconds = round(time.monotonic() - self._begin, 1)
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        stuck = pid == 0 and self._stuck()
        if pid == 0 and seconds < self._limit and not stuck:
            return None
        if pid == 0:
            os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            found = Outcome("hang", "a launched kernel blocks the process") if stuck else Outcome("slow")
        elif (self._work / "outcome.json").is_file():
            found = Outcome(**json.loads((self._work / "outcome.json").read_text()))
        else:
            found = Outcome("crash", f"the process died: {status}")
        shutil.rmtree(self._work, ignore_errors=True)
        found.seconds = seconds
        return found


def run_all(tasks: Sequence[Task], settings: Settings, root: Path) -> Iterator[tuple[Task, Outcome]]:
    """Does tasks side by side; gives each with its outcome as it comes."""
    waiting, running = list(reversed(tasks)), list[Process]()
    while waiting or running:
        while waiting and len(running) < settings.processes:
            running.append(Process(waiting.pop(), settings, root))
        time.sleep(0.05)
        for process in list(running):
            outcome = process.outcome()
            if outcome is not None:
                running.remove(process)
                yield process.task, outcome


def table(outcomes: dict[str, Outcome], redundant: Sequence[str]) -> Iterator[str]:
    """Lines of a table by module: mutants, redundant ones, noticed ones and how, and survivors by name."""
    outcomes = {name: one for name, one in outcomes.items() if one.how != "shapes"}
    modules = sorted({name.partition(":")[0] for name in outcomes})
    noticed_in_all = counted_in_all = 0
    for module in modules:
        own = {name: one for name, one in outcomes.items() if name.partition(":")[0] == module}
        void = sorted(name for name, one in own.items() if one.how in VOID)
        counted = {name: one for name, one in own.items() if name not in redundant and name not in void}
        how = Counter(one.how for one in counted.values())
        noticed = sum(how.values()) - how["survived"]
        noticed_in_all, counted_in_all = noticed_in_all + noticed, counted_in_all + len(counted)
        ways = ", ".join(f"{count} {word}" for word, count in sorted(how.items()) if word != "survived")
        yield f"{module}: {len(own)} mutants, {len(set(redundant) & own.keys())} redundant, {noticed} noticed ({ways})"
        yield from (f"    {own[name].how}: {name}" for name in void)
        yield from (f"    survived: {name}" for name, one in sorted(counted.items()) if one.how == "survived")
    share = 100 * noticed_in_all / counted_in_all if counted_in_all else 100.0
    yield f"{noticed_in_all} of {counted_in_all} noticed: {share:.1f} %"


def redundant_names(paths: Sequence[Path]) -> list[str]:
    """Names of syncs, with packages, that files list as redundant, each with the reason: mappings in YAML."""
    if not paths:
        return []
    import yaml

    return [name for path in paths for name in yaml.safe_load(path.read_text(encoding="utf-8")) or {}]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mlagen.verify.random.mutants", description="Runs sm90 kernels that lack a synchronisation."
    )
    parser.add_argument("packages", type=Path, nargs="*", help="folders of generated packages")
    parser.add_argument("--modules", default="*", help="shell pattern of modules: _topk_sm90")
    parser.add_argument("--only", default="*", help="shell pattern of mutants: *:mbarrier.wait:*")
    parser.add_argument("--part", default="1/1", help="which of how many parts of the mutants: 1/3")
    parser.add_argument("--processes", type=int, default=12, help="mutants side by side; default 12")
    parser.add_argument("--seconds", type=float, default=6.0, help="of calls of a shape; default 6")
    parser.add_argument("--calls", type=int, default=150, help="most calls of a shape; default 150")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of a mutant in all; default 150")
    parser.add_argument("--hang", type=float, default=8.0, help="seconds that a kernel may take; default 8")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn; default 0")
    parser.add_argument("--no-delays", action="store_true", help="without delays in front of what is left")
    parser.add_argument("--list", action="store_true", help="print the names of the mutants and end")
    parser.add_argument("--report", type=Path, help="write outcomes here, after each one")
    parser.add_argument("--read", type=Path, nargs="+", help="print the table of these reports and end")
    parser.add_argument(
        "--redundant", type=Path, nargs="+", default=[], help="YAML of redundant syncs: they do not run"
    )
    parser.add_argument("--resume", action="store_true", help="run what --report lacks, then what survived")
    return parser


def _read(paths: Sequence[Path]) -> dict[str, Outcome]:
    """The outcomes of reports, by the names of their tasks."""
    found: dict[str, Outcome] = {}
    for path in paths:
        found |= {name: Outcome(**one) for name, one in json.loads(path.read_text()).items()}
    return found


def _tasks(modules: dict[str, Path], shapes: dict[str, tuple[int, ...]], options: argparse.Namespace) -> list[Task]:
    """The mutants of a part that are not redundant; those of a module stand apart, so each part has some of all."""
    redundant = redundant_names(options.redundant)
    part, parts = (int(number) for number in options.part.split("/"))
    found: list[Task] = []
    for module, folder in modules.items():
        for sync in syncs_of(folder / f"{module}.py"):
            task = Task(folder, module, sync, shapes.get(module, ()))
            if fnmatch.fnmatchcase(sync.name, options.only) and task.name not in redundant:
                found.append(task)
    found.sort(
        key=lambda task: task.sync is not None and task.sync.columns is not None
    )  # waits for products last: most make ptxas wait itself
    return found[part - 1 :: parts]


def _run(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Outcome]:
    settings = Settings(
        options.seed,
        options.calls,
        options.seconds,
        options.limit,
        options.hang,
        options.processes,
        not options.no_delays,
    )
    prepare("cuda")
    from mlagen.verify.random import station

    assert station.DRAWS
    modules = {
        name: folder
        for name, folder in modules_of(options.packages, options.modules).items()
        if any(fnmatch.fnmatchcase(sync.name, options.only) for sync in syncs_of(folder / f"{name}.py"))
    }
    outcomes = _read([options.report]) if options.resume and options.report.is_file() else {}

    def run(tasks: Sequence[Task], settings: Settings) -> None:
        again = [task for task in tasks if task.name in outcomes and outcomes[task.name].how in ("survived", *VOID)]
        left = [task for task in tasks if task.name not in outcomes] + again
        if left and not torch.cuda.is_available():
            raise UsageError("mutants run on a GPU, and torch sees none; --list and --read need none")
        for number, (task, outcome) in enumerate(run_all(left, settings, Path(root)), 1):
            outcomes[task.name] = outcome
            found = outcome.shapes if task.sync is None else outcome.detail[:150]
            say(f"{number}/{len(left)} {task.name}: {outcome.how} in {outcome.seconds} s  {found}")
            if options.report:
                options.report.write_text(json.dumps({name: asdict(one) for name, one in outcomes.items()}, indent=1))

    with tempfile.TemporaryDirectory(prefix="mlagen-mutants-") as root:
        scouts = [Task(folder, module) for module, folder in modules.items()]
        run(scouts, replace(settings, limit=2 * settings.limit))
        shapes = {scout.module: tuple(outcomes[scout.name].shapes) for scout in scouts}
        run([task for task in _tasks(modules, shapes, options) if task.shapes], settings)
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    """Runs mutants, or prints the table of reports; 0 where at least 97 of 100 were noticed, else 1."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.resume and options.report is None:
        parser.error("--resume takes --report, the report to go on with")
    if options.list:
        for module, folder in modules_of(options.packages, options.modules).items():
            for sync in syncs_of(folder / f"{module}.py"):
                print(f"{folder.name}/{sync.name}  # {sync.kind}, line {sync.line}")
        return 0
    if options.read:
        outcomes = _read(options.read)
    else:
        try:
            outcomes = _run(options, lambda line: print(line, file=sys.stderr, flush=True))
        except UsageError as error:
            parser.error(str(error))
    lines = list(table(outcomes, redundant_names(options.redundant)))
    print("\n".join(lines))
    return 0 if float(lines[-1].rpartition(": ")[2].removesuffix(" %")) >= 97 else 1


if __name__ == "__main__":
    sys.exit(main())
