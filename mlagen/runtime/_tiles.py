"""Tile tables of top-k.

`build` writes a `_tiles` with these names and types, and with other families' tables, for each package that has top-k.
"""

from typing import NamedTuple

ANY = 1 << 31


class TopkTile(NamedTuple):
    """Launch parameters of top-k: a program's `spans` warps hold reps * 128 columns each.

    With is_long, rows may be longer, and a multiprocessor has programs_per_sm programs that take rows in turn.
    """

    reps: int
    spans: int
    is_long: bool
    programs_per_sm: int


class TopkSm90Tile(NamedTuple):
    """Launch parameters of top-k's sm90 kernel: a program's threads hold halves * 4 scores of a tile.

    Shared memory holds `capacity` keys, a multiple of a tile. `parts` programs share a longer row. The limit of
    registers per thread does not apply to longer rows of bf16; None: no limit.
    """

    warps: int
    halves: int
    capacity: int
    registers: int | None
    parts: int


class TopkMergeTile(NamedTuple):
    """Launch parameters of merges of top-k, as in TopkTile; block_k columns are sorted."""

    reps: int
    spans: int
    block_k: int


# (most columns, most picks, TopkTile).
TOPK_TILES: list[tuple[int, int, TopkTile]] = [
    (4096, ANY, TopkTile(4, 8, False, 2)),
    (8192, ANY, TopkTile(4, 16, False, 2)),
    (16384, ANY, TopkTile(8, 16, False, 2)),
    (ANY, ANY, TopkTile(8, 8, True, 2)),
]
# Calls of the sm90 kernel with up to this many rows use programmatic dependent launch.
TOPK_SM90_PDL_ROWS = 264
# (most rows, most columns, most picks, TopkSm90Tile): calls of the sm90 kernel.
TOPK_SM90_TILES: list[tuple[int, int, int, TopkSm90Tile]] = [
    (264, 4096, ANY, TopkSm90Tile(16, 2, 4096, None, 1)),
    (264, 8192, ANY, TopkSm90Tile(16, 2, 8192, None, 1)),
    (16, 65536, ANY, TopkSm90Tile(16, 2, 8192, None, 8)),
    (264, 65536, ANY, TopkSm90Tile(16, 2, 8192, None, 1)),
    (4, ANY, ANY, TopkSm90Tile(16, 1, 8192, None, 16)),
    (16, ANY, ANY, TopkSm90Tile(16, 2, 8192, None, 8)),
    (33, ANY, ANY, TopkSm90Tile(16, 2, 8192, None, 4)),
    (66, ANY, ANY, TopkSm90Tile(16, 2, 8192, None, 2)),
    (264, ANY, ANY, TopkSm90Tile(16, 2, 8192, None, 1)),
    (ANY, 8192, ANY, TopkSm90Tile(8, 1, 8192, 40, 1)),
    (ANY, 524288, 2048, TopkSm90Tile(8, 2, 6144, 64, 1)),
    (ANY, ANY, ANY, TopkSm90Tile(16, 2, 8192, None, 1)),
]
# (most picks, TopkMergeTile).
TOPK_MERGE_TILES: list[tuple[int, TopkMergeTile]] = [
    (512, TopkMergeTile(4, 16, 512)),
    (2048, TopkMergeTile(4, 16, 2048)),
    (4096, TopkMergeTile(4, 16, 4096)),
]
