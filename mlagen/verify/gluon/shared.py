"""Shared memory of a program: bytes, views of them, and who touched which four bytes last."""

from __future__ import annotations

import functools
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


Part = tuple[int, int]  # entries, and the bytes from one to the next


def dims_of(shape: tuple[int, ...], size: int, layout: Any) -> tuple[tuple[Part, ...], ...]:
    """Where the entries of each dimension lie: rows of an NVMMASharedLayout in columns as wide as its swizzle.

    The swizzle itself is left out: it exchanges 16 bytes within eight rows of such a column, in any block alike.
    """
    plain = [(count, math.prod(shape[dim + 1 :]) * size) for dim, count in enumerate(shape)]
    width = _width(layout)
    if not width or len(shape) < 2 or shape[-1] * size <= width:
        return tuple((part,) for part in plain)
    columns = shape[-1] * size // width
    outer = tuple((part,) for part in plain[:-2])
    return *outer, ((shape[-2], width),), ((columns, shape[-2] * width), (width // size, size))


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
        """An actor with an access that is not ordered before a clock, and its place."""
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
    """The memory of one allocation.

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
        self.mixed = False  # whether it has views of several swizzles
        self.widths = np.zeros(cells, np.int16)  # of the swizzle that each cell was written with
        self._views: dict[Any, _View] = {}

    def view(self, descriptor: Descriptor) -> _View:
        """The cells of a view."""
        size = itemsize(descriptor.dtype)
        key = descriptor.start, descriptor.dims, size
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = _cells(descriptor.start - self.offset, descriptor.parts, size)
        return found


def _cells(start: int, parts: list[Part], size: int) -> _View:
    sizes, steps = [count for count, _ in parts], [step for _, step in parts]
    if size < CELL:
        inner = max(at for at, step in enumerate(steps) if step == size)
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
        dims = dims_of(shape, itemsize(dtype), layout)
        return Descriptor(self, Allocation(start, size), dtype, dims, start, layout)

    def check(self) -> None:
        """Raises KernelError if an mbarrier is left in the middle of a phase."""
        for barrier in self.barriers.values():
            barrier.check()


@dataclass(frozen=True)
class Descriptor:
    """A view of shared memory.

    Attributes:
        dims: the parts of each dimension.
        start: its first byte.
    """

    arena: Arena
    allocation: Allocation
    dtype: Any
    dims: tuple[tuple[Part, ...], ...]
    start: int
    layout: Any

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return tuple(math.prod(count for count, _ in parts) for parts in self.dims)

    @property
    def parts(self) -> list[Part]:
        """The parts of all dimensions."""
        return [part for parts in self.dims for part in parts]

    @property
    def type(self) -> Descriptor:
        """Its type, as a kernel reads it."""
        return self

    def index(self, index: Any) -> Descriptor:
        """One entry of the first dimension."""
        number = int(index)
        if not 0 <= number < self.shape[0]:
            raise KernelError(f"index {number} of {self.shape[0]} entries of shared memory at {lines.at()}")
        ((_, step),) = self.dims[0]
        return replace(self, dims=self.dims[1:], start=self.start + number * step)

    def slice(self, start: Any, length: Any, dim: int = 0) -> Descriptor:
        """Some entries of a dimension.

        Raises:
            KernelError: it has no such entries.
        """
        first, count = int(start), int(length)
        if first < 0 or first + count > self.shape[dim]:
            found = f"[{first}, {first + count}) of {self.shape[dim]}"
            raise KernelError(f"entries {found} of shared memory at {lines.at()}")
        *outer, (width, step) = self.dims[dim]
        place = self.start + first % width * step
        parts: tuple[Part, ...] = ((count, step),)
        if outer:
            place += first // width * outer[0][1]
            if first % width + count > width:
                if first % width or count % width:
                    raise KernelError(f"columns of shared memory that begin within a swizzle, at {lines.at()}")
                parts = ((count // width, outer[0][1]), (width, step))
        return replace(self, dims=(*self.dims[:dim], parts, *self.dims[dim + 1 :]), start=place)

    def permute(self, order: Any) -> Descriptor:
        """The dimensions in another order."""
        return replace(self, dims=tuple(self.dims[dim] for dim in order))

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Descriptor:
        """The bytes as another block.

        Raises:
            KernelError: it has more bytes.
        """
        sizes = tuple(int(size) for size in shape)
        size = itemsize(dtype)
        if math.prod(sizes) * size > math.prod(self.shape) * itemsize(self.dtype):
            raise KernelError(f"shared memory is read as more than it is, at {lines.at()}")
        self.allocation.mixed |= _width(self.layout) != _width(layout)
        return replace(self, dtype=dtype, dims=dims_of(sizes, size, layout), layout=layout)

    _reinterpret = reinterpret

    def _raw(self) -> Array:
        """Its bits in place, with a dimension a part."""
        parts = self.parts
        sizes, steps = [count for count, _ in parts], [step for _, step in parts]
        return np.ndarray(sizes, raw_dtype(self.dtype), self.arena.bytes, self.start, steps)

    def put_bits(self, bits: Array) -> None:
        """Stores bits."""
        place = self._raw()
        place[...] = bits.reshape(place.shape)

    def values(self) -> Array:
        """A copy of its values."""
        return decode(self._raw().reshape(self.shape).copy(), self.dtype)

    def put(self, values: Array) -> None:
        """Stores values."""
        self.put_bits(np.asarray(encode(np.asarray(values), self.dtype)))

    def load(self, layout: Any = None) -> Any:
        """A tensor of its values."""
        from mlagen.verify.gluon.values import Tensor

        own = Program.current.partition
        if self.arena.hand is not None:
            self.arena.hand.block(self, layout, False)
        read(self, own, own.number, int(own.clock[own.number]), own.clock)
        return Tensor(self.values(), self.dtype, layout)

    def store(self, value: Any) -> None:
        """Stores a tensor."""
        own = Program.current.partition
        if tuple(value.shape) != self.shape:
            raise KernelError(f"a block {list(value.shape)} is stored to {list(self.shape)} at {lines.at()}")
        if self.arena.hand is not None:
            self.arena.hand.block(self, value.layout, True)
        written(self, own, own.number, int(own.clock[own.number]))
        self.put(value.array)


def read(descriptor: Descriptor, own: Partition, actor: int, epoch: int, clock: Array) -> None:
    """Takes note of a read by a partition or its product. It sees the writes that `clock` is ordered after.

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
        raise KernelError(
            f"{own.name} reads shared memory of {_line(descriptor)} that nobody wrote, at {lines.place(place)}"
        )
    if allocation.mixed and (view.of(allocation.widths) != _width(descriptor.layout)).any():
        raise KernelError(f"shared memory is read with another swizzle than written, at {lines.place(place)}")
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
    view.of(allocation.widths)[...] = _width(descriptor.layout)


def _width(layout: Any) -> int:
    """Bytes of a row in a layout's swizzle; 0: it has none."""
    return getattr(layout, "swizzle_byte_width", 0)


def _line(descriptor: Descriptor) -> str:
    return lines.place(descriptor.allocation.line)


def _race(
    kind: str, own: Partition, place: int, other: str, raced: tuple[int, int], descriptor: Descriptor, why: str = ""
) -> KernelError:
    return KernelError(
        f"race in shared memory of {_line(descriptor)}: {kind} by {own.name} at {lines.place(place)}, "
        f"{other} at {lines.place(raced[1])}{why}"
    )
