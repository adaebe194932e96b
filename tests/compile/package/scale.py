"""A constant and a helper that another module takes by relative import."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def to_log2(x):
    return x * LOG2_E


@triton.jit
def unused(x):
    return x + 1.0
