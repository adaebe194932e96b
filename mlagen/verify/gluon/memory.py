"""Global memory: tensors that a launch was given, by address, watched as in the interpreter."""

from __future__ import annotations

import bisect
import ctypes
from typing import Any

import numpy as np

from mlagen.verify import sanitizer
from mlagen.verify.gluon import lines
from mlagen.verify.gluon.program import Program
from mlagen.verify.gluon.values import Array, Tensor, decode, encode, itemsize, raw_dtype


class AddressError(Exception):
    """An address that a GPU would not take; the message names the line."""


class EarlyError(Exception):
    """A kernel that may begin before the one before it ends touches memory without a wait for that end."""


class Memory:
    """The storages of a launch's tensors.

    Args:
        tensors: the tensors that it was given.
        early: the kernel may begin before the one before it ends. A partition waits for that, or for one that did, and
            then touches memory.
    """

    current: Memory

    def __init__(self, tensors: list[Any], early: bool = False) -> None:
        self.early = early
        self._kept = tensors
        found = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
        self._begins = sorted(found)
        self._bytes = [
            np.ctypeslib.as_array((ctypes.c_uint8 * found[begin]).from_address(begin)) for begin in self._begins
        ]
        self._views: dict[tuple[int, str], Array] = {}

    def require_awaited(self) -> None:
        """Raises EarlyError if the kernel before may still write the bytes that the partition touches."""
        program = Program.current
        if self.early and not program.partition.clock[program.before]:
            raise EarlyError(f"memory is touched before gdc_wait, at {lines.at()}")

    def at(self, addresses: Array, dtype: Any) -> tuple[Array, Array]:
        """An array of a dtype and the places in it of addresses, which are in one tensor's storage.

        Raises:
            AddressError: they are not, or not aligned.
        """
        self.require_awaited()
        size = dtype.itemsize
        low, high = int(addresses.min()), int(addresses.max())
        number = bisect.bisect_right(self._begins, low) - 1
        if number < 0 or high + size > self._begins[number] + len(self._bytes[number]):
            raise AddressError("an address is in none of the launch's tensors")
        key = number, dtype.str
        view = self._views.get(key)
        if view is None:
            whole = self._bytes[number]
            view = self._views[key] = whole[: len(whole) // size * size].view(dtype)
        offsets = addresses - self._begins[number]
        if size > 1:
            if (offsets & (size - 1)).any():
                raise AddressError(f"an address of {size} bytes is not aligned to them")
            offsets = offsets // size
        return view, offsets

    def read(self, addresses: Array, dtype: Any) -> Array:
        """Elements of a dtype at addresses. They may lie in several tensors, as those of a query of two tensors do.

        Raises:
            AddressError: an address is in no tensor, or not aligned.
        """
        numbers = np.searchsorted(self._begins, addresses, side="right")
        found = np.empty(addresses.shape, dtype)
        for number in np.unique(numbers):
            here = numbers == number
            view, places = self.at(addresses[here], dtype)
            found[here] = view[places]
        return found


def _active(mask: Any, shape: tuple[int, ...]) -> Array | None:
    """A mask as an array of that shape; None if all is let through."""
    if mask is None:
        return None
    array = np.asarray(mask.array if isinstance(mask, Tensor) else mask, bool)
    return None if array.all() else np.broadcast_to(array, shape)


def gather(addresses: Array, mask: Any, dtype: Any, other: Any = 0) -> Array:
    """Bits of elements at addresses, `other` where the mask is not set."""
    raw = raw_dtype(dtype)
    shape = np.broadcast_shapes(np.shape(addresses), np.shape(mask.array) if isinstance(mask, Tensor) else ())
    addresses = np.broadcast_to(addresses, shape)
    active = _active(mask, shape)
    launch = sanitizer.current()
    if active is None:
        if not addresses.size:
            return np.zeros(shape, raw)
        if launch is not None:
            launch.reads(addresses.astype(np.uint64), np.array(True), raw.itemsize)
        return Memory.current.read(addresses, raw)
    found = np.full(shape, other, raw)
    if active.any():
        chosen = addresses[active]
        if launch is not None:
            launch.reads(chosen.astype(np.uint64), np.array(True), raw.itemsize)
        found[active] = Memory.current.read(chosen, raw)
    return found


def scatter(addresses: Array, values: Array, mask: Any) -> None:
    """Stores bits at addresses where the mask is set."""
    shape = np.broadcast_shapes(np.shape(addresses), np.shape(mask.array) if isinstance(mask, Tensor) else ())
    addresses, values = np.broadcast_to(addresses, shape), np.broadcast_to(values, shape)
    active = _active(mask, shape)
    if active is not None:
        addresses, values = addresses[active], values[active]
    if not addresses.size:
        return
    launch = sanitizer.current()
    if launch is not None:
        launch.writes(np.ascontiguousarray(addresses).astype(np.uint64), np.array(True), np.ascontiguousarray(values))
    view, places = Memory.current.at(addresses, values.dtype)
    view[places] = values


def prefetch(addresses: Array, active: Array, size: int) -> None:
    """Takes note that L2 is asked for `size` bytes from each active address on."""
    launch = sanitizer.current()
    if launch is not None:
        launch.prefetches(addresses.astype(np.uint64), active, size)


def load(pointer: Tensor, mask: Any = None, other: Any = None, **_: Any) -> Tensor:
    """`gl.load`."""
    dtype = pointer.dtype.element_ty
    if dtype.name == "int1":
        raise TypeError("a load of int1 is not known")
    masks = None if mask is None or mask is True else mask
    fill: Any = 0
    if other is not None:
        given = other.array if isinstance(other, Tensor) else other
        fill = encode(np.asarray(given, "f4"), dtype) if dtype.is_floating() else given
        if np.ndim(fill):
            found = decode(gather(pointer.array, masks, dtype), dtype)
            active = np.broadcast_to(np.asarray(mask.array), found.shape)
            return Tensor(np.where(active, found, np.asarray(given)), dtype, pointer.layout)
        fill = np.asarray(fill).reshape(())[()]
    layout = pointer.layout if pointer.layout is not None else getattr(masks, "layout", None)
    return Tensor(decode(gather(np.asarray(pointer.array), masks, dtype, fill), dtype), dtype, layout)


def store(pointer: Tensor, value: Any, mask: Any = None, **_: Any) -> None:
    """`gl.store`."""
    from mlagen.verify.gluon.values import tensor

    dtype = pointer.dtype.element_ty
    given = tensor(value).to(dtype)
    bits = np.asarray(encode(np.asarray(given.array), dtype)).astype(raw_dtype(dtype), copy=False)
    scatter(np.asarray(pointer.array), bits, None if mask is None or mask is True else mask)


def atomic_add(pointer: Tensor, value: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Tensor:
    """`gl.atomic_add` of a scalar."""
    dtype = pointer.dtype.element_ty
    address = np.asarray(pointer.array).reshape(1)
    launch = sanitizer.current()
    if launch is not None:
        launch.exchanges(address.astype(np.uint64), np.array(True), itemsize(dtype))
    view, places = Memory.current.at(address, raw_dtype(dtype))
    before = view[places][0]
    view[places] = before + view.dtype.type(int(value))
    return Tensor(before, dtype)
