"""What templates of the sm90 kernels ask for of a row's columns: names of its halves, and where columns are padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlagen.plan import Sm90Plan
from mlagen.plan.row_pieces import RowPieces
from mlagen.plan.sm90 import SWIZZLED_COLUMNS, register_columns
from mlagen.work import ITEMSIZE

WORDS = {32: ("index",), 64: ("low", "high")}  # of a warp's indices of a block, one a lane, by indices a block


@dataclass(frozen=True)
class Half:
    """Columns of K and of O that a warpgroup holds, as a kernel's module names them.

    Attributes:
        width: how many.
        columns: their constant.
        layout: that of accumulators.
        result: that in which accumulators are stored.
        holder: who holds them.
    """

    width: int
    columns: str
    layout: str
    result: str
    holder: str

    @property
    def result_columns(self) -> tuple[int, ...]:
        """Columns by which a thread's registers of an accumulator differ, as it is stored: from 16 on."""
        return register_columns(self.width)


def halves(pieces: RowPieces) -> tuple[Half, Half]:
    """The left and the right half of a row: the same names where they are equal."""
    if pieces.equal:
        return (Half(pieces.left, "D_HALF", "HALF", "RESULT", "a warpgroup"),) * 2
    left = Half(pieces.left, "D_LEFT", "LEFT", "LEFT_RESULT", "WG0")
    return left, Half(pieces.right, "D_RIGHT", "RIGHT", "RIGHT_RESULT", "WG1")


def row_context(sm90: Sm90Plan, *, takes_pair: bool = False) -> dict[str, Any]:
    """What templates ask for of the columns of a row; `takes_pair`: RoPE's columns of Q lie elsewhere."""
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
        "tail_swizzle": tail_swizzle,  # bytes of a row in shared memory, None where they are TILE's
        "p_tile": "P_TILE" if p_swizzle else "TILE",
        "p_swizzle": p_swizzle,
        "words": WORDS[sm90.block_n],
        # Opaque where no column of the right half is V's: the compiler would drop its products, but not all of them.
        "v_end": "D_V" if pieces.left < pieces.d_v else "D_V + _opaque_zero(call.num_heads)",
        "half_columns": "D_HALF" if pieces.equal else "columns",
        "result": "RESULT" if pieces.equal else "result",
    }
