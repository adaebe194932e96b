"""Faults that an interpreter does not notice: wrong addresses, false hints, races between programs.

Each launch in the interpreter is watched. A load or store reaches nothing but tensors that the launch was given. Two
programs never write different bytes to one address, nor does one read another's writes, since nothing orders the
programs of a launch; addresses of atomics are left out. And the claims of the text with `tl.multiple_of`,
`tl.max_contiguous` and `tl.assume`, which the compiler relies on for wide loads, are true of the values.
"""

from __future__ import annotations

import bisect
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

MOST_READS = 1 << 22  # addresses of a launch that are kept, for comparison with its writes


class SanitizerError(Exception):
    """A kernel did something that a GPU does not tolerate. The message names kernel, line and tensor."""


@dataclass(frozen=True)
class Extent:
    """Where a tensor lies.

    Attributes:
        name: of the kernel's argument.
        begin, end: addresses of its first byte and behind its last.
        itemsize: bytes of an element.
        shape, strides: of the tensor, in elements.
    """

    name: str
    begin: int
    end: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Any) -> Extent:
        """The extent of a torch tensor."""
        shape, strides, size = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
        last = sum((places - 1) * stride for places, stride in zip(shape, strides, strict=True))
        length = (last + 1) * size if tensor.numel() else 0
        return cls(name, tensor.data_ptr(), tensor.data_ptr() + length, size, shape, strides)

    def place(self, address: int) -> str:
        """An address in elements from the tensor's first."""
        return f"{self.name}[{(address - self.begin) // self.itemsize}]"

    def describe(self) -> str:
        """Its size, for a message."""
        elements = (self.end - self.begin) // self.itemsize
        return (
            f"{self.name} is {list(self.shape)} with strides {list(self.strides)}, {elements} elements from end to end"
        )


@dataclass
class _Access:
    """Addresses that one operation of a program reached, of `size` bytes each."""

    program: int
    operation: int
    addresses: Addresses
    size: int
    values: npt.NDArray[Any] | None = None  # the stored values, as unsigned integers of `size` bytes


@dataclass
class Launch:
    """One launch as it runs.

    Attributes:
        kernel: name of the kernel.
        folder: folder of its package; errors name lines of its files.
        extents: of its tensors that have elements, by their first address.
        written: which of them its launches have been seen to write; None: this is the first.
    """

    kernel: str
    folder: str
    extents: list[Extent]
    written: set[str] | None
    program: int = -1
    _operation: int = 0
    _reads: list[_Access] = field(default_factory=list)
    _kept: int = 0
    _stores: list[_Access] = field(default_factory=list)
    _atomics: list[Addresses] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begins = [one.begin for one in self.extents]
        # Behind each extent the furthest end so far, since a view may lie inside of another.
        self._ends = np.maximum.accumulate(np.array([one.end for one in self.extents] or [0], np.uint64)).tolist()

    def reads(self, pointers: Addresses, mask: Mask, size: int) -> None:
        """Takes note of a load.

        Raises:
            SanitizerError: it reaches past the tensors.
        """
        found = self._inside(pointers, mask, size, "reads")
        if found is None:
            return
        names, addresses = found
        relevant = self.written is None or not self.written.isdisjoint(names)
        if relevant and self._kept + addresses.size <= MOST_READS:
            self._kept += addresses.size
            self._reads.append(_Access(self.program, self._operation, addresses, size))

    def writes(self, pointers: Addresses, mask: Mask, values: npt.NDArray[Any]) -> None:
        """Takes note of a store.

        Raises:
            SanitizerError: it reaches past the tensors.
        """
        size = values.dtype.itemsize
        found = self._inside(pointers, mask, size, "writes")
        if found is None:
            return
        names, addresses = found
        _written.setdefault(self.kernel, set()).update(names)
        kept = np.broadcast_to(values, pointers.shape)
        kept = np.ascontiguousarray(kept if addresses.size == pointers.size else kept[mask]).reshape(-1)
        self._operation += 1
        access = _Access(self.program, self._operation, addresses, size, kept.view(f"u{size}").astype(np.uint64))
        self._stores.append(access)

    def exchanges(self, pointers: Addresses, mask: Mask, size: int) -> None:
        """Takes note of an atomic.

        Raises:
            SanitizerError: it reaches past the tensors.
        """
        found = self._inside(pointers, mask, size, "exchanges")
        if found is not None:
            self._atomics.append(found[1])

    def prefetches(self, pointers: Addresses, mask: Mask, size: int) -> None:
        """Takes note of a prefetch.

        Raises:
            SanitizerError: it reaches past the tensors.
        """
        self._inside(pointers, mask, size, "prefetches")

    def _inside(self, pointers: Addresses, mask: Mask, size: int, does: str) -> tuple[list[str], Addresses] | None:
        """The tensors that an operation reaches and its addresses; None if its mask lets nothing through."""
        addresses = pointers.reshape(-1) if mask.all() else pointers[np.broadcast_to(mask, pointers.shape)]
        if not addresses.size:
            return None
        low, high = int(addresses.min()), int(addresses.max()) + size
        at = bisect.bisect_right(self._begins, low) - 1
        if at >= 0 and high <= self._ends[at]:
            return [one.name for one in self.extents[: at + 1] if one.begin <= low and high <= one.end], addresses
        places = np.searchsorted(np.array(self._begins, np.uint64), addresses, side="right").astype(np.int64) - 1
        ends = np.array(self._ends, np.uint64)[np.maximum(places, 0)]
        outside = (places < 0) | (addresses + np.uint64(size) > ends)
        if outside.any():
            raise SanitizerError(
                self._message(int(addresses[outside.argmax()]), does, int(outside.sum()), addresses.size)
            )
        return [self.extents[place].name for place in np.unique(places).tolist()], addresses

    def _message(self, address: int, does: str, count: int, of: int) -> str:
        """The message for an address outside every tensor: the nearest tensor, and the element that it would be."""
        if not self.extents:
            return f"{self.where()} {does} an address, but the launch was given no tensor with elements"
        nearest = min(self.extents, key=lambda one: max(one.begin - address, address - one.end + 1))
        return f"{self.where()} {does} {nearest.place(address)} ({count} of {of} addresses): {nearest.describe()}"

    def where(self) -> str:
        """Kernel and line that run now."""
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(self.folder):
            frame = frame.f_back
        line = "" if frame is None else f", {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return f"{self.kernel}{line}"

    def ended(self) -> None:
        """Compares the accesses of the programs.

        Raises:
            SanitizerError: two of them race.
        """
        stores = self._unshared(self._without_atomics(self._stores))
        if not stores:
            return
        owners = [_Owners(group) for group in stores]
        for one in owners:
            if one.clash is not None:
                first, second, address = one.clash
                who = f"programs {first} and {second} write" if first != second else f"program {first} writes at once"
                raise SanitizerError(f"{self.kernel}: {who} different bytes to {self._named(address)}")
        for read in self._reads:
            for one in owners:
                if (raced := one.raced(read)) is not None:
                    other, address = raced
                    what = f"{self._named(address)}, which program {other} writes"
                    raise SanitizerError(f"{self.kernel}: program {read.program} reads {what}")

    def _without_atomics(self, stores: list[_Access]) -> list[_Access]:
        """Stores to addresses that no atomic of the launch reached."""
        if not self._atomics:
            return stores
        exchanged = np.concatenate(self._atomics)
        kept = [(one, ~np.isin(one.addresses, exchanged)) for one in stores]
        return [
            replace(one, addresses=one.addresses[mask], values=None if one.values is None else one.values[mask])
            for one, mask in kept
            if mask.any()
        ]

    def _unshared(self, stores: list[_Access]) -> list[list[_Access]]:
        """Stores by size; as bytes where sizes meet at one place."""
        by_size: dict[int, list[_Access]] = {}
        for one in stores:
            by_size.setdefault(one.size, []).append(one)
        if len(by_size) > 1:
            ranges = sorted(
                (
                    min(int(one.addresses.min()) for one in group),
                    max(int(one.addresses.max()) + one.size - 1 for one in group),
                )
                for group in by_size.values()
            )
            if any(right[0] <= left[1] for left, right in itertools.pairwise(ranges)):
                return [[piece for one in stores for piece in _bytes_of(one)]]
        return list(by_size.values())

    def _named(self, address: int) -> str:
        """An address as an element of its tensor."""
        return next((one.place(address) for one in self.extents if one.begin <= address < one.end), hex(address))


def _bytes_of(store: _Access) -> Iterator[_Access]:
    assert store.values is not None
    for byte in range(store.size):
        values = store.values >> np.uint64(8 * byte) & np.uint64(255)
        yield _Access(store.program, store.operation, store.addresses + np.uint64(byte), 1, values)


class _Owners:
    """Which program writes each byte, of stores of one size.

    Attributes:
        clash: two programs and an address where they write different bytes, or one program twice if one operation does.
    """

    def __init__(self, stores: Sequence[_Access]) -> None:
        self.size = stores[0].size
        addresses = np.concatenate([one.addresses for one in stores])
        programs = np.repeat([one.program for one in stores], [one.addresses.size for one in stores])
        order = np.argsort(addresses, kind="stable")
        self.addresses, self.programs = addresses[order], programs[order]
        self.clash: tuple[int, int, int] | None = None
        again = np.flatnonzero(self.addresses[1:] == self.addresses[:-1])
        if again.size:
            values = np.concatenate([one.values for one in stores if one.values is not None])[order]
            operations = np.repeat([one.operation for one in stores], [one.addresses.size for one in stores])[order]
            at_once = (self.programs[again] != self.programs[again + 1]) | (operations[again] == operations[again + 1])
            wrong = again[at_once & (values[again] != values[again + 1])]
            if wrong.size:
                at = int(wrong[0])
                self.clash = int(self.programs[at]), int(self.programs[at + 1]), int(self.addresses[at])

    def raced(self, read: _Access) -> tuple[int, int] | None:
        """Another program that writes to an address that a load reads, and the address."""
        low, high = read.addresses.min(), read.addresses.max() + np.uint64(read.size)
        if high <= self.addresses[0] or low > self.addresses[-1]:
            return None
        for offset in range(0, read.size, self.size):
            wanted = read.addresses + np.uint64(offset)
            for side in ("left", "right"):
                places = np.searchsorted(self.addresses, wanted, side=side) - (side == "right")
                places = np.clip(places, 0, self.addresses.size - 1)
                hit = (self.addresses[places] == wanted) & (self.programs[places] != read.program)
                if hit.any():
                    at = int(hit.argmax())
                    return int(self.programs[places[at]]), int(wanted[at])
        return None


_written: dict[str, set[str]] = {}  # by kernel, the arguments that its launches have been seen to write
_launch: Launch | None = None


def current() -> Launch | None:
    """The launch that runs now."""
    return _launch


@contextmanager
def watched(kernel: str, folder: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Within, a launch runs; at its end its programs are compared.

    Args:
        kernel: its name.
        folder: of the package that holds it.
        arguments: its arguments by name: the tensors among them, and those that descriptors stand for.

    Raises:
        SanitizerError: its programs race.
    """
    global _launch
    tensors = {name: getattr(value, "base", value) for name, value in arguments.items()}
    extents = [Extent.of(name, tensor) for name, tensor in tensors.items() if hasattr(tensor, "data_ptr")]
    there = sorted((one for one in extents if one.end > one.begin), key=lambda one: one.begin)
    _launch = Launch(kernel, folder, there, _written.get(kernel))
    try:
        yield
        _launch.ended()
    finally:
        _launch = None


def begin_program() -> None:
    """The next program of the launch begins."""
    if _launch is not None:
        _launch.program += 1


def check_multiple_of(data: npt.NDArray[Any], claims: Sequence[int], itemsize: int | None) -> None:
    """Checks `tl.multiple_of`: along each dimension, runs of neighbours begin at multiples of the claimed number.

    Args:
        data: the values; addresses in bytes where they are pointers.
        claims: one for each dimension; one for all of a scalar or a row.
        itemsize: bytes that neighbours of pointers lie apart; None: integers, with neighbours one apart.

    Raises:
        SanitizerError: one does not.
    """
    values = np.atleast_1d(data).astype(np.int64)
    step = itemsize or 1
    for dim, claimed in enumerate(claims):
        if claimed <= 1:
            continue
        along = np.moveaxis(values, dim, 0)
        begins = np.ones(along.shape, bool)
        begins[1:] = along[1:] - along[:-1] != step
        if (along[begins] % claimed).any():
            unit = "" if itemsize is None else " bytes"
            raise SanitizerError(_claim(f"tl.multiple_of claims multiples of {claimed}{unit}", dim, len(claims)))


def check_max_contiguous(data: npt.NDArray[Any], claims: Sequence[int], itemsize: int | None) -> None:
    """Checks `tl.max_contiguous`: along each dimension, each so many values from the first on are neighbours.

    Args: see `check_multiple_of`.

    Raises:
        SanitizerError: they are not.
    """
    values = np.atleast_1d(data).astype(np.int64)
    for dim, claimed in enumerate(claims):
        along = np.moveaxis(values, dim, 0)
        apart = along[1:] - along[:-1] != (itemsize or 1)
        inside = np.arange(1, len(along)) % claimed != 0  # not between two groups
        if apart[inside].any():
            raise SanitizerError(_claim(f"tl.max_contiguous claims {claimed} neighbours", dim, len(claims)))


def check_assume(condition: npt.NDArray[Any]) -> None:
    """Checks `tl.assume`.

    Raises:
        SanitizerError: the claim is false.
    """
    if not np.all(condition):
        raise SanitizerError(f"{_here()}tl.assume claims what is false")


def _claim(text: str, dim: int, dims: int) -> str:
    return f"{_here()}{text}{f' in dimension {dim}' if dims > 1 else ''}, but the values are not so"


def _here() -> str:
    return "" if _launch is None else f"{_launch.where()}: "
