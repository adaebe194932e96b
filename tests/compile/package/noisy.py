"""Prints to stdout from Python, from below Python and from a child process."""

import os
import subprocess

import triton
import triton.language as tl

print("noise")
os.write(1, b'{"noise": 1}\n')
subprocess.run(["echo", "noise"], check=True)


@triton.jit
def _noisy_kernel(x_ptr):
    tl.static_print("noise")
    tl.store(x_ptr, 1.0)
