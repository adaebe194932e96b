"""Kernels that do not fit a target, or do not compile."""

import triton
import triton.language as tl


@triton.jit
def _pipelined_kernel(a_ptr, b_ptr, out_ptr, K, BLOCK: tl.constexpr):
    """Holds a tile of each operand in shared memory for every stage."""
    offs = tl.arange(0, BLOCK)  # [BLOCK]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, K, BLOCK):
        a = tl.load(a_ptr + offs[:, None] * K + k + offs[None, :])  # [BLOCK, BLOCK]
        b = tl.load(b_ptr + (k + offs)[:, None] * BLOCK + offs[None, :])  # [BLOCK, BLOCK]
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + offs[:, None] * BLOCK + offs[None, :], acc)  # [BLOCK, BLOCK]


@triton.jit
def _wide_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Keeps every element of two rows alive in the registers of one warp; one step is no loop."""
    offs = tl.arange(0, BLOCK)  # [BLOCK]
    x = tl.load(x_ptr + offs)  # [BLOCK]
    y = tl.load(x_ptr + BLOCK + offs)  # [BLOCK]
    for _ in range(STEPS):
        x, y = x * tl.sum(y) + y, y * tl.sum(x) - x
    tl.store(out_ptr + offs, x)  # [BLOCK]
    tl.store(out_ptr + BLOCK + offs, y)  # [BLOCK]


@triton.jit
def _add_rows(x, y):
    return x + y


@triton.jit
def _broken_kernel(x_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))  # [BLOCK]
    y = tl.load(x_ptr + tl.arange(0, 2 * BLOCK))  # [2 * BLOCK]
    tl.store(x_ptr, _add_rows(x, y))
