"""Tensors of a kernel as numpy arrays, with Triton's dtypes and the arithmetic of its scalars and blocks.

bf16 and fp8 values are kept as fp32; each result is rounded to its dtype. Pointers are addresses in bytes. An integer
wraps as on a GPU, and its division truncates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl

Array = Any  # numpy's, of any dtype

ARRAYS = {
    "int1": np.dtype("?"), "int8": np.dtype("i1"), "int16": np.dtype("i2"), "int32": np.dtype("i4"),
    "int64": np.dtype("i8"), "uint8": np.dtype("u1"), "uint16": np.dtype("u2"), "uint32": np.dtype("u4"),
    "uint64": np.dtype("u8"), "fp16": np.dtype("f2"), "fp32": np.dtype("f4"), "fp64": np.dtype("f8"),
    "bf16": np.dtype("f4"), "fp8e4nv": np.dtype("f4"),
}  # fmt: skip
NARROW = {"bf16": 2, "fp8e4nv": 1}  # bytes of dtypes that numpy does not have
ADDRESS = np.dtype("i8")


def itemsize(dtype: Any) -> int:
    """Bytes of an element in memory."""
    if dtype.is_ptr():
        return 8
    return NARROW.get(dtype.name) or ARRAYS[dtype.name].itemsize


def raw_dtype(dtype: Any) -> Any:
    """numpy's dtype of the bits in memory."""
    return np.dtype(f"u{NARROW[dtype.name]}") if dtype.name in NARROW else ARRAYS[dtype.name]


_E4M3: Array = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def decode(bits: Array, dtype: Any) -> Array:
    """Values of the bits of an array in memory."""
    if dtype.name == "bf16":
        return (bits.astype("u4") << np.uint32(16)).view("f4")
    return _E4M3[bits] if dtype.name == "fp8e4nv" else bits


def encode(values: Array, dtype: Any) -> Array:
    """Bits of an array's values, rounded to nearest even; e4m3 saturates."""
    if dtype.name == "bf16":
        return _bf16_bits(np.ascontiguousarray(values, "f4"))
    if dtype.name == "fp8e4nv":
        limited = torch.from_numpy(np.array(values, "f4", ndmin=1)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return limited.view(torch.uint8).numpy().reshape(np.shape(values))
    return values


def _bf16_bits(values: Array) -> Array:
    bits = values.view("u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype("u2")


def rounded(values: Array, dtype: Any) -> Array:
    """Values as a tensor of this dtype holds them."""
    if dtype.name in NARROW:
        return decode(encode(values, dtype), dtype)
    return values


class Type(tuple[Any, ...]):
    """A tensor's type as a kernel reads it: shape and layout."""

    shape = property(lambda self: self[0])
    layout = property(lambda self: self[1])


class PerThread:
    """The layout of a scalar that each thread has its own of."""


PER_THREAD = PerThread()


class Tensor:
    """A block of values, or a scalar.

    Attributes:
        array: the values in logical order; of a scalar that each thread has its own of, [threads].
        dtype: Triton's.
        layout: Gluon's, PER_THREAD, or None where it is not known.
    """

    array: Array

    def __init__(self, array: Array, dtype: Any, layout: Any = None) -> None:
        self.array = array
        self.dtype = dtype
        self.layout = layout

    @property
    def shape(self) -> list[int]:
        """Its dimensions."""
        return [] if self.layout is PER_THREAD else list(np.shape(self.array))

    @property
    def type(self) -> Type:
        """Shape and layout."""
        return Type((self.shape, self.layout))

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        """The values in another dtype, or their bits as such."""
        dtype = getattr(dtype, "value", dtype)
        if dtype is self.dtype:
            return self
        if dtype.is_ptr() or self.dtype.is_ptr():
            return Tensor(np.asarray(self.array).astype(ADDRESS), dtype, self.layout)
        if bitcast:
            bits = np.ascontiguousarray(encode(np.asarray(self.array), self.dtype)).view(raw_dtype(dtype))
            return Tensor(decode(bits.reshape(np.shape(self.array)), dtype), dtype, self.layout)
        return Tensor(convert(np.asarray(self.array), self.dtype, dtype), dtype, self.layout)

    def __getitem__(self, index: Any) -> Tensor:
        from mlagen.verify.gluon.layouts import indexed

        index = index if isinstance(index, tuple) else (index,)
        return Tensor(np.asarray(self.array)[index], self.dtype, indexed(self.layout, index))

    def __index__(self) -> int:
        return int(_single(self))

    def __bool__(self) -> bool:
        return bool(_single(self))

    def __float__(self) -> float:
        return float(_single(self))

    def __neg__(self) -> Tensor:
        return Tensor(-np.asarray(self.array), self.dtype, self.layout)

    def __invert__(self) -> Tensor:
        return Tensor(~np.asarray(self.array), self.dtype, self.layout)

    def __hash__(self) -> int:
        return id(self)


def _single(tensor: Tensor) -> Array:
    """The value of a scalar; one that each thread has its own of has to be the same in all."""
    array = np.asarray(tensor.array)
    if array.size == 1:
        return array.reshape(())
    if tensor.layout is not PER_THREAD:
        raise TypeError(f"a block of shape {list(array.shape)} stands for a scalar")
    if (array != array[0]).any():
        raise ValueError("threads of a partition take different ways")
    return array[0]


def convert(array: Array, source: Any, dtype: Any) -> Array:
    """Values of one dtype as values of another."""
    if source.name == dtype.name:  # also of pointers, which have no numpy dtype
        return array
    if dtype.name in NARROW:
        return rounded(array.astype("f4"), dtype)
    wanted = ARRAYS[dtype.name]
    if array.dtype.kind == "f" and wanted.kind in "iu":
        limits: Any = np.iinfo(wanted.str)
        whole = np.clip(np.trunc(array.astype("f8")), limits.min, limits.max)
        return np.where(np.isnan(array), 0, whole).astype(wanted)
    return array if array.dtype == wanted else array.astype(wanted)


def constant(value: Any, dtype: Any) -> Array:
    """A Python number in a dtype; integers wrap."""
    kind = ARRAYS[dtype.name]
    if kind.kind in "iu":
        bits = kind.itemsize * 8
        return np.array(int(value) & ((1 << bits) - 1), f"u{kind.itemsize}").view(kind)[()]
    return kind.type(value)


def scalar_dtype(value: Any) -> Any:
    """The dtype that Triton gives a Python number."""
    if isinstance(value, (bool, np.bool_)):
        return tl.int1
    if isinstance(value, float):
        return tl.float32
    if -(2**31) <= value < 2**31:
        return tl.int32
    return tl.uint32 if 0 <= value < 2**32 else tl.int64


def tensor(value: Any) -> Tensor:
    """A tensor itself, or the scalar of a Python number."""
    if isinstance(value, Tensor):
        return value
    value = getattr(value, "value", value)
    dtype = scalar_dtype(value)
    return Tensor(constant(value, dtype), dtype)


def common(one: Any, other: Any) -> Any:
    """The dtype of an operation over tensors of two."""
    if one is other or one.name == other.name:
        return one
    if one.is_floating() or other.is_floating():
        if not (one.is_floating() and other.is_floating()):
            return one if one.is_floating() else other
        wide = max(one, other, key=lambda dtype: dtype.primitive_bitwidth)
        return tl.float32 if wide.primitive_bitwidth < 32 else wide
    if one.primitive_bitwidth != other.primitive_bitwidth:
        return max(one, other, key=lambda dtype: dtype.primitive_bitwidth)
    return one if one.is_int_unsigned() else other


def alike(one: Any, other: Any) -> tuple[Array, Array, Any, Any]:
    """Arrays of two operands in the dtype of their result, that dtype, and the result's layout."""
    is_one, is_other = isinstance(one, Tensor), isinstance(other, Tensor)
    if is_one and is_other:
        dtype = common(one.dtype, other.dtype)
        left, right = one.array, other.array
        if one.dtype is not dtype:
            left = convert(np.asarray(left), one.dtype, dtype)
        if other.dtype is not dtype:
            right = convert(np.asarray(right), other.dtype, dtype)
        if one.layout is other.layout:
            return left, right, dtype, one.layout
        from mlagen.verify.gluon.layouts import spread

        return (*spread(one.layout, left, other.layout, right), dtype, _joint(one, other))
    given, number, swapped = (one, other, False) if is_one else (other, one, True)
    if not isinstance(given, Tensor):
        given = tensor(given)
    number = getattr(number, "value", number)
    dtype = given.dtype
    if isinstance(number, float) and not dtype.is_floating():
        dtype = tl.float32
    elif dtype.name == "int1" and not isinstance(number, bool):
        dtype = scalar_dtype(number)
    array = given.array if given.dtype is dtype else convert(np.asarray(given.array), given.dtype, dtype)
    value = constant(number, dtype)
    return (value, array, dtype, given.layout) if swapped else (array, value, dtype, given.layout)


def _joint(one: Tensor, other: Tensor) -> Any:
    """The layout of an operation over two: that of the larger one, if it is known."""
    first, second = (other, one) if one.layout is None or not np.ndim(one.array) else (one, other)
    if first.layout is PER_THREAD and second.layout is not None:
        return second.layout
    return first.layout if first.layout is not None else second.layout


def _truncated(left: Array, right: Array) -> Array:
    """A quotient without its fraction; by 0 anything."""
    divisor = np.where(right == 0, np.ones_like(right), right)
    quotient = left // divisor
    if np.asarray(left).dtype.kind == "u":
        return quotient
    inexact = (left - quotient * divisor) != 0
    return quotient + (inexact & ((left < 0) != (divisor < 0))).astype(np.asarray(quotient).dtype)


def _remainder(left: Array, right: Array) -> Array:
    divisor = np.where(right == 0, np.ones_like(right), right)
    return left - _truncated(left, divisor) * divisor


def _shift(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def shift(left: Array, right: Array) -> Array:
        bits = np.asarray(left).dtype.itemsize * 8
        return np.where((right < 0) | (right >= bits), np.zeros_like(left), function(left, right & (bits - 1)))

    return shift


OPERATORS: dict[str, Callable[[Array, Array], Array]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "floordiv": _truncated, "mod": _remainder, "truediv": operator.truediv,
    "lshift": _shift(np.left_shift), "rshift": _shift(np.right_shift),
}  # fmt: skip
COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
               "ne": np.not_equal}  # fmt: skip


def _moved(pointer: Tensor, by: Any, sign: int) -> Tensor:
    """A pointer, elements further."""
    size = itemsize(pointer.dtype.element_ty)
    offset = tensor(by)
    scaled = np.asarray(offset.array).astype(ADDRESS) * (sign * size)
    from mlagen.verify.gluon.layouts import spread

    address, scaled = spread(pointer.layout, pointer.array, offset.layout, scaled)
    return Tensor(address + scaled, pointer.dtype, _joint(pointer, offset))


def _operate(name: str, one: Any, other: Any) -> Tensor:
    pointers = [isinstance(given, Tensor) and given.dtype.is_ptr() for given in (one, other)]
    if any(pointers):
        if name == "add":
            return _moved(one, other, 1) if pointers[0] else _moved(other, one, 1)
        if name == "sub" and not pointers[1]:
            return _moved(one, other, -1)
        raise TypeError(f"{name} of pointers")
    left, right, dtype, layout = alike(one, other)
    if name == "truediv" and not dtype.is_floating():
        dtype = tl.float32
        left, right = np.asarray(left, "f4"), np.asarray(right, "f4")
    return Tensor(rounded(OPERATORS[name](left, right), dtype), dtype, layout)


def _compare(name: str, one: Any, other: Any) -> Tensor:
    if isinstance(other, (int, float)) and not isinstance(other, bool) and one.dtype.is_int():
        return Tensor(COMPARISONS[name](one.array, other), tl.int1, one.layout)
    left, right, _, layout = alike(one, other)
    return Tensor(COMPARISONS[name](left, right), tl.int1, layout)


def _install() -> None:
    for name in OPERATORS:
        setattr(Tensor, f"__{name}__", lambda self, other, name=name: _operate(name, self, other))
        setattr(Tensor, f"__r{name}__", lambda self, other, name=name: _operate(name, other, self))
    for name in COMPARISONS:
        setattr(Tensor, f"__{name}__", lambda self, other, name=name: _compare(name, self, other))


_install()
