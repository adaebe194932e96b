"""How a row is cut into the pieces of columns that the sm90 kernels hold: Gluon's tensors have powers of two."""

from __future__ import annotations

from dataclasses import dataclass

HALVES = (64, 128, 256)  # columns of half of O: whole swizzled runs, at most as many as fit a warpgroup's registers
TAILS = (0, 16, 32, 64, 128)  # columns of K behind both halves: widths of a swizzled run, and two of the longest
GRANULE = 16  # columns: 32 bytes; rows and V end at multiples of it
LEAST_V = HALVES[0]
MOST_V = 2 * HALVES[-1]


@dataclass(frozen=True)
class RowPieces:
    """Columns of a row as the sm90 kernels hold them.

    Attributes:
        left, right: columns of K and of O that WG0 and WG1 hold; V's are the first of them.
        tail: columns of K behind both.
        d_v, d_k: columns of V and of K in a row. Columns of the pieces beyond d_k are zero.
    """

    left: int
    right: int
    tail: int
    d_v: int
    d_k: int

    @property
    def of_v(self) -> int:
        """Columns of both halves."""
        return self.left + self.right

    @property
    def columns(self) -> int:
        """Columns of all pieces."""
        return self.of_v + self.tail

    @property
    def equal(self) -> bool:
        """Whether both halves have as many columns."""
        return self.left == self.right

    @property
    def pads_v(self) -> bool:
        """Whether the halves hold columns that are not V's: their products are not stored."""
        return self.of_v > self.d_v

    @property
    def pads_k(self) -> bool:
        """Whether the pieces hold columns that a row has not: they are zero."""
        return self.columns > self.d_k


def refuses(d_v: int, d_k: int) -> str | None:
    """Why a row of so many columns, the first d_v of them V's, has no pieces; None if it has."""
    if not LEAST_V <= d_v <= MOST_V:
        return f"model.v_head_dim is {d_v}, and it supports {LEAST_V} to {MOST_V}"
    if d_v % GRANULE or d_k % GRANULE:
        return f"a row has {d_k} columns, {d_v} of them in V, and it supports multiples of {GRANULE}"
    if d_k - d_v > TAILS[-1]:
        return f"a row has {d_k - d_v} columns after V, and it supports at most {TAILS[-1]}"
    return None


def cut_row(d_v: int, d_k: int) -> RowPieces:
    """The pieces of a row that is not refused: as few columns of V as hold it, as even as can be, and a tail."""
    left, right, of_v = _halves(d_v)
    tail = next(tail for tail in TAILS if of_v + tail >= d_k)
    return RowPieces(left, right, tail, d_v, d_k)


def _halves(d_v: int) -> tuple[int, int, int]:
    """Columns of the left half, of the right one, which has not more, and of both, for so many columns of V."""
    pairs = ((left + right, left) for left in HALVES for right in HALVES if right <= left)
    of_v, left = min(pair for pair in pairs if pair[0] >= d_v)
    return left, of_v - left, of_v
