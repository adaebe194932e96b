"""Numbers of sm90 kernels that multiply K as e4m3, as it is stored."""

from __future__ import annotations

from dataclasses import replace

from mlagen.layout import CacheLayout
from mlagen.plan.sm90.kernel import BLOCK_H, BLOCK_N, D_V, E4M3_PRODUCT_DEPTH, PRODUCT_DEPTH, Registers, Sm90Plan
from mlagen.work import ITEMSIZE

# Bounds of P in e4m3. The format holds 448 at most, and 2^8.75 is rounded to 416. It has all its bits from 2^-6 on, so
# that weights down to 2^-11 of a row's maximum have them where that is 2^5. It may rise 13-fold before O is rescaled.
P_MOST_LOG2, P_LOG2 = 8.75, 5


def is_plain_e4m3(layout: CacheLayout) -> bool:
    """Whether a row is K's columns in order, a byte each, and the scale is the tensor's. Padding may follow them."""
    runs = {(field.dtype, field.tensor_scale, field.offset - field.first_column) for field in layout.data}
    return runs == {("e4m3", True, 0)} and not layout.planar


def reads_e4m3(layout: CacheLayout) -> bool:
    """Whether the kernels that multiply K as e4m3 read a cache: rows like `is_plain_e4m3` without padding."""
    return is_plain_e4m3(layout) and layout.row_bytes == layout.columns


def of_e4m3(sm90: Sm90Plan, registers: Registers) -> Sm90Plan:
    """The plan of a kernel of 64 rows that multiplies K as it is stored, of one that multiplies the model's dtype."""
    scores = 2 * sm90.d_k // E4M3_PRODUCT_DEPTH
    values = 2 * (D_V // 2 // BLOCK_H) * sm90.step // PRODUCT_DEPTH
    return replace(
        sm90,
        registers=registers,
        scale_columns=0,
        expected_shared=shared_bytes(sm90, BLOCK_H, BLOCK_H, 7),
        expected_products=scores + values,
        k_itemsize=1,
    )


def with_e4m3_p(sm90: Sm90Plan) -> Sm90Plan:
    """The plan of such a kernel with P in e4m3: half of its bytes, and of the products with V.

    V is loaded and transposed before its P is there: with 32 rows both chunks of a block, with 64 one, for registers.
    """
    scores = 2 * sm90.d_k // E4M3_PRODUCT_DEPTH
    return replace(
        sm90,
        expected_shared=sm90.expected_shared - 3 * sm90.block_h * BLOCK_N * (ITEMSIZE - 1),
        expected_products=scores + (sm90.expected_products - scores) * PRODUCT_DEPTH // E4M3_PRODUCT_DEPTH,
        v_ahead=BLOCK_H // sm90.block_h,
    )


def shared_bytes(sm90: Sm90Plan, rows: int, q_rows: int, vectors: int) -> int:
    """Return the bytes of Q, four blocks of K, three P, and `vectors` fp32 vectors of rows."""
    return (q_rows + 4 * BLOCK_N) * sm90.d_k + 3 * rows * BLOCK_N * ITEMSIZE + vectors * rows * 4
