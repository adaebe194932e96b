"""Never finishes its import, as a compiler in a loop would."""

import triton

while True:
    pass


@triton.jit
def _kernel(x_ptr):
    pass
