"""Numbers of the swap-AB kernels: heads are the columns of a product, for calls with few of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mlagen.plan.sm90.kernel import BARRIERS, BLOCK_H, BLOCK_N, PRODUCT_DEPTH, WARPS, Registers, Sm90Plan, weighed
from mlagen.plan.splits import PartialRow
from mlagen.plan.targets import SM90, TARGETS
from mlagen.work import ITEMSIZE

# Columns of a product, and the costs. Splits from these costs are the fastest measured ones, for 8 to 128 tokens.
COSTS = {16: (1800, 20), 32: (2400, 20)}
K_L_STAGES = 3  # left halves of K blocks, with two right ones; the kernel's text needs this number


@dataclass(frozen=True)
class SwapAb:
    """Numbers of a family's swap-AB kernel.

    Attributes:
        registers: registers per thread of WG0 and WG1.
        true_maxima: its consumers also exchange true maxima, with the lagged ones and row sums.
    """

    registers: Registers
    true_maxima: bool


SPARSE_FWD = SwapAb(Registers((232, 232), (((3, 9), (240, 232)),)), true_maxima=True)
DENSE_DECODE = SwapAb(Registers((224, 224)), true_maxima=False)


def make_swap_ab(kernel: SwapAb, sm90: Sm90Plan, partials: PartialRow) -> tuple[Sm90Plan, ...]:
    """Return the plans of a family's swap-AB kernel, fewest heads first.

    Args:
        kernel: the kernel's own numbers.
        sm90: plan of the kernel that it replaces.
        partials: a row of partials.
    """
    pieces = sm90.pieces
    of_v = pieces.of_v // BLOCK_H * (BLOCK_N // PRODUCT_DEPTH)
    plans = []
    for heads, cost in COSTS.items():
        extra = (K_L_STAGES - 2) * BLOCK_N * pieces.left
        tiles = ((heads + 2 * BLOCK_N) * pieces.columns + extra + 2 * BLOCK_N * heads) * ITEMSIZE
        statistics = (
            2 * (WARPS + 2 + kernel.true_maxima) * heads * 4
        )  # largest scores by warps; maxima and sums of rows
        exponents = 2 * (WARPS + 1) * heads * 4  # by warps, and of rows
        if tiles + statistics + BARRIERS > TARGETS[SM90].shared_limit:
            continue
        plans.append(
            replace(
                sm90,
                block_h=heads,
                block_n=BLOCK_N,
                registers=kernel.registers,
                cost=weighed(cost, pieces, partials),
                k_l_stages=K_L_STAGES,
                expected_shared=tiles + statistics,
                split_shared=exponents if partials.scaled else 0,
                expected_products=2 * (pieces.columns // PRODUCT_DEPTH + of_v),
            )
        )
    return tuple(plans)


def describe(plans: Sequence[Sm90Plan]) -> Iterator[str]:
    """Yield lines about the plans of a swap-AB kernel."""
    for one in plans:
        sizes = f"swap-AB, up to {one.block_h} heads: {one.step} indices per step"
        yield f"{sizes}; registers per thread of WG0 and WG1: {one.resources}"
