"""Splits the columns of a row into power-of-two blocks, since a Triton block has a power-of-two shape."""

from __future__ import annotations

from dataclasses import dataclass

MIN_BLOCK = 16  # the smallest K that tl.dot takes
MAX_BLOCK = 512  # with wider blocks of V, addresses and accumulators spill
MAX_WASTE = 1 / 8  # padded columns, as a share of a block, that cost less than one more dot


@dataclass(frozen=True)
class Chunk:
    """A run of columns that one block covers.

    Attributes:
        name: suffix of the variables that hold it, `nope`, `rope`, `nope_0` ...
        start: first column in the row.
        columns: columns that are there; the block's others are masked.
        block: the block's width, a power of two, at least 16.
        in_v: whether the chunk is also part of V.
        rotated: whether attention rotates output columns of it back.
    """

    name: str
    start: int
    columns: int
    block: int
    in_v: bool
    rotated: bool = False

    @property
    def masked(self) -> bool:
        """Whether the block is wider than its columns."""
        return self.block > self.columns


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def split_columns(columns: int) -> list[tuple[int, int]]:
    """(columns, block) of each chunk of `columns` columns, largest first.

    A rest that nearly fills a power of two becomes one padded block; otherwise the largest power of two is cut off. No
    block is wider than MAX_BLOCK.
    """
    chunks = []
    while columns:
        block = max(MIN_BLOCK, next_power_of_2(columns))
        if block > MAX_BLOCK:
            chunks.append((MAX_BLOCK, MAX_BLOCK))
            columns -= MAX_BLOCK
            continue
        if block == MIN_BLOCK or block - columns <= MAX_WASTE * block:
            chunks.append((columns, block))
            break
        chunks.append((block // 2, block // 2))
        columns -= block // 2
    return chunks


def make_chunks(parts: list[tuple[str, int]], d_v: int) -> tuple[Chunk, ...]:
    """Chunks of a row of named `parts` (name, columns); none crosses a part's end or column `d_v`, where V ends."""
    chunks: list[Chunk] = []
    start = 0
    for name, columns in parts:
        pieces: list[tuple[int, int, int]] = []
        inside = min(max(d_v - start, 0), columns)
        for first, run in ((start, inside), (start + inside, columns - inside)):
            column = first
            for width, block in split_columns(run):
                pieces.append((column, width, block))
                column += width
        for number, (column, width, block) in enumerate(pieces):
            suffix = name if len(pieces) == 1 else f"{name}_{number}"
            chunks.append(Chunk(suffix, column, width, block, column < d_v))
        start += columns
    return tuple(chunks)
