"""mbarriers and named barriers: who waits for whom, and the clocks that pass between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlagen.verify.gluon import lines
from mlagen.verify.gluon.program import ACTORS, KernelError, Partition, Program, partition
from mlagen.verify.gluon.values import Array


class MBarrier:
    """An mbarrier: arrivals and bytes that its phase still waits for, and the clocks of those that came.

    Args:
        count: arrivals of a phase.
    """

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = 0
        self.completed = 0  # phases
        self.line = lines.here()
        self._made = partition().number, int(partition().clock[partition().number])
        self.loads = Program.current.actor()  # clock of the copies by descriptor that complete at it
        self._arrived: tuple[Array, Array] = self._nothing()
        self._passed: tuple[Array, Array] = self._nothing()  # of the phase that completed last
        self._waited: dict[int, int] = {}

    @property
    def _name(self) -> str:
        return f"the mbarrier of {lines.place(self.line)}"

    @staticmethod
    def _nothing() -> tuple[Array, Array]:
        return np.zeros(ACTORS, np.int64), np.zeros(ACTORS, np.int64)

    def arrive(self, count: int, clock: Array, fenced: Array | None = None) -> None:
        """Takes arrivals, and the clocks of those who arrive.

        Raises:
            KernelError: the phase takes fewer.
        """
        np.maximum(self._arrived[0], clock, out=self._arrived[0])
        if fenced is not None:
            np.maximum(self._arrived[1], fenced, out=self._arrived[1])
        self.pending -= count
        if self.pending < 0:
            raise KernelError(f"{self._name} gets more arrivals than the {self.count} of a phase")
        self._complete()

    def require_fence(self) -> None:
        """Raises KernelError if the async proxy, which completes copies by descriptor, may not see that it was made."""
        actor, epoch = self._made
        if partition().fenced[actor] < epoch:
            raise KernelError(
                f"no fence_async_shared between the init of {self._name} and a copy by descriptor at {lines.at()}"
            )

    def load(self, size: int) -> None:
        """Takes the bytes of a copy by descriptor."""
        self._arrived[0][self.loads] = self.completed + 1
        self.bytes -= size
        self._complete()

    def expect(self, size: int) -> None:
        """Waits for bytes of such copies."""
        self.bytes += size

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.completed += 1
            self.pending = self.count
            self._passed, self._arrived = self._arrived, self._nothing()

    def wait(self, phase: int) -> None:
        """Has the partition that runs wait for the phase of this parity.

        Raises:
            KernelError: it has waited for that very one.
        """
        own = partition()
        parity = phase & 1
        own.wait(lambda: self.completed & 1 != parity, f"phase {parity} of {self._name}")
        if self._waited.get(own.number) == self.completed:
            raise KernelError(f"{own.name} waits twice for one phase of {self._name}, at {lines.at()}")
        self._waited[own.number] = self.completed
        own.acquire(*self._passed)

    def check(self) -> None:
        """Raises KernelError if a phase has begun and did not complete."""
        if self.pending != self.count or self.bytes:
            came = f"{self.count - self.pending} of {self.count} arrivals, and {self.bytes} bytes are missing"
            raise KernelError(f"{self._name} is left with {came}")


class NamedBarriers:
    """The named barriers of a program, by number."""

    def __init__(self) -> None:
        self._known: dict[int, _Named] = {}

    def arrive(self, number: int, threads: int) -> None:
        """The partition that runs arrives, and goes on."""
        self._of(number, threads).take(partition())

    def sync(self, number: int, threads: int) -> None:
        """The partition that runs arrives, and waits for the others."""
        one, own = self._of(number, threads), partition()
        generation = one.take(own)
        own.wait(lambda: one.generation > generation, f"named barrier {number}")
        own.acquire(*one.clocks[generation])

    def _of(self, number: int, threads: int) -> _Named:
        if not 0 <= number < 16:
            raise KernelError(f"named barrier {number} at {lines.at()}: there are 16")
        one = self._known.setdefault(number, _Named(number, threads))
        if one.threads != threads:
            if one.arrived:
                sizes = f"{one.threads} threads, and of {threads}"
                raise KernelError(f"named barrier {number} is of {sizes} at {lines.at()}")
            one.threads = threads
        return one

    def check(self) -> None:
        """Raises KernelError if someone arrived at a barrier that did not complete."""
        for number, one in self._known.items():
            if one.arrived:
                who = ", ".join(f"{name} at {lines.place(line)}" for name, line in one.arrived.values())
                raise KernelError(f"named barrier {number} is left incomplete: {who} arrived")


class _Named:
    """A named barrier."""

    def __init__(self, number: int, threads: int) -> None:
        self.number, self.threads = number, threads
        self.generation = 0
        self.arrived: dict[int, tuple[str, int]] = {}
        self.clocks: dict[int, Any] = {}
        self._count = 0
        self._joined = MBarrier._nothing()

    def take(self, own: Partition) -> int:
        """Takes a partition's arrival; the generation that it is of."""
        generation, line = self.generation, lines.here()
        if own.number in self.arrived:
            before = lines.place(self.arrived[own.number][1])
            raise KernelError(
                f"{own.name} arrives at named barrier {self.number} at {lines.place(line)}, and did so at {before}: "
                "the others have not come since"
            )
        self.arrived[own.number] = own.name, line
        clock, fenced = own.released()
        np.maximum(self._joined[0], clock, out=self._joined[0])
        np.maximum(self._joined[1], fenced, out=self._joined[1])
        self._count += own.threads
        if self._count > self.threads:
            place = lines.place(line)
            raise KernelError(f"named barrier {self.number} of {self.threads} threads gets more, at {place}")
        if self._count == self.threads:
            self.clocks[generation] = self._joined
            self.clocks.pop(generation - 8, None)
            self.generation += 1
            self.arrived, self._count, self._joined = {}, 0, MBarrier._nothing()
        return generation
