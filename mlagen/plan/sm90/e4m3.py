"""Numbers of sm90 kernels that multiply K as e4m3, as it is stored."""

from __future__ import annotations

from dataclasses import replace

from mlagen.layout import CacheLayout
from mlagen.plan.sm90 import kernel
from mlagen.plan.sm90.kernel import BLOCK_H, BLOCK_N, D_V, Registers, Sm90Plan
from mlagen.work import ITEMSIZE

PRODUCT_DEPTH = 32  # columns that one wgmma of e4m3 operands multiplies


def reads_e4m3(layout: CacheLayout) -> bool:
    """Whether the kernel of dense attention over e4m3 reads a cache: a row is K's columns in order, of one scale."""
    runs = [(field.dtype, field.tensor_scale, field.offset - field.first_column) for field in layout.data]
    return set(runs) == {("e4m3", True, 0)} and layout.row_bytes == layout.columns and not layout.planar


def of_e4m3(sm90: Sm90Plan, registers: Registers) -> Sm90Plan:
    """The plan of a kernel of 64 rows that multiplies K as it is stored, of one that multiplies the model's dtype."""
    scores = 2 * sm90.d_k // PRODUCT_DEPTH
    values = 2 * (D_V // 2 // BLOCK_H) * sm90.step // kernel.PRODUCT_DEPTH
    return replace(
        sm90,
        registers=registers,
        scale_columns=0,
        expected_shared=shared_bytes(sm90, BLOCK_H, BLOCK_H, 7),
        expected_products=scores + values,
        k_itemsize=1,
    )


def shared_bytes(sm90: Sm90Plan, rows: int, q_rows: int, vectors: int) -> int:
    """Return the bytes of Q, four blocks of K, three P, and `vectors` fp32 vectors of rows."""
    return (q_rows + 4 * BLOCK_N) * sm90.d_k + 3 * rows * BLOCK_N * ITEMSIZE + vectors * rows * 4
