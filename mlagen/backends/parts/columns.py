"""Template context for the columns of a row in sm90 kernels: names of its halves, and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlagen.plan import Sm90Plan
from mlagen.plan.sm90.kernel import SWIZZLED_COLUMNS, register_columns
from mlagen.plan.sm90.row_pieces import RowPieces
from mlagen.work import ITEMSIZE

WORDS = {32: ("index",), 64: ("low", "high")}  # names of a warp's indices, one per lane, by indices per block


@dataclass(frozen=True)
class Half:
    """Columns of K and O that a warpgroup holds, with their names in a kernel's module.

    Attributes:
        width: number of columns.
        columns: constant with the number.
        layout: layout of accumulators.
        result: layout of the stored accumulators.
        holder: warpgroup that holds them.
    """

    width: int
    columns: str
    layout: str
    result: str
    holder: str

    @property
    def result_columns(self) -> tuple[int, ...]:
        """Column strides between the registers of a thread in the stored accumulator, from 16 on."""
        return register_columns(self.width)


@dataclass(frozen=True)
class HalvedRow:
    """Text for the columns of a row in two halves.

    Attributes:
        pieces: widths of the row's parts.
        left, right, halves: both halves, and those with different names.
        half_columns: number of columns of a half that a function takes.
        tail_tile: layout of the tail in shared memory.
        tail_swizzle: bytes of a row of the tail in shared memory; None if it has the layout of the other columns.
    """

    pieces: RowPieces
    left: Half
    right: Half
    halves: Sequence[Half]
    half_columns: str
    tail_tile: str
    tail_swizzle: int | None


@dataclass(frozen=True)
class Seesaw(HalvedRow):
    """Text for the columns of a row in a seesaw kernel.

    Attributes:
        acc_columns, acc_layout: number of columns of an accumulator, and its layout.
        p0: shared memory of block 0's P.
        p_tile: layout of P in shared memory.
        p_swizzle: bytes of a row of P in shared memory; None if it has the layout of the other columns.
    """

    acc_columns: str
    acc_layout: str
    p0: str
    p_tile: str
    p_swizzle: int | None


@dataclass(frozen=True)
class PaddedSeesaw(Seesaw):
    """Text for the columns of a row that may have padding.

    Attributes:
        plain: whether the halves are equal and without padding.
        result: layout of the stored accumulator.
        tail_start: first column of the tail.
        v_end: end of V's columns.
    """

    plain: bool
    result: str
    tail_start: str
    v_end: str


@dataclass(frozen=True)
class SwapAbRow(HalvedRow):
    """Text for the columns of a row in a swap-AB kernel.

    Attributes:
        columns_of_acc, columns_of_like: number of columns of an accumulator, and of another one of its shape.
        plain: whether the halves are equal and without padding.
        tail_start: first column of the tail.
        v_end: end of V's columns.
    """

    columns_of_acc: str
    columns_of_like: str
    plain: bool
    tail_start: str
    v_end: str


def halves(pieces: RowPieces) -> tuple[Half, Half]:
    """Return the left and the right half of a row, with the same names if they are equal."""
    if pieces.equal:
        return (Half(pieces.left, "D_HALF", "HALF", "RESULT", "a warpgroup"),) * 2
    left = Half(pieces.left, "D_LEFT", "LEFT", "LEFT_RESULT", "WG0")
    return left, Half(pieces.right, "D_RIGHT", "RIGHT", "RIGHT_RESULT", "WG1")


def row_context(sm90: Sm90Plan, *, takes_pair: bool = False) -> dict[str, Any]:
    """Return all text for the columns of a row. With `takes_pair`, Q's RoPE columns are in another tensor."""
    pieces, (left, right) = sm90.pieces, halves(sm90.pieces)
    of_v = f"2 * {left.columns}" if pieces.equal else f"{left.columns} + {right.columns}"
    tail_swizzle, p_swizzle = (
        columns * ITEMSIZE if 0 < columns < SWIZZLED_COLUMNS else None for columns in (pieces.tail, sm90.block_n)
    )
    return {
        "pieces": pieces,
        "left": left,
        "right": right,
        "halves": (left,) if pieces.equal else (left, right),
        "plain": pieces.equal and not pieces.pads_k and not (takes_pair and pieces.pads_v),
        "acc_columns": "D_HALF" if pieces.equal else "acc.shape[1]",
        "columns_of_acc": "D_HALF" if pieces.equal else "acc.shape[0]",
        "columns_of_like": "D_HALF" if pieces.equal else "like.shape[0]",
        "acc_layout": "HALF" if pieces.equal else "acc.type.layout",
        "tail_start": of_v if pieces.pads_v else "D_V",
        "tail_tile": "TAIL_TILE" if tail_swizzle else "TILE",
        "tail_swizzle": tail_swizzle,
        "p_tile": "P_TILE" if p_swizzle else "TILE",
        "p_swizzle": p_swizzle,
        "words": WORDS[sm90.block_n],
        # Opaque if no column of the right half is V's: otherwise the compiler would drop some of its products.
        "v_end": "D_V" if pieces.left < pieces.d_v else "D_V + _opaque_zero(call.num_heads)",
        "half_columns": "D_HALF" if pieces.equal else "columns",
        "result": "RESULT" if pieces.equal else "result",
    }
