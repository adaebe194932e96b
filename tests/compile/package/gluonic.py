"""A kernel in Gluon, which names its layouts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _copy_kernel(x_ptr, out_ptr, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offs = gl.arange(0, BLOCK, layout)  # [BLOCK]
    gl.store(out_ptr + offs, gl.load(x_ptr + offs))  # [BLOCK]
