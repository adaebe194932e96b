"""A kernel that writes the inputs of the next one late.

With programmatic dependent launch, a kernel may begin before the one in front of it has written its inputs. It must
wait before it reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

MOST_BYTES = 1 << 26
PROGRAMS, BLOCK = 32, 4096
SLEEPS = 2000  # of about 1 us, for a host that checks the next call before it launches it


@triton.jit  # type: ignore[untyped-decorator]
def _write_late_kernel(table_ptr, count, sleeps, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies bytes after a sleep. `table_ptr` i64 [count, 3]: destination, source and size of each piece."""
    gdc_launch_dependents()
    for _ in range(sleeps):
        tl.inline_asm_elementwise("mov.u32 $0, 0; nanosleep.u32 1000;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    for piece in range(count):
        into = tl.load(table_ptr + 3 * piece).to(tl.pointer_type(tl.uint8))
        source = tl.load(table_ptr + 3 * piece + 1).to(tl.pointer_type(tl.uint8))
        size = tl.load(table_ptr + 3 * piece + 2)
        for begin in range(tl.program_id(0) * BLOCK, size, PROGRAMS * BLOCK):
            places = begin + tl.arange(0, BLOCK)
            tl.store(into + places, tl.load(source + places, mask=places < size), mask=places < size)


def begins_early() -> bool:
    """Whether the GPU has programmatic dependent launch."""
    return torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)


def write(memory: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
    """Launches the kernel that writes bytes to memory, uint8 tensors of a GPU, piece by piece of equal size."""
    rows = [(one.data_ptr(), other.data_ptr(), one.nbytes) for one, other in zip(memory, written, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64).to(memory[0].device)
    _write_late_kernel[(PROGRAMS,)](table, len(rows), SLEEPS, PROGRAMS, BLOCK)
