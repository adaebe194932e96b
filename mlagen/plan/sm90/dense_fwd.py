"""Numbers of the sm90 kernel of multi-head attention."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.plan.sm90.kernel import BLOCK_H, PRODUCT_DEPTH, SWIZZLED_COLUMNS, WARPS, Registers
from mlagen.plan.targets import SM90, WARP_SIZE
from mlagen.plan.tritons import Minor
from mlagen.spec import Spec
from mlagen.work import ITEMSIZE

BLOCK_N = (128, 64)  # most wanted first
STAGES = 2
ACCUMULATORS = 192  # registers per thread for accumulators, scores and P; the rest has room then
CACHED_BYTES = 48 << 20  # part of L2's 50 MB for K and V of heads that run at the same time
QUERIES = 1
LINE_BYTES = 128  # of L2
BARRIERS = 1024  # bytes for barriers and for values between partitions


@dataclass(frozen=True)
class DenseFwdKernel:
    """Numbers of the kernel for one width of V and one addressing of K and V.

    Attributes:
        registers: registers per thread, by warpgroup.
        holds_wait_up_to: the last Triton without spills of the softmax next to its own PV, if that was faster.
        q_ahead: Q is fetched a tile ahead, if that was faster.
    """

    registers: Registers
    holds_wait_up_to: Minor | None = None
    q_ahead: bool = False


# By columns of V, and by addressing of K and V. docs/tritons.md lists spills by Triton and the tried splits.
KERNELS = {
    (64, "pointers"): DenseFwdKernel(Registers((216, 72))),
    (64, "descriptors"): DenseFwdKernel(Registers((216, 72))),
    (128, "pointers"): DenseFwdKernel(Registers((216, 72))),
    (128, "descriptors"): DenseFwdKernel(
        Registers((216, 72), (((3, 7), (224, 64)), ((3, 8), (216, 80)))), holds_wait_up_to=(3, 7), q_ahead=True
    ),
    (256, "pointers"): DenseFwdKernel(Registers((232, 56), (((3, 9), (224, 56)),)), holds_wait_up_to=(3, 7)),
    (256, "descriptors"): DenseFwdKernel(Registers((224, 56))),
}


@dataclass(frozen=True)
class DenseFwdSm90Plan:
    """Numbers of the sm90 kernel of multi-head attention.

    Attributes:
        block_m: rows per warpgroup.
        block_n: keys per step.
        stages: steps with K and V in shared memory at once.
        registers: registers per thread, by warpgroup.
        num_warps: warps of the first warpgroup.
        min_queries: fewest rows of the longest request of calls that run it.
        cached_bytes: bytes of K and V of heads that run at the same time.
        q_ahead: whether Q's memory is freed after the last scores and L2 prefetches the next tile's Q.
        holds_wait_up_to: the last minor version of Triton that overlaps the softmax with its own PV; None: none.
        expected_shared: expected bytes of shared memory per program.
        expected_products: wgmma instructions in its code.
    """

    block_m: int
    block_n: int
    stages: int
    registers: Registers
    num_warps: int
    min_queries: int
    cached_bytes: int
    q_ahead: bool
    holds_wait_up_to: Minor | None
    expected_shared: int
    expected_products: int

    @property
    def rows(self) -> int:
        """Rows of a program: two warpgroups multiply."""
        return 2 * self.block_m

    @property
    def line(self) -> int:
        """Elements of a line of L2."""
        return LINE_BYTES // ITEMSIZE


def make_dense_fwd_sm90(spec: Spec, shared_limit: int) -> DenseFwdSm90Plan | None:
    """Return the plan of the sm90 kernel of dense_fwd; None if the back end, the dims or a window exclude it.

    Columns come in shared memory's swizzled runs of 64, and V's as one accumulator.
    """
    heads = spec.multi_head
    if heads is None or heads.window is not None or spec.backend == "triton" or SM90 not in spec.targets:
        return None
    d_qk, d_v = heads.qk_head_dim, heads.v_head_dim
    kernel = KERNELS.get((d_v, heads.addressing))
    if d_qk % SWIZZLED_COLUMNS or kernel is None:
        return None
    for block_n in BLOCK_N:
        keys = STAGES * block_n * (d_qk + d_v)
        shared = (2 * BLOCK_H * d_qk + keys) * ITEMSIZE
        accumulators = (d_v + 1.5 * block_n) * BLOCK_H / (WARPS * WARP_SIZE)  # and scores, with half as many for P
        if shared + BARRIERS <= shared_limit and accumulators <= ACCUMULATORS:
            # Scores: before the loop and in it; V: in it and behind it; of both warpgroups.
            products = 2 * 2 * (d_qk // PRODUCT_DEPTH + block_n // PRODUCT_DEPTH)
            return DenseFwdSm90Plan(
                BLOCK_H,
                block_n,
                STAGES,
                kernel.registers,
                WARPS,
                QUERIES,
                CACHED_BYTES,
                kernel.q_ahead,
                kernel.holds_wait_up_to,
                shared,
                products,
            )
    return None
