"""Random calls in several processes at a time; needs neither torch nor Triton here."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlagen.errors import ToolError, UsageError
from mlagen.verify.random.report import Report, file_hashes
from mlagen.verify.random.tally import Station, Tally
from mlagen.workers import Limit, Worker, WorkerError

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 300.0  # that importing torch, Triton and packages may take
COMPILE_SHARE = 0.45  # of a process's time that first calls of shapes may take before a known shape is taken again
FORCED_WEIGHT = 3  # batches of forced sm90 kernels are so many times as long
MOST_LINES = 200  # of failures that a report holds


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        folders: of packages.
        sources: the folders that a line to repeat a call names; empty: the same.
        originals: folders of the text without delays, for the hashes in the report; empty: the same.
        device: "cpu" or "cuda".
        seconds: that it may take, from when the processes are ready.
        seed: of all that is drawn.
        processes: how many make calls at a time.
        only: shell patterns of family/kernel; empty: all.
        limit: seconds that one call may take, compilation included.
        batch: most calls of a batch.
        batch_seconds: that a batch may take.
        delays: the packages are copies with delays.
        most_wrong: wrong calls after which the run ends.
        most_calls: calls after which the run ends; 0: any number.
    """

    folders: tuple[str, ...]
    device: str = "cuda"
    seconds: float = 60.0
    seed: int = 0
    processes: int = 4
    only: tuple[str, ...] = ()
    limit: float = 180.0
    batch: int = 60
    batch_seconds: float = 3.0
    delays: bool = False
    most_wrong: int = 1000
    most_calls: int = 0
    sources: tuple[str, ...] = ()
    originals: tuple[str, ...] = ()

    def repeat(self, station: Station, shape: int, call: int) -> str:
        """The command that repeats a call."""
        delays = " --delays" if self.delays else ""
        source = dict(zip(self.folders, self.sources or self.folders, strict=True))[station.package]
        return (
            f"python -m mlagen.verify.random {source} --device {self.device} --seed {self.seed}"
            f" --only {station.family}/{station.kernel} --call {shape}.{call}{delays}"
        )


class Caller(Worker):
    """A process that makes random calls.

    Args:
        settings: of the run.
        progress: file that names the present call.
    """

    def __init__(self, settings: Settings, progress: Path) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        super().__init__([sys.executable, "-m", "mlagen.verify.random.worker"], env)
        self._progress = progress
        self._limit = settings.limit
        self._job = {
            "device": settings.device,
            "seed": settings.seed,
            "folders": list(settings.folders),
            "only": list(settings.only),
            "progress": str(progress),
        }
        self._ready: dict[str, Any] | None = None

    def begin(self) -> None:
        """Starts a process, which gets itself ready while others are waited for."""
        self._progress.write_text("0")
        self._ready = None
        self.send(self._job)

    def open(self) -> dict[str, Any]:
        """Stations and machine of the process, once it is ready.

        Raises:
            ToolError: it died, or was not ready in time.
        """
        if not self.running:
            self.begin()
        if self._ready is None:
            try:
                self._ready = self.receive(_within(START_SECONDS))
            except WorkerError as error:
                how = error.late or f"died ({error.end})"
                raise ToolError(f"the process of random calls {how}:\n{error.words}") from None
        return self._ready

    def batch(self, request: dict[str, Any]) -> Tally:
        """The tally of a batch; a call that kills or hangs the process is wrong."""
        self.open()
        begin = time.monotonic()
        try:
            answer = self.ask(request, _within(request["seconds"] + self._limit))
        except WorkerError as error:
            call = int(self._progress.read_text() or 0)
            what = error.late or f"the process died ({error.end})"
            detail = ": ".join([what, *error.words.splitlines()[-1:]])
            seconds = time.monotonic() - begin
            done = max(call - request["first"], 0)
            return Tally(
                drawn=done + 1,
                calls=done + 1,
                wrong=1,
                seconds=seconds,
                failures=[(call, "hang", detail)],
                broken=True,
            )
        tally = Tally.from_json(answer)
        if tally.broken:
            self.end()
        return tally


def _within(seconds: float) -> Limit:
    """A limit of time, since a GPU that hangs keeps its process waiting or busy."""
    return Limit(seconds, wall=seconds, idle=seconds)


class Run:
    """A run of random calls.

    Args:
        settings: of the run.
        say: is called with each line of a failure, and how it goes on.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say
        self._lock = threading.Lock()
        self._stations: list[Station] = []
        self._errors: list[BaseException] = []
        self.report = Report({})

    def run(self) -> Report:
        """Makes the calls; the report of them.

        Raises:
            ToolError: a process broke outside any call.
            UsageError: no station is left.
        """
        settings = self._settings
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlagen-random-")))
            callers = [Caller(settings, folder / f"call{number}") for number in range(settings.processes)]
            for caller in callers:
                stack.callback(caller.close)
                caller.begin()
            self._stations = [Station(**one) for one in callers[0].open()["stations"]]
            if not self._stations:
                raise UsageError(f"no family and kernel match {', '.join(settings.only)}")
            for caller in callers:
                caller.open()
            self._begin(callers[0].open()["machine"])
            threads = [
                threading.Thread(target=self._serve, args=(number, caller), daemon=True)
                for number, caller in enumerate(callers)
            ]
            start = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.report.run["wall_seconds"] = round(time.monotonic() - start, 1)
        if self._errors:
            raise self._errors[0]
        return self.report

    def _begin(self, machine: dict[str, str]) -> None:
        settings = self._settings
        self.report.run = {
            **machine,
            "seed": settings.seed,
            "processes": settings.processes,
            "delays": settings.delays,
            "only": list(settings.only),
        }
        for folder in settings.originals or settings.folders:
            self.report.packages[Path(folder).name] = file_hashes(Path(folder))

    def _over(self, end: float) -> bool:
        total = self.report.total
        most = self._settings.most_calls
        return time.monotonic() > end or total.wrong >= self._settings.most_wrong or bool(most and total.calls >= most)

    def _serve(self, number: int, caller: Caller) -> None:
        try:
            self._make_calls(number, caller)
        except BaseException as error:
            self._errors.append(error)

    def _make_calls(self, number: int, caller: Caller) -> None:
        """Batches of a process: its own share of the stations in turn, shapes of its own, new ones while time bears."""
        settings = self._settings
        chance = random.Random(f"{settings.seed}/{number}")
        own = [index for index in range(len(self._stations)) if index % settings.processes == number]
        if len(self._stations) < 2 * settings.processes:
            own = [(index + number) % len(self._stations) for index in range(len(self._stations))]
        else:
            chance.shuffle(own)
        known: dict[int, list[int]] = defaultdict(list)
        after: dict[tuple[int, int], int] = defaultdict(int)  # the number of a shape's next call
        start, first_seconds = time.monotonic(), 0.0
        end = start + settings.seconds
        turn = 0
        while not self._over(end):
            index = own[turn % len(own)]
            turn += 1
            spent = time.monotonic() - start
            if not known[index] or first_seconds < COMPILE_SHARE * spent:
                known[index].append(number + settings.processes * len(known[index]))
                shape = known[index][-1]
            else:
                shape = chance.choice(known[index])
            first = after[index, shape]
            weight = FORCED_WEIGHT if self._stations[index].kernel.startswith("sm90") else 1
            seconds = max(0.1, min(weight * settings.batch_seconds, end - time.monotonic()))
            request = {
                "station": index,
                "shape": shape,
                "first": first,
                "most": weight * settings.batch,
                "seconds": seconds,
            }
            tally = caller.batch(request)
            after[index, shape] += tally.drawn
            if first == 0:
                first_seconds += tally.first_seconds
            with self._lock:
                self._count(self._stations[index], shape, tally)

    def _count(self, station: Station, shape: int, tally: Tally) -> None:
        self.report.add(station, tally)
        for call, way, detail in tally.failures:
            self.report.hangs += way == "hang"
            line = f"{self._settings.repeat(station, shape, call)}  # {way}: {detail}"
            if len(self.report.failures) < MOST_LINES:
                self.report.failures.append(line)
                self._say(line)


def random_calls(settings: Settings, say: Callable[[str], None]) -> Report:
    """Makes random calls of packages; the report of them.

    Args:
        settings: of the run.
        say: is called with each line of a failure.

    Raises:
        ToolError: a process broke outside any call.
        UsageError: no family and kernel match the settings.
    """
    return Run(settings, say).run()


def repeat_call(settings: Settings, shape: int, call: int) -> tuple[str, Tally]:
    """Make one call of the only station again. Return the case in words, and the tally.

    Raises:
        UsageError: the settings name more or fewer than one station.
    """
    with tempfile.TemporaryDirectory(prefix="mlagen-random-") as folder:
        caller = Caller(settings, Path(folder) / "call")
        try:
            stations: Sequence[Any] = caller.open()["stations"]
            if len(stations) != 1:
                raise UsageError(f"--call takes one package, family and kernel, got {len(stations)}")
            case = caller.ask({"station": 0, "shape": shape, "describe": call}, _within(settings.limit))["case"]
            request = {"station": 0, "shape": shape, "first": call, "most": 1, "seconds": settings.seconds}
            return case, caller.batch(request)
        finally:
            caller.close()
