"""Reductions and scans of the interpreter, a whole slice at a time; Triton calls the combine function once an element.

`tl.sort` takes the exclusive or along each axis of a hypercube dozens of times, which took minutes for one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime.interpreter import ReduceOps, ScanOps

Array = npt.NDArray[Any]

# Combine functions that numpy reduces by itself: their results are the same in any order.
_UFUNCS: dict[Any, np.ufunc] = {
    tl.standard._xor_combine: np.bitwise_xor,
    tl.standard._or_combine: np.bitwise_or,
}


def fast_reduce(original: Callable[..., Any], self: ReduceOps, given: Sequence[tl.tensor]) -> list[tl.tensor]:
    """The result of `ReduceOps.generic_reduce`: one tensor of the reduced shape for each given."""
    arrays = [one.handle.data for one in given]
    dims = arrays[0].ndim
    if self.axis is None:
        arrays = [array.reshape(-1) for array in arrays]
    axis = self.axis or 0
    ufunc = _UFUNCS.get(self.combine_fn)
    if ufunc is None:
        *_, reduced = _partial_results(self, given, arrays, axis)
    else:
        reduced = [ufunc.reduce(array, axis=axis) for array in arrays]
    if self.keep_dims:
        added = tuple(range(dims)) if self.axis is None else axis
        reduced = [np.expand_dims(array, added) for array in reduced]
    return [self.to_tensor(array, one.dtype) for array, one in zip(reduced, given, strict=True)]


def fast_scan(original: Callable[..., Any], self: ScanOps, given: Sequence[tl.tensor]) -> list[tl.tensor]:
    """The result of `ScanOps.generic_scan`: one tensor of the same shape for each given."""
    arrays = [one.handle.data for one in given]
    steps = zip(*_partial_results(self, given, arrays, self.axis), strict=True)
    scanned = [np.stack(slices, axis=self.axis) for slices in steps]
    return [self.to_tensor(array, one.dtype) for array, one in zip(scanned, given, strict=True)]


def _partial_results(
    ops: ReduceOps | ScanOps, given: Sequence[tl.tensor], arrays: Sequence[Array], axis: int
) -> Iterator[list[Array]]:
    """The combination of the first slice along an axis, of the first two, and so on to that of all."""

    def tensors(slices: Sequence[Array]) -> list[tl.tensor]:
        return [ops.to_tensor(array, one.dtype) for array, one in zip(slices, given, strict=True)]

    moved = [np.moveaxis(array, axis, 0) for array in arrays]
    combined = [array[0] for array in moved]
    yield combined
    for place in range(1, len(moved[0])):
        answer = ops.combine_fn.fn(*tensors(combined), *tensors([array[place] for array in moved]))
        answers = answer if isinstance(answer, tuple) else (answer,)
        values = [one.handle.data if isinstance(one, tl.tensor) else one for one in answers]
        combined = [
            np.broadcast_to(value, old.shape or (1,)).reshape(old.shape).astype(old.dtype)
            for value, old in zip(values, combined, strict=True)
        ]
        yield combined
