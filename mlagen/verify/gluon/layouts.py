"""Which thread holds which element of a tensor: a layout as an array of places."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from mlagen.verify.gluon.values import PER_THREAD, Array

LANES = 32


class LayoutError(Exception):
    """A tensor's threads count, but its layout is not known or not supported."""


def indexed(layout: Any, index: tuple[Any, ...]) -> Any:
    """The layout of a tensor with new dimensions: each takes a SliceLayout off."""
    for dim, one in enumerate(index):
        if one is None:
            if getattr(layout, "dim", None) != dim:
                return None
            layout = layout.parent
        elif one != slice(None):
            return None
    return layout


class Derived:
    """The layout of the result of a reshape, a permute or a join.

    Args:
        find: gives its places.
    """

    def __init__(self, find: Callable[[], Array]) -> None:
        self.find = find


def reshaped(layout: Any, shape: tuple[int, ...]) -> Derived:
    """The layout after a reshape: flat indices stay."""
    return Derived(lambda: places(layout, shape))


def permuted(layout: Any, shape: tuple[int, ...], order: list[int]) -> Derived:
    """The layout after a permute."""

    def find() -> Array:
        moved = np.arange(math.prod(shape)).reshape(shape).transpose(order).ravel()
        return np.argsort(moved)[places(layout, shape)]

    return Derived(find)


def joined(layout: Any, shape: tuple[int, ...]) -> Derived:
    """The layout after a join: the new dimension is a thread's own."""

    def find() -> Array:
        own = places(layout, shape)
        return np.stack([2 * own, 2 * own + 1], axis=1).reshape(-1, own.shape[1])

    return Derived(find)


Bases = tuple[list[list[int]], list[list[int]], list[list[int]]]  # of registers, lanes and warps


def _blocked(layout: Any, shape: tuple[int, ...]) -> Bases:
    found: Bases = ([], [], [])
    reached = [1] * len(shape)
    for bases, sizes in zip(
        found, (layout.size_per_thread, layout.threads_per_warp, layout.warps_per_cta), strict=True
    ):
        for dim in layout.order:
            for _ in range(int(math.log2(sizes[dim]))):
                bases.append(_unit(len(shape), dim, reached[dim] if reached[dim] < shape[dim] else 0))
                reached[dim] *= 2
    for dim in layout.order:
        while reached[dim] < shape[dim]:
            found[0].append(_unit(len(shape), dim, reached[dim]))
            reached[dim] *= 2
    return found


def _unit(rank: int, dim: int, step: int) -> list[int]:
    return [step if axis == dim else 0 for axis in range(rank)]


def _mma(layout: Any, shape: tuple[int, ...], inner: int = 2) -> Bases:
    """Products of a warpgroup, [rows, columns]; `inner` neighbours of a row to a thread."""
    registers = [[0, 1 << bit] for bit in range(int(math.log2(inner)))]
    lanes = [[0, inner], [0, 2 * inner], [1, 0], [2, 0], [4, 0]]
    registers += [[8, 0]]
    columns = min(layout.instr_shape[1], shape[1]) if inner == 2 else shape[1]
    step = 4 * inner
    while step < columns:
        registers.append([0, step])
        step *= 2
    warps = [[16 << bit, 0] for bit in range(int(math.log2(layout.warps_per_cta[0])))]
    rows = 16 * layout.warps_per_cta[0]
    while step < shape[1]:
        registers.append([0, step])
        step *= 2
    while rows < shape[0]:
        registers.append([rows, 0])
        rows *= 2
    return registers, lanes, warps


def _linear(layout: Any, shape: tuple[int, ...]) -> Bases:
    kind = type(layout).__name__
    if kind == "BlockedLayout":
        return _blocked(layout, shape)
    if kind == "NVMMADistributedLayout":
        return _mma(layout, shape)
    if kind == "DistributedLinearLayout":
        registers = [list(base) for base in layout.reg_bases]
        for dim, size in enumerate(layout.shape):
            while size < shape[dim]:
                registers.append(_unit(len(shape), dim, size))
                size *= 2
        return registers, [list(base) for base in layout.lane_bases], [list(base) for base in layout.warp_bases]
    if kind == "DotOperandLayout":
        return _mma(layout.parent, shape, layout.k_width)
    if kind == "SliceLayout":
        dim = layout.dim
        registers, lanes, warps = _linear(layout.parent, (*shape[:dim], _parent_size(layout), *shape[dim:]))
        cut = [[base[:dim] + base[dim + 1 :] for base in bases] for bases in (registers, lanes, warps)]
        return [base for base in cut[0] if any(base)], cut[1], cut[2]
    raise LayoutError(f"the threads of {layout} are not known")


def _parent_size(layout: Any) -> int:
    """A size of the dimension that a SliceLayout leaves out: its registers are dropped at any size."""
    parent = layout.parent
    if type(parent).__name__ == "DistributedLinearLayout":
        return cast(int, parent.shape[layout.dim])
    if type(parent).__name__ == "BlockedLayout":
        dim = layout.dim
        return cast(int, parent.size_per_thread[dim] * parent.threads_per_warp[dim] * parent.warps_per_cta[dim])
    if type(parent).__name__ == "NVMMADistributedLayout":
        return cast(int, 16 * parent.warps_per_cta[0] if layout.dim == 0 else parent.instr_shape[1])
    return 1


_PLACES: dict[tuple[int, tuple[int, ...]], tuple[Any, Array]] = {}


def places(layout: Any, shape: tuple[int, ...]) -> Array:
    """Flat indices of elements, [registers, threads] in the order of a thread's registers.

    Raises:
        LayoutError: the layout is not known.
    """
    key = id(layout), shape
    found = _PLACES.get(key)
    if found is not None and found[0] is layout:
        return found[1]
    if layout is None or layout is PER_THREAD:
        raise LayoutError("the layout of a tensor is not known, and its threads count")
    if isinstance(layout, Derived):
        array = layout.find()
        _PLACES[key] = layout, array
        return array
    registers, lanes, warps = _linear(layout, shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]

    def flat(bases: list[list[int]]) -> Array:
        numbers = np.zeros(1, np.int64)
        for base in bases:
            step = sum(one % size * stride for one, size, stride in zip(base, shape, strides, strict=True))
            numbers = np.concatenate([numbers, numbers ^ step])
        return numbers

    threads = flat(lanes + warps)
    array = flat(registers)[:, None] ^ threads[None, :]
    _PLACES[key] = layout, array
    return array


@functools.lru_cache(maxsize=256)
def _owners_of(key: int, shape: tuple[int, ...]) -> Array:
    layout = _PLACES[key, shape][0]
    array = places(layout, shape)
    owners = np.zeros(math.prod(shape), np.int64)
    threads = np.broadcast_to(np.arange(array.shape[1]), array.shape)
    owners[array[::-1, ::-1].ravel()] = threads[::-1, ::-1].ravel()  # the first of several
    return owners


def owners(layout: Any, shape: tuple[int, ...]) -> Array:
    """The first thread that holds each element, by its flat index."""
    places(layout, shape)
    return _owners_of(id(layout), shape)


def spread(one_layout: Any, one: Array, other_layout: Any, other: Array) -> tuple[Array, Array]:
    """Two operands as they meet: a scalar that each thread has its own of has a value for each element of a block."""
    if one_layout is PER_THREAD and other_layout is not PER_THREAD and np.ndim(other):
        return dealt(one, other_layout, np.shape(other)), other
    if other_layout is PER_THREAD and one_layout is not PER_THREAD and np.ndim(one):
        return one, dealt(other, one_layout, np.shape(one))
    return one, other


def dealt(values: Array, layout: Any, shape: tuple[int, ...]) -> Array:
    """A block of the values of the threads that hold its elements.

    Raises:
        LayoutError: threads that hold one element have different values.
    """
    array = places(layout, shape)
    block = np.empty(math.prod(shape), values.dtype)
    own = np.broadcast_to(values[: array.shape[1]], array.shape)
    block[array] = own
    if (block[array] != own).any():
        raise LayoutError("threads that hold one element of a block give it different values")
    return block.reshape(shape)
