"""Shared memory of a program: bytes, views of them, and who touched which four bytes last."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mlagen.verify.gluon import lines
from mlagen.verify.gluon.barriers import MBarrier
from mlagen.verify.gluon.program import KernelError, Partition, Program
from mlagen.verify.gluon.values import Array, decode, encode, itemsize, raw_dtype

CELL = 4  # bytes that are watched as one
LIMIT = 232_448  # bytes of a program
ALIGNMENT = 128
POISON = 0xFF  # NaN in every dtype, -1 as an integer


@dataclass
class _Log:
    """Who did one thing to the cells of an allocation.

    Attributes:
        epochs: by actor, its clock then, or 0.
        places: by actor, the number of its lines.
    """

    cells: int
    epochs: dict[int, Array] = field(default_factory=dict)
    places: dict[int, Array] = field(default_factory=dict)

    def note(self, actor: int, epoch: int, place: int, view: _View) -> None:
        """Takes note of an access."""
        if actor not in self.epochs:
            self.epochs[actor] = np.zeros(self.cells, np.int64)
            self.places[actor] = np.zeros(self.cells, np.int32)
        view.of(self.epochs[actor])[...] = epoch
        view.of(self.places[actor])[...] = place

    def unordered(self, clock: Array, view: _View, apart: int | None) -> tuple[int, int] | None:
        """An actor, and its place, whose access is not ordered before a clock."""
        for actor, epochs in self.epochs.items():
            if actor != apart:
                late = view.of(epochs) > clock[actor]
                if late.any():
                    return actor, int(view.of(self.places[actor])[late][0])
        return None


@dataclass(frozen=True)
class _View:
    """Cells of an allocation: numpy's shape, strides and offset."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, array: Array) -> Array:
        """These cells of one of its arrays."""
        size = array.itemsize
        strides = tuple(stride * size for stride in self.strides)
        return np.ndarray(self.shape, array.dtype, array, self.offset * size, strides)


class Allocation:
    """What one call allocates.

    Attributes:
        offset, size: bytes.
        line: of the call.
    """

    def __init__(self, offset: int, size: int) -> None:
        self.offset, self.size = offset, size
        self.line = lines.here()
        cells = -(-size // CELL)
        self.writes, self.reads = _Log(cells), _Log(cells)
        self.filled = np.zeros(cells, bool)
        self._views: dict[Any, _View] = {}

    def view(self, descriptor: Descriptor) -> _View:
        """The cells of a view."""
        size = itemsize(descriptor.dtype)
        key = descriptor.start, descriptor.shape, descriptor.strides, size
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = _cells(descriptor.start - self.offset, descriptor.shape, descriptor.strides, size)
        return found


def _cells(start: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> _View:
    sizes, steps = list(shape), list(strides)
    if size < CELL:
        inner = strides.index(size)
        sizes[inner] = max(1, sizes[inner] * size // CELL)
        steps[inner] = CELL
    elif size > CELL:
        sizes.append(size // CELL)
        steps.append(CELL)
    return _View(tuple(sizes), tuple(step // CELL for step in steps), start // CELL)


class Arena:
    """The shared memory of a program.

    Attributes:
        bytes: all of it.
        words: the same, four bytes each.
        hand: watches warps, where a kernel addresses shared memory itself; else None.
    """

    def __init__(self) -> None:
        self.bytes = np.full(LIMIT, POISON, np.uint8)
        self.words = self.bytes.view(np.uint32)
        self.end = 0
        self.barriers: dict[int, MBarrier] = {}
        self.hand: Any = None

    def allocate(self, dtype: Any, shape: tuple[int, ...], layout: Any) -> Descriptor:
        """Memory for a block.

        Raises:
            KernelError: there is no more.
        """
        size = math.prod(shape) * itemsize(dtype)
        start = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.end = start + size
        if self.end > LIMIT:
            raise KernelError(f"a program has {LIMIT} bytes of shared memory, and takes {self.end}")
        strides = tuple(math.prod(shape[dim + 1 :]) * itemsize(dtype) for dim in range(len(shape)))
        return Descriptor(self, Allocation(start, size), dtype, shape, strides, start, layout)

    def check(self) -> None:
        """Raises KernelError if an mbarrier is left in the middle of a phase."""
        for barrier in self.barriers.values():
            barrier.check()


@dataclass(frozen=True)
class Descriptor:
    """A view of shared memory.

    Attributes:
        start: its first byte.
        shape, strides: elements and bytes.
    """

    arena: Arena
    allocation: Allocation
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    layout: Any

    @property
    def type(self) -> Descriptor:
        """What a kernel asks of its type."""
        return self

    def index(self, index: Any) -> Descriptor:
        """One entry of the first dimension."""
        number = int(index)
        if not 0 <= number < self.shape[0]:
            raise KernelError(f"index {number} of {self.shape[0]} entries of shared memory at {lines.place(lines.here())}")
        start = self.start + number * self.strides[0]
        return replace(self, shape=self.shape[1:], strides=self.strides[1:], start=start)

    def slice(self, start: Any, length: Any, dim: int = 0) -> Descriptor:
        """Some entries of a dimension."""
        first, count = int(start), int(length)
        if first < 0 or first + count > self.shape[dim]:
            found = f"[{first}, {first + count}) of {self.shape[dim]}"
            raise KernelError(f"entries {found} of shared memory at {lines.place(lines.here())}")
        shape = (*self.shape[:dim], count, *self.shape[dim + 1 :])
        return replace(self, shape=shape, start=self.start + first * self.strides[dim])

    def permute(self, order: Any) -> Descriptor:
        """The dimensions in another order."""
        shape = tuple(self.shape[dim] for dim in order)
        return replace(self, shape=shape, strides=tuple(self.strides[dim] for dim in order))

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Descriptor:
        """The bytes as another block.

        Raises:
            KernelError: it has more bytes.
        """
        sizes = tuple(int(size) for size in shape)
        size = itemsize(dtype)
        if math.prod(sizes) * size > math.prod(self.shape) * itemsize(self.dtype):
            raise KernelError(f"shared memory is read as more than it is, at {lines.place(lines.here())}")
        strides = tuple(math.prod(sizes[dim + 1 :]) * size for dim in range(len(sizes)))
        return replace(self, dtype=dtype, shape=sizes, strides=strides, layout=layout)

    _reinterpret = reinterpret

    def raw(self) -> Array:
        """Its bits, in place."""
        return np.ndarray(self.shape, raw_dtype(self.dtype), self.arena.bytes, self.start, self.strides)

    def values(self) -> Array:
        """Its values."""
        return decode(np.ascontiguousarray(self.raw()), self.dtype)

    def put(self, values: Array) -> None:
        """Stores values."""
        self.raw()[...] = encode(np.asarray(values), self.dtype)

    def load(self, layout: Any = None) -> Any:
        """A tensor of its values."""
        from mlagen.verify.gluon.values import Tensor

        own = Program.current.partition
        if self.arena.hand is not None:
            self.arena.hand.block(self, layout, False)
        read(self, own, own.number, int(own.clock[own.number]), own.clock)
        return Tensor(self.values().copy(), self.dtype, layout)

    def store(self, value: Any) -> None:
        """Stores a tensor."""
        own = Program.current.partition
        if tuple(value.shape) != self.shape:
            raise KernelError(f"a block {list(value.shape)} is stored to {list(self.shape)} at {lines.place(lines.here())}")
        if self.arena.hand is not None:
            self.arena.hand.block(self, value.layout, True)
        written(self, own, own.number, int(own.clock[own.number]))
        self.put(value.array)


def read(descriptor: Descriptor, own: Partition, actor: int, epoch: int, clock: Array) -> None:
    """Takes note of a read by a partition or by what it issued, which sees what `clock` is ordered after.

    Raises:
        KernelError: it races with a write, or nothing was written.
    """
    allocation = descriptor.allocation
    view, place = allocation.view(descriptor), lines.here()
    raced = allocation.writes.unordered(clock, view, actor)
    if raced is not None:
        fenced = "" if clock is own.clock or raced[1] < 0 else _unfenced(own, raced[0], allocation, view)
        raise _race("read", own, place, "written", raced, descriptor, fenced)
    unwatched = descriptor.arena.hand is None  # else assembly may have written it
    if unwatched and not allocation.filled.all() and not view.of(allocation.filled).all():
        raise KernelError(f"{own.name} reads shared memory of {_line(descriptor)} that nobody wrote, at {lines.place(place)}")
    allocation.reads.note(actor, epoch, place, view)


def _unfenced(own: Partition, actor: int, allocation: Allocation, view: _View) -> str:
    late = (view.of(allocation.writes.epochs[actor]) > own.clock[actor]).any()
    return "" if late else ", without a fence_async_shared between them"


def written(descriptor: Descriptor, own: Partition, actor: int, epoch: int, apart: bool = True) -> None:
    """Takes note of a write; with `apart`, the actor's own accesses are in order.

    Raises:
        KernelError: it races with another access.
    """
    allocation = descriptor.allocation
    view, place = allocation.view(descriptor), lines.here()
    own_actor = actor if apart else None
    for log, kind in ((allocation.writes, "written"), (allocation.reads, "read")):
        raced = log.unordered(own.clock, view, own_actor)
        if raced is not None:
            raise _race("written", own, place, kind, raced, descriptor)
    for other, epochs in allocation.writes.epochs.items():
        if other != actor:
            view.of(epochs)[...] = 0
    allocation.writes.note(actor, epoch, place, view)
    view.of(allocation.filled)[...] = True


def _line(descriptor: Descriptor) -> str:
    return lines.place(descriptor.allocation.line)


def _race(
    kind: str, own: Partition, place: int, other: str, raced: tuple[int, int], descriptor: Descriptor, why: str = ""
) -> KernelError:
    return KernelError(
        f"race in shared memory of {_line(descriptor)}: {kind} by {own.name} at {lines.place(place)}, "
        f"{other} at {lines.place(raced[1])}{why}"
    )
