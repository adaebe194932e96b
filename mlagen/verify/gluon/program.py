"""One program of a launch: its partitions, asynchronous operations, their clocks, and the scheduler."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from mlagen.verify.gluon import lines
from mlagen.verify.gluon.values import Array

ACTORS = 96  # clocks of a program: partitions, their asynchronous operations, and descriptors' copies by barrier
LANES = 32


class KernelError(Exception):
    """A kernel breaks a rule of its synchronisation; the message names its lines."""


class _StoppedError(BaseException):
    """Ends a partition after its program failed."""


class Partition:
    """Warps that run one function.

    Attributes:
        number: its actor.
        warps, first_warp: how many, and which of the program is its first.
        clock: the last event of each actor that it is ordered after.
        fenced: the last writes of each partition that asynchronous operations see.
    """

    def __init__(self, program: Program, name: str, warps: int, first_warp: int) -> None:
        self.program, self.name, self.warps, self.first_warp = program, name, warps, first_warp
        self.number = program.actor()
        self.copies, self.products = program.actor(), program.actor()
        self.clock = np.zeros(ACTORS, np.int64)
        self.fenced = np.zeros(ACTORS, np.int64)
        self.clock[self.number] = 1
        self.copied = self.multiplied = 0  # asynchronous operations that were issued
        self.groups: list[int] = []  # copies up to each commit
        self.queues: dict[str, deque[Callable[[], None]]] = {"copies": deque(), "products": deque()}
        self.condition: Callable[[], bool] | None = None
        self.waits = ""
        self.go = threading.Semaphore(0)
        self.done = False
        self.error: BaseException | None = None

    @property
    def threads(self) -> int:
        """How many it has."""
        return self.warps * LANES

    def released(self) -> tuple[Array, Array]:
        """Its clocks, for someone to acquire; its later events are not among them."""
        clocks = self.clock.copy(), self.fenced.copy()
        self.clock[self.number] += 1
        return clocks

    def acquire(self, clock: Array, fenced: Array) -> None:
        """Orders later events behind another's clocks."""
        np.maximum(self.clock, clock, out=self.clock)
        np.maximum(self.fenced, fenced, out=self.fenced)

    def fence(self) -> None:
        """Lets asynchronous operations see the writes that come before here."""
        np.maximum(self.fenced, self.clock, out=self.fenced)
        self.clock[self.number] += 1

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Runs on when the condition holds."""
        if condition() and (self.program.rng.random() > 0.25 or self.program.partitions == [self]):
            return
        self.waits = f"{what} at {lines.at()}"
        if self.program.partitions == [self]:
            self.program.settle(self, condition)
            return
        self.condition = condition
        self.program.back.release()
        self.go.acquire()
        self.condition = None
        if self.program.stopped:
            raise _StoppedError

    def drain(self, queue: str, left: int = 0) -> None:
        """Completes asynchronous operations, in order, until so many are left."""
        own = self.queues[queue]
        while len(own) > left:
            own.popleft()()

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Runs its function; the thread's body."""
        self.go.acquire()
        try:
            if not self.program.stopped:
                with np.errstate(all="ignore"):  # which is a thread's own
                    function(*arguments)
        except _StoppedError:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self.program.back.release()


class Program:
    """One program as it runs.

    Args:
        number, programs: which one of how many.
        warps: of its default partition.
        seed: of the scheduler.
    """

    current: Program

    def __init__(self, number: int, programs: int, warps: int, seed: int) -> None:
        from mlagen.verify.gluon.barriers import NamedBarriers
        from mlagen.verify.gluon.shared import Arena

        self.number, self.programs = number, programs
        self.rng = np.random.default_rng((seed, number))
        self.actors = 0
        self.names: dict[int, str] = {}
        self.main = Partition(self, "the program", warps, 0)
        self.partition = self.main
        self.partitions = [self.main]
        self.before = self.actor()  # the kernel before: its end is an event
        self.arena = Arena()
        self.named = NamedBarriers()
        self.loads: list[deque[Callable[[], None]]] = []  # copies by descriptor, each of its own
        self.leftover: str | None = None  # the partition that ended before its copies did
        self.back = threading.Semaphore(0)
        self.stopped = False

    def actor(self) -> int:
        """A new clock's number."""
        if self.actors == ACTORS:
            raise KernelError(f"a program has more than {ACTORS} partitions, queues and barriers of copies")
        self.actors += 1
        return self.actors - 1

    def threaded(self) -> Array:
        """Which actors are partitions: asynchronous operations see their writes behind a fence."""
        found = np.zeros(ACTORS, bool)
        found[[self.main.number, *(part.number for part in self.partitions)]] = True
        return found

    def _queues(self) -> list[deque[Callable[[], None]]]:
        self.loads = [queue for queue in self.loads if queue]
        every = [queue for one in {*self.partitions, self.main} for queue in one.queues.values() if queue]
        return every + self.loads

    def settle(self, partition: Partition, condition: Callable[[], bool]) -> None:
        """Completes asynchronous operations until the condition of the only partition holds."""
        while not condition():
            queues = self._queues()
            if not queues:
                raise KernelError(f"deadlock: {partition.name} waits for {partition.waits}")
            queues[self.rng.integers(len(queues))].popleft()()

    def specialize(self, functions: list[tuple[Any, tuple[Any, ...]]], warps: list[int]) -> None:
        """Runs partitions concurrently until all are done."""
        parts, first = [], 0
        for number, ((function, _), count) in enumerate(zip(functions, [self.main.warps, *warps], strict=True)):
            name = getattr(function, "__name__", "a partition")
            part = Partition(self, f"{name} (partition {number})", count, first)
            first += count
            part.acquire(*self.main.released())
            parts.append(part)
        threads = [
            threading.Thread(target=part.run, args=given, daemon=True)
            for part, given in zip(parts, functions, strict=True)
        ]
        self.partitions = parts
        for thread in threads:
            thread.start()
        try:
            self._schedule(parts)
        finally:
            self.stopped = True
            for part in parts:
                if not part.done:
                    part.go.release()
            for thread in threads:
                thread.join()
            self.stopped = False
            self.partitions, self.partition = [self.main], self.main
        for part in parts:
            if part.clock[part.copies] < part.copied:
                self.leftover = part.name
            self.main.acquire(*part.released())
            self.main.queues["copies"].extend(part.queues["copies"])

    def _schedule(self, parts: list[Partition]) -> None:
        live = list(parts)
        while live:
            choices: list[Any] = [part for part in live if part.condition is None or part.condition()]
            choices += self._queues()
            if not choices:
                waits = "; ".join(f"{part.name} waits for {part.waits}" for part in live)
                raise KernelError(f"deadlock: {waits}")
            chosen = choices[self.rng.integers(len(choices))]
            if not isinstance(chosen, Partition):
                chosen.popleft()()
                continue
            self.partition = chosen
            chosen.go.release()
            self.back.acquire()
            if chosen.error is not None:
                raise chosen.error
            if chosen.done:
                if chosen.queues["products"]:
                    raise KernelError(f"{chosen.name} ends before its products do")
                live.remove(chosen)

    def require_scratch(self) -> None:
        """Raises KernelError if a copy may still write where scratch memory of later code lies."""
        if self.leftover is not None:
            raise KernelError(f"{self.leftover} ended before its copies did, into memory that is taken at {lines.at()}")

    def finish(self) -> None:
        """Completes pending operations, and checks the barriers.

        Raises:
            KernelError: one is left incomplete.
        """
        for queue in self._queues():
            while queue:
                queue.popleft()()
        self.named.check()
        self.arena.check()


def partition() -> Partition:
    """The partition that runs now."""
    return Program.current.partition
