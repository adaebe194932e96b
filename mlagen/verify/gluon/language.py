"""Gluon's and Triton's functions over tensors, as kernels call them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl

from mlagen.verify import sanitizer
from mlagen.verify.gluon.layouts import dealt, joined, permuted, reshaped
from mlagen.verify.gluon.program import Program
from mlagen.verify.gluon.values import PER_THREAD, Array, Tensor, alike, constant, convert, rounded, tensor


def _layout_of_slice(layout: Any, axis: int) -> Any:
    from triton.experimental.gluon.language._layouts import SliceLayout

    return None if layout is None else _slice(SliceLayout, layout, axis)


_SLICES: dict[tuple[int, int], Any] = {}


def _slice(kind: Any, layout: Any, axis: int) -> Any:
    key = id(layout), axis
    found = _SLICES.get(key)
    if found is None or found.parent is not layout:
        found = _SLICES[key] = kind(axis, layout)
    return found


def values(given: Any) -> Any:
    """A shape, a dimension or a number as Python's."""
    given = getattr(given, "value", given)
    if isinstance(given, (list, tuple)):
        return [values(one) for one in given]
    return int(given) if isinstance(given, Tensor) else given


def program_id(axis: int) -> Tensor:
    """The number of the program; grids have one dimension."""
    return Tensor(np.int32(0 if axis else Program.current.number), tl.int32)


def num_programs(axis: int) -> Tensor:
    """Programs of the grid."""
    return Tensor(np.int32(1 if axis else Program.current.programs), tl.int32)


def arange(start: Any, end: Any, layout: Any = None) -> Tensor:
    """Integers in order."""
    return Tensor(np.arange(values(start), values(end), dtype=np.int32), tl.int32, layout)


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Tensor:
    """A block of one value, or of its threads' own."""
    sizes = tuple(values(shape))
    dtype = getattr(dtype, "value", dtype)
    if isinstance(value, Tensor):
        one = value.to(dtype)
        if one.layout is PER_THREAD:
            return Tensor(dealt(np.asarray(one.array), layout, sizes), dtype, layout)
        array = np.full(sizes, one.array)
    else:
        array = np.full(sizes, constant(getattr(value, "value", value), dtype))
    return Tensor(rounded(array, dtype), dtype, layout)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Tensor:
    """A block of zeros."""
    return full(shape, 0, dtype, layout)


def full_like(like: Tensor, value: Any, shape: Any = None, dtype: Any = None, layout: Any = None) -> Tensor:
    """A block of one value, like another."""
    return full(like.shape, value, dtype or like.dtype, layout or like.layout)


def zeros_like(like: Tensor, **changes: Any) -> Tensor:
    """A block of zeros, like another."""
    return full_like(like, 0, **changes)


def to_tensor(value: Any) -> Tensor:
    """A scalar as a tensor."""
    return tensor(value)


def where(condition: Any, one: Any, other: Any) -> Tensor:
    """Values of one or the other."""
    if not isinstance(one, Tensor) and not isinstance(other, Tensor):
        one = tensor(one)
    left, right, dtype, layout = alike(one, other)
    flags = tensor(condition)
    if layout is PER_THREAD and flags.layout is not PER_THREAD and np.ndim(flags.array):
        threads = np.broadcast_shapes(np.shape(left), np.shape(right))
        left, right = (dealt(np.broadcast_to(side, threads), flags.layout, flags.array.shape) for side in (left, right))
        layout = flags.layout
    chosen = np.where(np.asarray(flags.array) != 0, left, right)
    return Tensor(chosen, dtype, flags.layout if layout is None else layout)


def _pairwise(function: Callable[[Array, Array], Array]) -> Callable[..., Tensor]:
    def apply(one: Any, other: Any, **_: Any) -> Tensor:
        left, right, dtype, layout = alike(one, other)
        return Tensor(function(left, right), dtype, layout)

    return apply


maximum, minimum = _pairwise(np.fmax), _pairwise(np.fmin)


def _unary(function: Callable[[Array], Array]) -> Callable[[Any], Tensor]:
    def apply(given: Any) -> Tensor:
        one = tensor(given)
        return Tensor(rounded(function(np.asarray(one.array)), one.dtype), one.dtype, one.layout)

    return apply


def fma(one: Any, other: Any, more: Any) -> Tensor:
    """A product and a sum, rounded once."""
    left, right, dtype, layout = alike(one, other)
    third = tensor(more)
    sums = np.asarray(left, "f8") * np.asarray(right, "f8") + np.asarray(third.array, "f8")
    return Tensor(convert(np.asarray(sums), tl.float64, dtype), dtype, layout if layout is not None else third.layout)


def _reduced(function: Any) -> Callable[..., Tensor]:
    def apply(given: Tensor, axis: Any = None, keep_dims: bool = False, **_: Any) -> Tensor:
        Program.current.require_scratch()
        axis = values(axis)
        array, dtype = np.asarray(given.array), given.dtype
        if dtype.name == "int1" and function is np.add:
            array, dtype = array.astype("i4"), tl.int32
        if function is np.add and array.dtype.kind == "f":
            found = array.sum(axis=axis, dtype="f8").astype(array.dtype)
        else:
            found = function.reduce(array, axis=axis, dtype=array.dtype)
        if keep_dims:
            return Tensor(np.expand_dims(found, axis), dtype, given.layout)
        layout = None if axis is None or array.ndim == 1 else _layout_of_slice(given.layout, axis)
        return Tensor(rounded(found, dtype), dtype, layout)

    return apply


def _split_along(given: tuple[Tensor, ...], axis: int, begin: int, end: int) -> tuple[Tensor, ...]:
    index = (slice(None),) * axis + (slice(begin, end),)
    return tuple(Tensor(one.array[index], one.dtype, one.layout) for one in given)


def reduce(given: Any, axis: Any, combine: Any, keep_dims: bool = False) -> Any:
    """A reduction by a function of the kernel's, halves onto halves."""
    Program.current.require_scratch()
    several = isinstance(given, tuple)
    parts: tuple[Tensor, ...] = tuple(given) if several else (given,)
    axis = values(axis)
    size = parts[0].shape[axis]
    while size > 1:
        size //= 2
        halves = _split_along(parts, axis, 0, size), _split_along(parts, axis, size, 2 * size)
        joined = combine(*halves[0], *halves[1])
        joined = joined if isinstance(joined, tuple) else (joined,)
        shape = halves[0][0].array.shape
        parts = tuple(Tensor(np.broadcast_to(one.array, shape), one.dtype, one.layout) for one in joined)
    index = (slice(None),) * axis + (0,)
    layout = _layout_of_slice(parts[0].layout, axis) if parts[0].array.ndim > 1 else None
    found = tuple(Tensor(one.array[index], one.dtype, layout) for one in parts)
    return found if several else found[0]


def associative_scan(given: Tensor, axis: Any, combine: Any, reverse: bool = False) -> Tensor:
    """A scan by a function of the kernel's."""
    axis, array, step = values(axis), np.asarray(given.array).copy(), 1
    if reverse:
        raise TypeError("a scan from the end is not known")
    size = array.shape[axis]
    before = (slice(None),) * axis
    while step < size:
        low, high = (*before, slice(0, size - step)), (*before, slice(step, size))
        joined = combine(Tensor(array[low], given.dtype), Tensor(array[high], given.dtype))
        array = np.concatenate([array[(*before, slice(0, step))], joined.array], axis=axis)
        step *= 2
    return Tensor(array, given.dtype, given.layout)


def reshape(given: Tensor, *shape: Any) -> Tensor:
    """The values in another shape."""
    sizes = values(shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape)
    layout = None if given.layout is None else reshaped(given.layout, tuple(given.shape))
    return Tensor(np.asarray(given.array).reshape(sizes), given.dtype, layout)


def permute(given: Tensor, *order: Any) -> Tensor:
    """The dimensions in another order."""
    dims = values(order[0] if len(order) == 1 and isinstance(order[0], (list, tuple)) else order)
    layout = None if given.layout is None else permuted(given.layout, tuple(given.shape), dims)
    return Tensor(np.asarray(given.array).transpose(dims), given.dtype, layout)


def join(one: Tensor, other: Tensor) -> Tensor:
    """Two blocks along a new last dimension."""
    pair = np.broadcast_arrays(one.array, other.array)
    layout = None if one.layout is None else joined(one.layout, pair[0].shape)
    return Tensor(np.stack(pair, axis=-1), one.dtype, layout)


def split(given: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of a last dimension of two."""
    return Tensor(given.array[..., 0], given.dtype), Tensor(given.array[..., 1], given.dtype)


def broadcast(one: Any, other: Any) -> Any:
    """Two blocks in their common shape, or one in a shape that is given."""
    if not isinstance(other, Tensor):
        return Tensor(np.broadcast_to(one.array, values(other)), one.dtype, one.layout)
    left, right = np.broadcast_arrays(one.array, other.array)
    layout = one.layout if one.layout is not None else other.layout
    return Tensor(left, one.dtype, layout), Tensor(right, other.dtype, layout)


def convert_layout(given: Tensor, layout: Any, assert_trivial: bool = False) -> Tensor:
    """The values by other threads."""
    if not assert_trivial:
        Program.current.require_scratch()
    if given.layout is PER_THREAD:
        raise TypeError("a scalar of each thread has no layout to convert")
    return Tensor(given.array, given.dtype, getattr(layout, "value", layout))


def cdiv(number: Any, divisor: Any) -> Any:
    """A quotient, rounded up."""
    return (number + (divisor - 1)) // divisor


def umulhi(one: Any, other: Any) -> Tensor:
    """The upper half of a product of 32 bits."""
    left, right, dtype, layout = alike(one, other)
    wide = (np.asarray(left).astype("u4").astype("u8") * np.asarray(right).astype("u4").astype("u8")) >> np.uint64(32)
    return Tensor(np.asarray(wide.astype("u4")).view(np.asarray(left).dtype), dtype, layout)


def _hint(check: Callable[..., None]) -> Callable[[Any, Any], Any]:
    def hint(given: Any, claims: Any) -> Any:
        numbers = values(claims)
        numbers = numbers if isinstance(numbers, list) else [numbers]
        if isinstance(given, Tensor) and given.layout is not PER_THREAD:
            size = None
            if given.dtype.is_ptr():
                size = max(given.dtype.element_ty.primitive_bitwidth // 8, 1)
            check(np.asarray(given.array), numbers, size)
        return given

    return hint


def trip(*bounds: Any) -> Iterator[Tensor]:
    """`range` in a kernel: its numbers are tensors."""
    for number in range(*(operator.index(values(bound)) for bound in bounds)):
        yield Tensor(np.int32(number), tl.int32)


FUNCTIONS: dict[str, Any] = {
    "program_id": program_id, "num_programs": num_programs, "arange": arange, "full": full, "zeros": zeros,
    "full_like": full_like, "zeros_like": zeros_like, "to_tensor": to_tensor, "where": where, "maximum": maximum,
    "minimum": minimum, "fma": fma, "exp2": _unary(np.exp2), "log2": _unary(np.log2), "sqrt": _unary(np.sqrt),
    "exp": _unary(np.exp), "log": _unary(np.log), "abs": _unary(np.abs), "sum": _reduced(np.add),
    "max": _reduced(np.fmax), "min": _reduced(np.fmin), "reduce": reduce, "associative_scan": associative_scan,
    "reshape": reshape, "permute": permute, "join": join, "split": split, "broadcast": broadcast,
    "convert_layout": convert_layout, "cdiv": cdiv, "umulhi": umulhi,
    "multiple_of": _hint(sanitizer.check_multiple_of), "max_contiguous": _hint(sanitizer.check_max_contiguous),
    "static_range": lambda *bounds: range(*(operator.index(values(bound)) for bound in bounds)),
    "static_assert": lambda *_: None, "pointer_type": tl.pointer_type,
}  # fmt: skip
