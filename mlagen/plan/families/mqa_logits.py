"""Numbers of the kernels of the lightning indexer's logits: tiles of keys times (query tokens x heads)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mlagen.errors import LimitError
from mlagen.layout import DataField, ScalesField
from mlagen.plan.family import Family
from mlagen.plan.indexer import IndexerRows, indexer_rows_of
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.sm90.mqa_logits import FLAT, FLAT_MODULE, PAGED, PAGED_MODULE, sm90_modules_of
from mlagen.plan.targets import TARGETS, Target
from mlagen.plan.tiles.chunks import MIN_BLOCK, Chunk, next_power_of_2
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import Spec

SCHEDULER = "get_paged_mqa_logits_metadata"
COLUMNS = 128  # (query token, head) pairs of a program: a key that is loaded meets so many
MOST_BLOCK_Q = 16  # query tokens of a program, however few heads there are
UNALIGNED_BLOCK_N = 16  # loads of single bytes take many registers
UNIT_KEYS = 64  # the schedule of paged calls cuts requests into units of so many keys
SCHEDULE_ROWS = 16  # of the schedule that a program finds
SCHEDULE_REQUESTS = 256  # a program takes the lengths of this many at a time
SCHEDULE_WARPS = 4
RESIDENT = 2  # programs a multiprocessor that a program's shared memory should leave room for
SCALE_TILES = (16, 32, 64, 128)  # columns of a scale of MXFP4 keys
PER_KEY = "one fp32 scale a key"


@dataclass(frozen=True)
class MqaLogitsTile:
    """Launch parameters of the logits' kernels.

    Attributes:
        block_q: query tokens a program holds, with all their heads.
        block_n: keys it takes a step.
        num_warps: warps a program.
        num_stages: software-pipeline depth of the loop over keys.
        programs_per_sm: programs a multiprocessor that share a range of the schedule, or that splits are planned with.
    """

    block_q: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@dataclass(frozen=True)
class MqaLogitsTiles:
    """Tiles of one target.

    Attributes:
        flat: of calls over flat keys.
        paged: of calls over pages, by query tokens a request, ascending; the last holds any number.
        unaligned: of the same calls where rows do not begin at 16 bytes; the flat ones take the last.
    """

    flat: MqaLogitsTile
    paged: tuple[MqaLogitsTile, ...]
    unaligned: tuple[MqaLogitsTile, ...]


@dataclass(frozen=True, kw_only=True)
class MqaLogitsPlan(Family):
    """Numbers of the logits' kernels.

    Attributes:
        rows: the indexer and the layout of its keys.
        keys, scales: fields of the layout: a key, and its scales.
        heads_block: heads of the query, rounded up to a power of two; those beyond the model's have weight 0.
        tiles: by target.
        native: targets that multiply keys as they are stored; others decode them.
        sm90: generated modules of its sm90 kernels.
    """

    NAME: ClassVar = "mqa_logits"
    WRAPPERS: ClassVar = {
        FLAT[0]: Op((), {"logits": None}),
        FLAT[1]: Op((), {"logits": None}, ("logits_dtype",)),
        SCHEDULER: Op((), {"schedule": None}),
        PAGED[0]: Op((), {"logits": None}),
        PAGED[1]: Op((), {"logits": None}, ("logits_dtype",)),
    }

    rows: IndexerRows
    keys: DataField
    scales: ScalesField
    heads_block: int
    tiles: tuple[tuple[str, MqaLogitsTiles], ...]
    native: tuple[str, ...]
    sm90: tuple[str, ...]

    @classmethod
    def all_sm90_modules(cls) -> tuple[str, ...]:
        """Generated modules of the sm90 kernels of any spec."""
        return FLAT_MODULE, PAGED_MODULE

    @property
    def sm90_modules(self) -> tuple[str, ...]:
        """Those of the spec's package."""
        return self.sm90

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> MqaLogitsPlan | None:
        """Derives the numbers; LimitError where the layout of keys is one that no kernel reads, or too wide."""
        rows = indexer_rows_of(spec)
        if rows is None or not cls.wanted(spec):
            return None
        keys, scales = _fields(spec, rows)
        heads_block = next_power_of_2(rows.indexer.num_heads)
        native = tuple(name for name in spec.targets if is_native(keys.dtype, TARGETS[name]))
        sizes = _Sizes(rows.chunks, keys.dtype, heads_block)
        tiles = tuple((name, _tiles_of(sizes, TARGETS[name])) for name in spec.targets)
        return cls(
            rows=rows,
            keys=keys,
            scales=scales,
            heads_block=heads_block,
            tiles=tiles,
            native=native,
            sm90=sm90_modules_of(spec),
        )


def is_native(dtype: str, target: Target) -> bool:
    """Whether a target's products take keys of a dtype as they are stored."""
    return {"e4m3": target.has_e4m3, "e4m3fnuz": target.has_e4m3fnuz}.get(dtype, False)


def _fields(spec: Spec, rows: IndexerRows) -> tuple[DataField, ScalesField]:
    """A key and its scales. Raises LimitError where the kernels do not know such scales."""
    (keys,) = rows.layout.data
    scales = rows.layout.scales_of(keys)
    takes, got = PER_KEY, "no scales"
    if scales is not None:
        got = f"{scales.count} {scales.dtype} scale{'s' if scales.count > 1 else ''} of {scales.tile} columns"
    known = scales is not None and (scales.count, scales.dtype) == (1, "fp32")
    if keys.dtype == "e2m1":
        takes = f"ue8m0 scales in order, of {', '.join(map(str, SCALE_TILES[:-1]))} or {SCALE_TILES[-1]} columns"
        known = scales is not None and scales.dtype == "ue8m0" and scales.tile in SCALE_TILES and scales.interleave == 1
    if scales is None or not known:
        name = MqaLogitsPlan.wanted(spec)[0]
        message = f"indexer_cache.layout: got {keys.dtype} keys with {got}; {name} takes {takes}"
        raise LimitError(message)
    return keys, scales


@dataclass(frozen=True)
class _Sizes:
    """Sizes that set a tile's memory: blocks of a key, the dtype of its columns, heads of a query token."""

    chunks: tuple[Chunk, ...]
    dtype: str
    heads: int

    @property
    def columns(self) -> int:
        """Columns of a key, those that pad blocks included."""
        return sum(chunk.block for chunk in self.chunks)

    def shared(self, tile: MqaLogitsTile, target: Target) -> int:
        """Bytes of shared memory that a program is expected to need at most: q, keys on their way, a decoded tile."""
        native = is_native(self.dtype, target)
        stored = self.columns * tile.block_n // (2 if self.dtype == "e2m1" else 1)
        q = tile.block_q * self.heads * self.columns * (1 if native else 2)
        # mma.sync takes decoded values as an operand in registers.
        decoded = 0 if native or target.dot == "mma" else 2 * self.columns * tile.block_n
        if target.backend == "hip":  # operands come from registers, by way of one buffer
            return max(q, decoded or stored) + (tile.num_stages - 1) * stored
        return q + tile.num_stages * stored + decoded + 8 * tile.block_n * tile.block_q


def _candidates(block_q: int, columns: int, target: Target, *, native: bool) -> list[MqaLogitsTile]:
    """Return tiles of `block_q` query tokens for products of `columns` columns, most wanted first."""
    wide = columns >= COLUMNS
    if target.backend == "hip":
        return [MqaLogitsTile(block_q, block_n, 4, 2, RESIDENT) for block_n in (128, 64, 32, 16)]
    # Native products on sm90 need no more: two programs hide each other's sums. Elsewhere four warps would spill, and
    # so they do there under Triton 3.9 with the sums of eight query tokens.
    warps = 8 if wide and not (native and target.dot == "wgmma" and block_q <= 4) else 4
    return [
        MqaLogitsTile(block_q, block_n, warps, stages, RESIDENT)
        for block_n, stages in ((128, 4), (128, 3), (128, 2), (64, 3), (64, 2), (32, 2), (16, 2), (16, 1))
    ]


def _choose(block_q: int, sizes: _Sizes, target: Target) -> MqaLogitsTile | None:
    """Return the first candidate that fits RESIDENT times, or else the first that fits once."""
    found = _candidates(block_q, block_q * sizes.heads, target, native=is_native(sizes.dtype, target))
    for resident in (RESIDENT, 1):
        limit = min(target.shared_limit, target.shared_per_sm // resident - target.shared_reserve)
        for tile in found:
            if sizes.shared(tile, target) <= limit:
                return tile
    return None


def _tiles_of(sizes: _Sizes, target: Target) -> MqaLogitsTiles:
    """The tiles of a target. Raises LimitError where none fits."""
    most = min(MOST_BLOCK_Q, max(1, COLUMNS // sizes.heads))
    least = max(1, MIN_BLOCK // sizes.heads)
    blocks = [1 << power for power in range(most.bit_length()) if 1 << power >= least]
    fitting = [tile for block_q in blocks if (tile := _choose(block_q, sizes, target))]
    if not fitting:
        message = (
            f"shared memory has no room for a query token of {sizes.heads} heads of {sizes.columns} columns and 16 keys"
        )
        raise LimitError(f"{target.name}: {message}")
    unaligned = [
        replace(
            tile,
            block_n=min(UNALIGNED_BLOCK_N, tile.block_n),
            num_warps=4,
            num_stages=min(2, tile.num_stages),
        )
        for tile in fitting
    ]
    return MqaLogitsTiles(fitting[-1], tuple(fitting), tuple(unaligned))
