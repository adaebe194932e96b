"""Reduces and scans random blocks in Triton's interpreter, fixed or bare, and saves the results; a process of its own.

Usage: python reductions_probe.py (fixed | bare) OUT.npz
"""

import os
import sys
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64)
SHAPES = ((1,), (16,), (1, 4), (8, 2), (2, 4, 2), (2, 2, 2, 2, 2))


@triton.jit
def _ordered(a, b):
    return a * 3 + b


@triton.jit
def _first_and_last(a_low, a_high, b_low, b_high):
    return tl.where(a_high < b_low, a_low, b_low ^ a_low), a_high * 5 - b_high


@triton.jit
def _block(src_ptr, N: tl.constexpr, SHAPE: tl.constexpr):
    return tl.reshape(tl.load(src_ptr + tl.arange(0, N)), SHAPE)


@triton.jit
def _save(dst_ptr, x, N: tl.constexpr):
    tl.store(dst_ptr + tl.arange(0, N), tl.reshape(x + tl.zeros([1], x.dtype), [N]))  # of a scalar too


@triton.jit
def _reduced(src_ptr, dst_ptr, N: tl.constexpr, M: tl.constexpr, SHAPE: tl.constexpr, AXIS: tl.constexpr,
             KEEP: tl.constexpr, WHAT: tl.constexpr):  # fmt: skip
    x = _block(src_ptr, N, SHAPE)
    if WHAT == "xor":
        _save(dst_ptr, tl.xor_sum(x, AXIS, KEEP), M)
    elif WHAT == "or":
        _save(dst_ptr, tl.reduce_or(x, AXIS, KEEP), M)
    elif WHAT == "arg":
        largest, index = tl.max(x, AXIS, return_indices=True, return_indices_tie_break_left=False, keep_dims=KEEP)
        _save(dst_ptr, largest, M)
        _save(dst_ptr + M, index.to(x.dtype), M)
    elif WHAT == "ordered":
        _save(dst_ptr, tl.reduce(x, AXIS, _ordered, KEEP), M)
    else:
        low, high = tl.reduce((x, x ^ 21), AXIS, _first_and_last, KEEP)
        _save(dst_ptr, low, M)
        _save(dst_ptr + M, high, M)


@triton.jit
def _reduced_whole(src_ptr, dst_ptr, N: tl.constexpr, SHAPE: tl.constexpr):
    tl.store(dst_ptr, tl.xor_sum(_block(src_ptr, N, SHAPE)))
    tl.store(dst_ptr + 1, tl.reduce(_block(src_ptr, N, SHAPE), None, _ordered))


@triton.jit
def _scanned(src_ptr, dst_ptr, N: tl.constexpr, SHAPE: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    x = _block(src_ptr, N, SHAPE)
    _save(dst_ptr, tl.associative_scan(x, AXIS, _ordered, REVERSE), N)
    low, high = tl.associative_scan((x, x ^ 21), AXIS, _first_and_last, REVERSE)
    _save(dst_ptr + N, low, N)
    _save(dst_ptr + 2 * N, high, N)


@triton.jit
def _sorted(src_ptr, dst_ptr, N: tl.constexpr, SHAPE: tl.constexpr):
    _save(dst_ptr, tl.sort(_block(src_ptr, N, SHAPE)), N)


def blocks() -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
    generator = torch.Generator().manual_seed(0)
    for dtype in INTEGERS:
        for shape in SHAPES:
            data = torch.randint(0, 256, (int(np.prod(shape)) * dtype.itemsize,), generator=generator)
            yield f"{dtype} {shape}", data.to(torch.uint8).view(dtype), shape
    for shape in SHAPES:
        yield f"torch.float32 {shape}", torch.randn(int(np.prod(shape)), generator=generator), shape


def reduce_block(results: dict, name: str, x: torch.Tensor, shape: tuple[int, ...], axis: int) -> None:
    left = x.numel() // shape[axis]
    for what in ("arg", "ordered") if x.is_floating_point() else ("xor", "or", "arg", "ordered", "pair"):
        for keep in (False, True):
            out = torch.zeros(2 * left, dtype=x.dtype)
            _reduced[(1,)](x, out, x.numel(), left, shape, axis, keep, what)
            results[f"{name} {what} {axis} {keep}"] = out.numpy()
    for reverse in () if x.is_floating_point() else (False, True):
        out = torch.zeros(3 * x.numel(), dtype=x.dtype)
        _scanned[(1,)](x, out, x.numel(), shape, axis, reverse)
        results[f"{name} scan {axis} {reverse}"] = out.numpy()


def main() -> None:
    np.seterr(all="ignore")
    if sys.argv[1] == "fixed":
        from mlagen.verify.interpreter import install

        install()
    results: dict = {}
    for name, x, shape in blocks():
        for axis in range(len(shape)):
            reduce_block(results, name, x, shape, axis)
        if x.is_floating_point():
            continue
        out = torch.zeros(2, dtype=x.dtype)
        _reduced_whole[(1,)](x, out, x.numel(), shape)
        results[f"{name} whole"] = out.numpy()
        if len(shape) <= 2:
            sorted_ = torch.zeros_like(x)
            _sorted[(1,)](x, sorted_, x.numel(), shape)
            results[f"{name} sort"] = sorted_.numpy()
            results[f"{name} numpy sort"] = np.sort(x.numpy().reshape(shape), -1).reshape(-1)
    np.savez(sys.argv[2], **results)


if __name__ == "__main__":
    main()
