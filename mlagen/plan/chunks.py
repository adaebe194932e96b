"""Splits the lanes of a row into power-of-two blocks, since a Triton block has a power-of-two shape."""

from __future__ import annotations

from dataclasses import dataclass

MIN_BLOCK = 16  # the smallest K that tl.dot takes
MAX_WASTE = 1 / 8  # padded lanes, as a share of a block, that cost less than one more dot


@dataclass(frozen=True)
class Chunk:
    """A run of lanes that one block covers.

    Attributes:
        name: suffix of the variables that hold it, `nope`, `rope`, `nope_0` ...
        start: first lane in the row.
        lanes: lanes that are there; the block's others are masked.
        block: the block's width, a power of two, at least 16.
        in_v: the chunk is part of V too.
    """

    name: str
    start: int
    lanes: int
    block: int
    in_v: bool

    @property
    def masked(self) -> bool:
        """Whether the block is wider than its lanes."""
        return self.block > self.lanes


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def split_lanes(lanes: int) -> list[tuple[int, int]]:
    """(lanes, block) of each chunk of `lanes` lanes, largest first.

    A rest that nearly fills a power of two becomes one padded block; otherwise the largest power of two is cut off.
    """
    chunks = []
    while lanes:
        block = max(MIN_BLOCK, next_power_of_2(lanes))
        if block == MIN_BLOCK or block - lanes <= MAX_WASTE * block:
            chunks.append((lanes, block))
            break
        chunks.append((block // 2, block // 2))
        lanes -= block // 2
    return chunks


def make_chunks(parts: list[tuple[str, int]], d_v: int) -> tuple[Chunk, ...]:
    """Chunks of a row made of named `parts` (name, lanes); none crosses a part's end or lane `d_v`, where V ends."""
    chunks: list[Chunk] = []
    start = 0
    for name, lanes in parts:
        pieces: list[tuple[int, int, int]] = []
        inside = min(max(d_v - start, 0), lanes)
        for first, run in ((start, inside), (start + inside, lanes - inside)):
            lane = first
            for width, block in split_lanes(run):
                pieces.append((lane, width, block))
                lane += width
        for number, (lane, width, block) in enumerate(pieces):
            suffix = name if len(pieces) == 1 else f"{name}_{number}"
            chunks.append(Chunk(suffix, lane, width, block, lane < d_v))
        start += lanes
    return tuple(chunks)
