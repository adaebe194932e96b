"""Launch parameters of kernels with a window of tokens for each program."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.plan.targets import WARP_SIZE

THREAD_COLUMNS = 4  # of fp32 that a thread loads at once


@dataclass(frozen=True)
class CompressTile:
    """Launch parameters of a kernel that compresses. A program takes the window of a token.

    Attributes:
        block_w: tokens of the window that it loads at once.
        num_warps: warps a program.
        apart: threads add up tokens of their own, and are joined behind the window.
        block_t: it takes the windows that end at up to so many tokens.
    """

    block_w: int
    num_warps: int
    apart: bool = False
    block_t: int = 1


def warps_of(columns: int) -> int:
    """Warps of a program that takes so many columns: at most 4."""
    warps = columns // (THREAD_COLUMNS * WARP_SIZE)
    return 4 if warps >= 4 else 2 if warps >= 2 else 1
