"""Mends Triton's interpreter: its narrow floats are wrong in every release from 3.4 to 3.9.

Unfixed, `tl.dot` multiplies the bit patterns of bf16, fp32 -> bf16 truncates, fp32 -> e4m3 gives other bytes than the
hardware, subnormals and NaN do not survive a widening, arithmetic on bf16 adds bit patterns, and arguments annotated
`tl.int64` stay int32. Before 3.9 `tl.fma` rounds twice and `tl.maximum` of NaN and a number is NaN; 3.6 takes no tensor
as a loop bound under numpy 2.4; 3.9 refuses a mask that a function was given as `True`, or that joins a scalar and a
block. Upstream declined a fix, so verification brings this one. Hints are believed and any address is taken:
sanitizer.py watches each launch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import _normalize_ty

from mlagen.verify import reductions, sanitizer

# Triton dtypes that numpy does not know: the interpreter holds their bits.
_TORCH_DTYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5: torch.float8_e5m2,
}
_TORCH_BITS = {1: torch.uint8, 2: torch.int16}
_NUMPY_BITS = {1: np.uint8, 2: np.uint16}
_CASTS = ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc")
_MENDED = "_mlagen_fixed"
_np_dtypes: dict[str, Any] = {}  # of scalar dtypes, by name: Triton makes a table of all for each look
_called: set[Any] = set()  # device functions that this launch has called


def install() -> None:
    """Mends the interpreter of this process; a second call does nothing."""
    if getattr(InterpreterBuilder, _MENDED, False):
        return
    for name in _CASTS:
        _wrap(InterpreterBuilder, f"create_{name}", _fixed_cast)
    _wrap(InterpreterBuilder, "create_fp_to_fp", _fixed_fp_to_fp)
    _wrap(InterpreterBuilder, "create_dot", _fixed_dot)
    _wrap(InterpreterBuilder, "create_fma", _fixed_fma)
    _wrap(InterpreterBuilder, "create_masked_load", _fixed_load)
    _wrap(InterpreterBuilder, "create_masked_store", _fixed_store)
    for name in ("create_atomic_cas", "create_atomic_rmw"):
        _wrap(InterpreterBuilder, name, _watched_atomic)
    _wrap(InterpreterBuilder, "set_grid_idx", _watched_program)
    _wrap(InterpreterBuilder, "create_assume", _checked_assume)
    for name, ufunc in (("maxnumf", np.fmax), ("minnumf", np.fmin)):
        _wrap(InterpreterBuilder, f"create_{name}", functools.partial(_fixed_extremum, ufunc))
    _wrap(interpreter.ReduceOps, "min_max", _fixed_min_max)
    _wrap(interpreter.ReduceOps, "generic_reduce", reductions.fast_reduce)
    _wrap(interpreter.ScanOps, "generic_scan", reductions.fast_scan)
    warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)  # its maximum is NaN on a GPU too
    for name in ("binary_op", "unary_op", "create_fma", "create_clampf"):
        _wrap(InterpreterBuilder, name, _refuses_narrow)
    _wrap(InterpretedFunction, "run", _fixed_run)
    _wrap(InterpretedFunction, "__call__", _fixed_call)
    _wrap(interpreter, "_get_np_dtype", _fixed_np_dtype)
    _wrap(interpreter, "_patch_lang_tensor", _fixed_lang_tensor)
    _wrap(interpreter, "_patch_lang_core", _fixed_lang_core)
    setattr(InterpreterBuilder, _MENDED, True)


def _wrap(owner: Any, name: str, fixed: Callable[..., Any]) -> None:
    """Replaces `owner.name` by `fixed`, which gets the original as its first argument."""
    original = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fixed(original, *args, **kwargs)

    setattr(owner, name, wrapper)


def widen(data: Any, dtype: tl.dtype) -> Any:
    """Values of a numpy array of `dtype`'s bits: fp32 for bf16 and fp8 (exact), the array itself for other dtypes."""
    if dtype not in _TORCH_DTYPES:
        return data
    bits = torch.from_numpy(np.require(data, requirements=["C", "W"]).view(f"i{data.itemsize}"))
    return bits.view(_TORCH_DTYPES[dtype]).float().numpy()


def narrow(data: Any, dtype: tl.dtype, toward_zero: bool = False) -> Any:
    """Bits of a numpy array of values rounded to `dtype`: to nearest even, or toward zero.

    fp8 saturates at its largest finite value, as `cvt.rn.satfinite` does, and any NaN becomes 0x7f.
    """
    torch_dtype = _TORCH_DTYPES.get(dtype, torch.float16)
    values = torch.from_numpy(np.require(data, requirements=["C", "W"]))
    if torch_dtype.itemsize == 1:
        limit = torch.finfo(torch_dtype).max
        values = values.clamp(-limit, limit)
    rounded = values.to(torch_dtype)
    bits = rounded.view(_TORCH_BITS[torch_dtype.itemsize])
    if torch_dtype.itemsize == 1:
        bits = torch.where(values.isnan(), 0x7F, bits)
    if toward_zero:
        # One bit pattern less is the next value toward zero, also from infinity.
        bits = bits - (rounded.double().abs() > values.double().abs()).to(bits.dtype)
    return bits.numpy().view(np.float16 if dtype == tl.float16 else _NUMPY_BITS[torch_dtype.itemsize])


def _convert(src: TensorHandle, dst: tl.dtype, toward_zero: bool = False) -> TensorHandle:
    """A handle converted to `dst`; bf16 and fp8 pass through fp32, as on the hardware."""
    data = widen(src.data, src.dtype.scalar)
    if dst in _TORCH_DTYPES or (dst == tl.float16 and data.dtype.kind == "f"):
        if data.dtype.kind != "f":
            data = data.astype(np.float32)
        return TensorHandle(narrow(data, dst, toward_zero), dst)
    return TensorHandle(data.astype(interpreter._get_np_dtype(dst)), dst)


def _mask(mask: TensorHandle) -> TensorHandle:
    """A mask as numpy's bool, as Triton 3.9 requires: a function's argument `True` is an int there."""
    # Of a descriptor it is an array of bool already, in Triton 3.8 and older.
    return TensorHandle(mask.data.astype(bool), tl.int1) if isinstance(mask, TensorHandle) else mask


def _bools(mask: Any) -> Any:
    return mask.data if isinstance(mask, TensorHandle) else mask


def _fixed_load(original: Any, self: Any, ptrs: TensorHandle, mask: TensorHandle, *others: Any, **named: Any) -> Any:
    mask = _mask(mask)
    if (launch := sanitizer.current()) is not None:
        launch.reads(ptrs.data, _bools(mask), _itemsize(ptrs))
    return original(self, ptrs, mask, *others, **named)


def _fixed_store(
    original: Any, self: Any, ptrs: TensorHandle, value: Any, mask: TensorHandle, *others: Any, **named: Any
) -> Any:
    mask = _mask(mask)
    if (launch := sanitizer.current()) is not None:
        launch.writes(ptrs.data, _bools(mask), value.data)
    return original(self, ptrs, value, mask, *others, **named)


def _watched_atomic(original: Any, self: Any, *args: Any) -> Any:
    # Of a compare-and-swap the pointer stands first, of the others behind the operation, and a mask behind the value.
    at = 0 if isinstance(args[0], TensorHandle) else 1
    ptr, mask = args[at], args[at + 2].data if at else np.array(True)
    if (launch := sanitizer.current()) is not None:
        launch.exchanges(ptr.data, mask.astype(bool), _itemsize(ptr))
    return original(self, *args)


def _watched_program(original: Any, self: Any, *place: int) -> None:
    sanitizer.begin_program()
    original(self, *place)


def _checked_assume(original: Any, self: Any, condition: TensorHandle) -> None:
    sanitizer.check_assume(condition.data)


def _itemsize(ptrs: TensorHandle) -> int:
    """Bytes of a pointer's element."""
    return int(np.dtype(interpreter._get_np_dtype(ptrs.get_element_ty())).itemsize)


def _fixed_cast(original: Any, self: Any, src: TensorHandle, dst_type: Any) -> Any:
    dst = dst_type.scalar
    if src.dtype.scalar in _TORCH_DTYPES or dst in _TORCH_DTYPES:
        return _convert(src, dst)
    return original(self, src, dst_type)


def _fixed_fp_to_fp(original: Any, self: Any, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> Any:
    known = {tl.float16, tl.float32, tl.float64, *_TORCH_DTYPES}
    if src.dtype.scalar in known and dst_type.scalar in known:
        return _convert(src, dst_type.scalar, rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ)
    return original(self, src, dst_type, rounding_mode)


def _fixed_dot(original: Any, self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: Any) -> Any:
    if d.dtype.scalar != tl.float32:
        return original(self, a, b, d, *rest)

    # In fp64: BLAS sums in an order that depends on a row's place in the tile, which the last bits of fp32 would show.
    def wide(operand: TensorHandle) -> Any:
        dtype = operand.dtype.scalar
        return (widen(operand.data, dtype) if dtype in _TORCH_DTYPES else operand.data).astype(np.float64)

    return TensorHandle((wide(a) @ wide(b) + d.data).astype(np.float32), tl.float32)


def _fixed_fma(original: Any, self: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> Any:
    # fp64 holds the product of two fp32 numbers, and their remainders of a division, without rounding.
    if x.dtype.scalar != tl.float32:
        return original(self, x, y, z)
    wide = x.data.astype(np.float64) * y.data + z.data
    return TensorHandle(wide.astype(np.float32), tl.float32)


def _quiet(handle: TensorHandle) -> TensorHandle:
    """NaN as quiet NaN, which numpy's fmax and fmin leave out as a GPU does any."""
    if handle.data.dtype.kind != "f":
        return handle
    return TensorHandle(np.where(np.isnan(handle.data), handle.data.dtype.type(np.nan), handle.data), handle.dtype)


def _fixed_extremum(ufunc: Any, original: Any, self: Any, x: TensorHandle, y: TensorHandle) -> Any:
    return self.binary_op(_quiet(x), _quiet(y), ufunc)


def _fixed_min_max(original: Any, self: Any, input: Any, *rest: Any, **kwargs: Any) -> Any:  # noqa: A002
    values = input[0] if isinstance(input, tuple) else input
    return original(self, tl.tensor(_quiet(values.handle), values.type), *rest, **kwargs)


def _refuses_narrow(original: Any, self: Any, *args: Any) -> Any:
    for arg in args:
        if isinstance(arg, TensorHandle) and arg.dtype.scalar in _TORCH_DTYPES:
            raise TypeError(
                f"the interpreter computes on the bit patterns of {arg.dtype.scalar}: convert to fp32 before arithmetic"
            )
    return original(self, *args)


def _fixed_run(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    annotations = {name: _normalize_ty(ty) for name, ty in self.fn.__annotations__.items()}

    def typed(name: str, value: Any) -> Any:
        if annotations.get(name) == "i64" and isinstance(value, int):
            return tl.tensor(TensorHandle(np.array([value], dtype=np.int64), tl.int64), tl.int64)
        return value

    _called.clear()
    args = tuple(typed(name, value) for name, value in zip(self.arg_names, args, strict=False))
    given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
    kwargs = {name: typed(name, value) for name, value in kwargs.items()}
    with sanitizer.watched(self.fn.__name__, str(Path(self.fn.__code__.co_filename).parent), given):
        return original(self, *args, **kwargs)


def _fixed_call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    # The first call of a launch patches triton.language for the function; each further one would search it anew, which
    # is most of a launch's time.
    if self not in _called:
        _called.add(self)
        return original(self, *args, **kwargs)
    return self.rewrite()(*args, **kwargs)


def _fixed_np_dtype(original: Any, dtype: Any) -> Any:
    if dtype.scalar.is_ptr():
        return original(dtype)
    found = _np_dtypes.get(dtype.scalar.name)
    if found is None:
        found = _np_dtypes[dtype.scalar.name] = original(dtype)
    return found


def _fixed_lang_tensor(original: Any, tensor: Any, scope: Any) -> None:
    original(tensor, scope)
    # numpy 2.4 turns no array into an int, not even one of a single element.
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _fixed_lang_core(original: Any, lang: Any, scope: Any) -> None:
    original(lang, scope)
    for name, check in (
        ("multiple_of", sanitizer.check_multiple_of),
        ("max_contiguous", sanitizer.check_max_contiguous),
    ):
        scope.set_attr(lang, name, _checked_hint(getattr(lang, name), check))
    scope.set_attr(lang.dtype, "to_ir", _to_ir_of(lang.dtype.to_ir))


def _to_ir_of(known: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The function that names a dtype, including fp8e4b8, which the interpreter forgets."""

    def to_ir(self: Any, builder: Any) -> Any:
        return builder.get_fp8e4b8_ty() if self.name == "fp8e4b8" else known(self, builder)

    return to_ir


def _checked_hint(believed: Any, check: Callable[..., None]) -> Any:
    def hint(input: Any, values: Any) -> Any:  # noqa: A002
        """Checks a claim that a GPU would take on trust."""
        claims = values if isinstance(values, (list, tuple, tl.tuple)) else [values]
        numbers = [int(claim.value if isinstance(claim, tl.constexpr) else claim) for claim in claims]
        if isinstance(input, tl.tensor):
            pointers = input.dtype.scalar.is_ptr()
            check(input.handle.data, numbers, _itemsize(input.handle) if pointers else None)
        return believed(input, values)

    return hint
