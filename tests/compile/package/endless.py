"""Never finishes its import, as a compiler in a loop would."""

import time

import triton

time.sleep(600)


@triton.jit
def _kernel(x_ptr):
    pass
