"""Runs small kernels that a GPU would not forgive in the watched interpreter, and prints its errors as JSON.

Usage: python sanitizer_probe.py
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from mlagen.verify import interpreter
from mlagen.verify.sanitizer import SanitizerError


@triton.jit
def _copy(src_ptr, dst_ptr, count, N: tl.constexpr, MASKED: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    if MASKED:
        tl.store(dst_ptr + at, tl.load(src_ptr + at, mask=at < count, other=0), mask=at < count)
    else:
        tl.store(dst_ptr + at, tl.load(src_ptr + at))


@triton.jit
def _either(one_ptr, other_ptr, dst_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    ptrs = tl.where(at % 2 == 0, one_ptr + at, other_ptr + at)
    tl.store(dst_ptr + at, tl.load(ptrs))


@triton.jit
def _same_place(dst_ptr, SAME: tl.constexpr):
    tl.store(dst_ptr, 7 if SAME else tl.program_id(0))


@triton.jit
def _at_once(dst_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(dst_ptr + at // 2, at)


@triton.jit
def _other_width(dst_ptr):
    if tl.program_id(0) == 0:
        tl.store(dst_ptr, 1)
    else:
        tl.store(dst_ptr.to(tl.pointer_type(tl.int16)) + 1, tl.full((), 3, tl.int16))


@triton.jit
def _neighbour(src_ptr, OWN: tl.constexpr):
    value = tl.load(src_ptr + tl.program_id(0) + (0 if OWN else 1))
    tl.store(src_ptr + tl.program_id(0), value + 1)


@triton.jit
def _counted(dst_ptr):
    tl.atomic_add(dst_ptr, 1)


@triton.jit
def _hinted(src_ptr, dst_ptr, stride, N: tl.constexpr, ROWS: tl.constexpr):
    ptrs = src_ptr + tl.arange(0, N)[:, None] * stride + tl.arange(0, N)[None, :]
    ptrs = tl.multiple_of(ptrs, [ROWS, 16])
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(dst_ptr + at, tl.load(ptrs))


@triton.jit
def _contiguous(src_ptr, dst_ptr, step, N: tl.constexpr, RUN: tl.constexpr):
    at = tl.max_contiguous(tl.arange(0, N) // RUN * step + tl.arange(0, N) % RUN, [4])
    tl.store(dst_ptr + tl.arange(0, N), tl.load(src_ptr + at))


@triton.jit
def _assumes(dst_ptr, count):
    tl.assume(count > 3)
    tl.store(dst_ptr, count)


def main() -> None:
    interpreter.install()
    i32 = {"dtype": torch.int32}
    memory = torch.zeros(256, **i32)  # all tensors lie in it, so that an access outside one can be made
    src, dst = memory[16:32], memory[64:128]
    calls = {
        "inside": lambda: _copy[(4,)](src, dst, 13, 4, True),
        "one tile too far": lambda: _copy[(5,)](src, dst, 20, 4, False),
        "bound off by one": lambda: _copy[(5,)](src, dst, 17, 4, True),
        "masked out": lambda: _copy[(9,)](src, dst, 16, 4, True),
        "a store too far": lambda: _copy[(4,)](src, dst[:12], 16, 4, True),
        "of two tensors": lambda: _either[(1,)](src, memory[200:216], dst, 16),
        "past one of two": lambda: _either[(1,)](src, memory[200:214], dst, 16),
        "all write the same": lambda: _same_place[(3,)](dst, True),
        "each writes its own": lambda: _same_place[(3,)](dst, False),
        "two values at once": lambda: _at_once[(1,)](dst, 8),
        "two widths": lambda: _other_width[(2,)](dst),
        "own element": lambda: _neighbour[(4,)](src, True),
        "neighbour's element": lambda: _neighbour[(4,)](src, False),
        "atomics": lambda: _counted[(5,)](dst),
        "rows of 16 bytes": lambda: _hinted[(1,)](memory[:64], dst, 8, 4, 1),
        "rows of 4 bytes": lambda: _hinted[(1,)](memory[:64], dst, 9, 4, 1),
        "columns of 32 bytes": lambda: _hinted[(1,)](memory[:64], dst, 8, 4, 32),
        "runs of 4": lambda: _contiguous[(1,)](memory, dst, 9, 16, 4),
        "runs of 2": lambda: _contiguous[(1,)](memory, dst, 9, 16, 2),
        "assumed": lambda: _assumes[(1,)](dst, 4),
        "assumed wrongly": lambda: _assumes[(1,)](dst, 3),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = None
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            said[name] = str(cause) if isinstance(cause, SanitizerError) else f"{type(cause).__name__}: {cause}"
    print(json.dumps(said))


if __name__ == "__main__":
    main()
