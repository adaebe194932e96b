"""Numbers of the sm90 kernels of the indexer's logits, which the Gluon back end emits."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.layout import CacheLayout
from mlagen.plan.indexer import indexer_rows_of
from mlagen.plan.sm90 import SM90, WARPS, Registers
from mlagen.spec import Spec

BLOCK_N = 64  # keys of a tile: rows of a warpgroup's product, and keys of a page
HEAD_DIM = 128  # bytes of a row of shared memory that wgmma reads
PRODUCT_DEPTH = 32  # columns that one wgmma of 8-bit operands multiplies
MOST_COLUMNS = 256  # of a product: heads of a query block
MOST_TOKENS = 8  # of a query block: sums over heads of 16 spill
HEADS = (16, 32, 64, 128)  # whose query blocks fill a product's columns, or half of them
STAGES = 8  # tiles of flat keys, which L2 has: as many as two consumers read while the producer waits for two
PAGED_STAGES = 16  # pages, which memory has: 132 KiB of them on their way
Q_STAGES = 2
REGISTERS = Registers((232, 40))  # of the second consumer and of the producer
SCANNED_BLOCKS = 512  # query blocks whose tiles a program counts at a time: four a thread
SCANNED_REQUESTS = 128  # likewise where they are requests: four a lane of each warp, so that warps exchange nothing
BARRIER_BYTES = 1024  # for barriers and for what partitions pass


@dataclass(frozen=True)
class MqaLogitsSm90Plan:
    """Numbers of the two sm90 kernels of the indexer's logits: over flat keys, and over pages.

    Attributes:
        num_heads, head_dim: of the indexer.
        block_n: keys of a tile.
        block_tokens: query tokens of a block that the kernels are compiled for, fewest first.
        stages, paged_stages: tiles in shared memory at once, of either kernel.
        q_stages: query blocks likewise.
        registers: of a thread of the second consumer and of the producer.
        num_warps: of the program's first warpgroup, which is what a launch asks for.
        scanned_blocks, scanned_requests: query blocks whose tiles a program counts at a time, in either kernel.
        expected_products: wgmma instructions in the code of either.
    """

    num_heads: int
    head_dim: int
    block_n: int
    block_tokens: tuple[int, ...]
    stages: int
    paged_stages: int
    q_stages: int
    registers: Registers
    num_warps: int
    scanned_blocks: int
    scanned_requests: int
    expected_products: int

    @property
    def no_key(self) -> int:
        """A multiple of a tile's keys that no key reaches."""
        return (1 << 31) - self.block_n

    def expected_shared(self, stages: int) -> int:
        """Bytes of shared memory that a program of the largest query blocks is expected to need."""
        columns = self.block_tokens[-1] * self.num_heads
        row_bytes = self.head_dim + 4  # with a weight or a scale
        return (self.q_stages * columns + stages * self.block_n) * row_bytes + BARRIER_BYTES


def make_mqa_logits_sm90(spec: Spec) -> MqaLogitsSm90Plan | None:
    """The plan of the sm90 kernels of a spec's indexer; None where its back end, dims or keys leave them out."""
    rows = indexer_rows_of(spec)
    if rows is None or spec.backend == "triton" or SM90 not in spec.targets:
        return None
    num_heads, head_dim = rows.indexer.num_heads, rows.indexer.head_dim
    if num_heads not in HEADS or head_dim != HEAD_DIM or not reads_keys(rows.layout):
        return None
    most = min(MOST_COLUMNS // num_heads, MOST_TOKENS)
    return MqaLogitsSm90Plan(
        num_heads=num_heads,
        head_dim=head_dim,
        block_n=BLOCK_N,
        block_tokens=tuple(1 << bit for bit in range(most.bit_length())),
        stages=STAGES,
        paged_stages=PAGED_STAGES,
        q_stages=Q_STAGES,
        registers=REGISTERS,
        num_warps=WARPS,
        scanned_blocks=SCANNED_BLOCKS,
        scanned_requests=SCANNED_REQUESTS,
        expected_products=2 * HEAD_DIM // PRODUCT_DEPTH,  # of two consumers
    )


def reads_keys(layout: CacheLayout) -> bool:
    """Whether the kernels read keys so stored: e4m3, and in a second plane an fp32 scale a key."""
    (row, *others), scales = layout.data, layout.scales_of(layout.data[0])
    if others or scales is None or row.dtype != "e4m3" or not layout.planar:
        return False
    return (
        (row.count, row.plane, row.offset) == (HEAD_DIM, 0, 0)
        and (scales.dtype, scales.tile, scales.plane, scales.offset) == ("fp32", HEAD_DIM, 1, 0)
        and layout.plane_bytes == (HEAD_DIM, 4)
    )
