"""What the compile stage is asked to do: one kernel, one variant, one target."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompileJob:
    """One compilation of a generated kernel.

    Attributes:
        module: generated module that holds the kernel, `sparse_attention`.
        kernel: name of the `@triton.jit` function in it.
        variant: what tells this job from the kernel's others, for people: `h<=16 BLOCK_N=32 w4 s3`.
        target: name in mlagen.plan.targets.TARGETS.
        signature: (argument, Triton type) of each run-time argument: `*bf16`, `i32`, `fp32`.
        constexprs: (argument, value) of each constexpr; an absent optional tensor is a None here.
        num_warps: warps a program.
        num_stages: software-pipeline depth.
        expected_shared: bytes of shared memory the plan expects a program to need.
        expected_products: warpgroup products (wgmma) the plan expects in the code; None: not judged.
    """

    module: str
    kernel: str
    variant: str
    target: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, int | float | bool | None], ...]
    num_warps: int
    num_stages: int
    expected_shared: int
    expected_products: int | None = None
