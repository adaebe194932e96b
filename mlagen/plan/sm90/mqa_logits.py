"""Numbers of the sm90 kernels of the indexer's logits, which the Gluon back end emits."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.layout import CacheLayout
from mlagen.plan.indexer import indexer_rows_of
from mlagen.plan.sm90.kernel import E4M3_PRODUCT_DEPTH, WARPS, Registers
from mlagen.plan.targets import SM90
from mlagen.spec import Spec

# Wrappers over flat keys and over pages: of e4m3 keys, and of pairs of values and scales.
FLAT = ("fp8_mqa_logits", "fp8_fp4_mqa_logits")
PAGED = ("fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits")
FLAT_MODULE, PAGED_MODULE = "_mqa_logits_sm90", "_paged_mqa_logits_sm90"
BLOCK_N = 64  # keys of a product, a warpgroup's rows; keys of a page
TILE_KEYS = 128  # flat keys of a tile: two products of a consumer
HEAD_DIM = 128  # bytes of a row of shared memory that wgmma reads
MOST_COLUMNS = 128  # of a product over flat keys; a consumer holds two
MOST_PAGED_COLUMNS = 256  # of the one that it holds over pages
MOST_TOKENS = 4  # of a consumer: with 8, the code that counts tiles spills under some Tritons
HEADS = (16, 32, 64, 128)  # which are a product's columns with a power of two of tokens
STAGES = 8  # 1 to 2 % faster than 4
PAGED_STAGES = 2  # of a program, which shares its multiprocessor; the kernel's code has two
# Programs of a multiprocessor over pages, by the most columns of their products: as many as registers suffice for.
PROGRAMS = ((128, 4), (256, 2))
Q_COLUMNS = 256  # least of all query blocks of a program, so that four programs take most of the shared memory
LEAN_COLUMNS = 128  # four programs of these products have registers for no weights
UNIT_KEYS = 256  # of DeepGEMM's schedules
Q_STAGES = 2
REGISTERS = (232, 40)  # of the second consumer and of the producer
SCANNED_BLOCKS = 512  # query blocks; a program counts their tiles at a time: four a thread
BARRIER_BYTES = 4096  # for barriers and for the values that partitions pass


def powers(most: int) -> tuple[int, ...]:
    """Powers of two up to a number, from 1 on."""
    return tuple(1 << bit for bit in range(most.bit_length()))


@dataclass(frozen=True)
class MqaLogitsSm90Plan:
    """Numbers of the two sm90 kernels of the indexer's logits: over flat keys, and over pages.

    Attributes:
        num_heads, head_dim: of the indexer.
        block_n: keys of a product.
        tile_keys: flat keys of a tile.
        tokens, paged_tokens: tokens of the query blocks that either kernel is compiled for, fewest first; none over
            pages of another size.
        stages, paged_stages: tiles or pages in shared memory at once.
        q_stages: query blocks likewise, over flat keys.
        programs: of a multiprocessor and of a range over pages, by tokens of a query block.
        num_warps: of the program's first warpgroup, for the launch.
        scanned_blocks: query blocks in one count of tiles over flat keys.
        unit_pages: pages of a unit of schedules.
        expected_products, expected_paged_products: wgmma instructions in the code of either.
    """

    num_heads: int
    head_dim: int
    block_n: int
    tile_keys: int
    tokens: tuple[int, ...]
    paged_tokens: tuple[int, ...]
    stages: int
    paged_stages: int
    q_stages: int
    programs: dict[int, int]
    num_warps: int
    scanned_blocks: int
    unit_pages: int
    expected_products: int
    expected_paged_products: int

    @property
    def registers(self) -> Registers:
        """Registers a thread of the second consumer and of the producer, over flat keys."""
        return Registers(REGISTERS)

    @property
    def q_columns(self) -> int:
        """Least columns of all query blocks that a program over pages has room for."""
        return Q_COLUMNS

    @property
    def registers_over_pages(self) -> dict[int, int]:
        """Most registers a thread over pages, by tokens of a query block, where a compiler may take too many."""
        lean = (one for one in self.paged_tokens if one * self.num_heads == LEAN_COLUMNS)
        return {one: (1 << 16) // (WARPS * 32 * self.programs[one]) for one in lean}

    @property
    def lean_columns(self) -> int:
        """Columns of products over pages beside which registers hold no weights."""
        return LEAN_COLUMNS

    @property
    def no_key(self) -> int:
        """A multiple of a product's keys that no key reaches."""
        return (1 << 31) - self.block_n

    @property
    def expected_shared(self) -> int:
        """Bytes of shared memory that a program over flat keys is expected to need; one over pages needs fewer."""
        columns = self.tokens[-1] * self.num_heads
        row_bytes = self.head_dim + 4  # with a weight or a scale
        return (self.q_stages * columns + self.stages * self.tile_keys) * row_bytes + BARRIER_BYTES


def make_mqa_logits_sm90(spec: Spec) -> MqaLogitsSm90Plan | None:
    """The plan of the sm90 kernels of a spec's indexer; None where its back end, dims or keys leave them out."""
    rows = indexer_rows_of(spec)
    if rows is None or spec.backend == "triton" or SM90 not in spec.targets:
        return None
    num_heads, head_dim = rows.indexer.num_heads, rows.indexer.head_dim
    if num_heads not in HEADS or head_dim != HEAD_DIM or not reads_keys(rows.layout):
        return None
    products, fits = HEAD_DIM // E4M3_PRODUCT_DEPTH, rows.block_size in (None, BLOCK_N)
    paged_tokens = powers(min(MOST_PAGED_COLUMNS // num_heads, MOST_TOKENS)) if fits else ()
    return MqaLogitsSm90Plan(
        num_heads=num_heads,
        head_dim=head_dim,
        block_n=BLOCK_N,
        tile_keys=TILE_KEYS,
        tokens=tuple(2 * per_consumer for per_consumer in powers(min(MOST_COLUMNS // num_heads, MOST_TOKENS))),
        paged_tokens=paged_tokens,
        stages=STAGES,
        paged_stages=PAGED_STAGES,
        q_stages=Q_STAGES,
        programs={one: next(many for most, many in PROGRAMS if one * num_heads <= most) for one in paged_tokens},
        num_warps=WARPS,
        scanned_blocks=SCANNED_BLOCKS,
        unit_pages=UNIT_KEYS // BLOCK_N,
        expected_products=2 * 4 * products,  # of two consumers, each two before its loop and two in it
        expected_paged_products=products,
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


def sm90_modules_of(spec: Spec) -> tuple[str, ...]:
    """The generated modules of the sm90 kernels that the spec's wrappers call."""
    sm90 = make_mqa_logits_sm90(spec)
    if sm90 is None:
        return ()
    kernels = ((FLAT_MODULE, FLAT, sm90.tokens), (PAGED_MODULE, PAGED, sm90.paged_tokens))
    return tuple(module for module, wrappers, tokens in kernels if tokens and {*wrappers} & {*spec.wrappers})
