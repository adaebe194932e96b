"""A compiled kernel as proofs take it in."""

from __future__ import annotations

from mlagen.compile import Resources

ONE = Resources(
    module="cache",
    kernel="_write_kernel",
    variant="ALIGNMENT=16",
    target="sm80",
    num_warps=4,
    num_stages=1,
    triton="3.7.1",
    key="00000000000000aa",
    registers=255,
    scalar_registers=None,
    spills=8,
    loop_spills=0,
    shared=4096,
    shared_limit=166912,
    block_h=None,
    tabled=False,
    tensor_memory=0,
    instructions={},
    seconds=1.0,
    cached=False,
)
