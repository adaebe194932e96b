"""Small kernels, written by hand, that compile well or break in one way each; one is listed as a call launches it."""

from typing import NamedTuple


class Variant(NamedTuple):
    """A launch, as generated packages describe theirs."""

    kernel: object
    arguments: tuple
    constexprs: tuple
    options: dict

    def compile(self):
        """Compiles the kernel for the current device; launches nothing."""
        return self.kernel.warmup(*self.arguments, *self.constexprs, grid=(1,), **self.options)


def variants(target):
    """The tiny kernel without a bias and, on NVIDIA, with one; its tile depends on the Triton at hand."""
    import torch
    import triton

    from .tiny import _tiny_kernel

    older = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    a, out, bias = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(64, 64), torch.empty(64)
    options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    return [
        Variant(_tiny_kernel, (a, a, one, out, 64), (32 if older else 64, 0.5), options)
        for one in ((None,) if target.startswith("gfx") else (None, bias))
    ]
