"""Places of a cache's stored rows for the sm90 kernel that dequantises: which parts it loads, and from where."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.layout import CacheLayout, DataField, ScalesField
from mlagen.plan.sm90.caches import load_unit
from mlagen.plan.sm90.kernel import Sm90Plan
from mlagen.plan.targets import WARP_SIZE

WORD = 4  # bytes
# Layouts of a block's columns behind V in words, by how many: bases of registers and of lanes, [row, word] each. Where
# they are copied, a thread has the rows that it has of V's columns.
COPIED_TAILS = {
    16: ("[0, 1], [0, 2], [16, 0], [32, 0]", "[0, 4], [0, 8], [1, 0], [0, 0], [2, 0]"),
    32: ("[0, 1], [0, 2], [16, 0], [32, 0]", "[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]"),
    64: ("[0, 1], [0, 2], [0, 32], [16, 0], [32, 0]", "[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]"),
}
CONVERTED_TAILS = {
    8: ("[0, 1], [0, 2]", "[0, 4], [1, 0], [16, 0], [32, 0], [2, 0]"),
    16: ("[0, 1], [0, 2], [32, 0]", "[0, 4], [0, 8], [1, 0], [16, 0], [2, 0]"),
    32: ("[0, 1], [0, 2], [16, 0], [32, 0]", "[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]"),
}


@dataclass(frozen=True)
class StoredRows:
    """Stored rows of the caches that a kernel reads: bytes from a row's begin, columns, and words of 32 bits.

    Attributes:
        sm90: the kernel's numbers.
        layout: of the first cache.
        other: of the second one, where it is another; else None.
        dual: a call may have a second cache.
    """

    sm90: Sm90Plan
    layout: CacheLayout
    other: CacheLayout | None
    dual: bool

    @property
    def unit(self) -> int:
        """Unit of the kernel's offsets, in bytes. Everything that it loads begins at a multiple of it."""
        return load_unit(self.layout)

    @property
    def unit_shift(self) -> int:
        """The same as a power of two."""
        return self.unit.bit_length() - 1

    @property
    def tensor_scale(self) -> bool:
        """Whether rows have no scales of their own, but the tensor one."""
        return self.layout.tensor_scale

    @property
    def copies_tail(self) -> bool:
        """Whether columns behind V are copied as they are stored."""
        return self.sm90.d_tail > 0 and not self.tensor_scale

    @property
    def scales(self) -> ScalesField:
        """Scales of a row."""
        return _scales(self.layout)

    @property
    def scale_names(self) -> tuple[str, ...]:
        """Names of a thread's scales of a row."""
        return tuple(f"scale{n}" for n in range(self.sm90.scale_columns))

    @property
    def half_scales(self) -> int:
        """Scales of a warpgroup's half of a row."""
        return self.sm90.d_half // self.scales.tile

    @property
    def tail(self) -> DataField:
        """Columns in 16 bits behind those that have scales: RoPE."""
        return self.layout.data[1]

    @property
    def tail_words(self) -> int:
        """Words of RoPE."""
        return self.sm90.d_tail // WORD if self.tensor_scale else self.tail.nbytes // WORD

    @property
    def tail_bases(self) -> tuple[str, str]:
        """Bases of their layout's registers and lanes."""
        return (COPIED_TAILS if self.copies_tail else CONVERTED_TAILS)[self.tail_words]

    @property
    def half_words(self) -> int:
        """Words of a warpgroup's half of a row, a byte a column."""
        return self.sm90.d_half // WORD

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the first plane. The second plane begins behind these rows."""
        return self.layout.plane_bytes[0]

    @property
    def plane_scales(self) -> int:
        """Bytes of a token's scales in the second plane."""
        return self.layout.plane_bytes[1]

    @property
    def tile_words(self) -> int:
        """Words of the columns of a scale."""
        return self.scales.tile // WORD

    @property
    def last_byte(self) -> int:
        """Where a row's last such columns begin."""
        return self.tail.offset - self.scales.tile

    @property
    def scale_chunks(self) -> int:
        """Threads that share one scale, in a row that is computed again in fp32."""
        return self.scales.tile // self.thread_columns

    @property
    def other_scales(self) -> ScalesField:
        """Scales of a row of the second cache."""
        return _scales(self.other or self.layout)

    @property
    def run(self) -> int:
        """Pieces, the columns of a scale of the second cache, of half of a warpgroup's half of a row."""
        return self.sm90.d_half // 2 // self.other_scales.tile

    @property
    def q_words(self) -> int:
        """Words of half of a warpgroup's half of Q."""
        return self.sm90.d_half // WORD

    @property
    def thread_columns(self) -> int:
        """Columns of V that a thread has in the recompute, where a warp has a row."""
        return self.sm90.pieces.d_v // WARP_SIZE

    @property
    def thread_mask(self) -> int:
        """The bits of a column that say which of a thread's it is."""
        return self.thread_columns - 1

    @property
    def thread_bits(self) -> tuple[int, ...]:
        """The powers of two below as many."""
        return tuple(1 << bit for bit in range(self.thread_columns.bit_length() - 1))

    @property
    def thread_tail(self) -> int:
        """Columns behind V that a thread has in the recompute, where a warp has a row."""
        return self.sm90.d_tail // WARP_SIZE


def _scales(layout: CacheLayout) -> ScalesField:
    return next(field for field in layout.fields if isinstance(field, ScalesField))
