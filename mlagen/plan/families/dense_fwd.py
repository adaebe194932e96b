"""Numbers of multi-head attention over requests of any lengths: blocks of a row, and tiles for each target.

A tile is data: a target takes the first candidate that fits. The models of shared memory and of registers follow
Triton 3.6 and 3.7 for these kernels at head dims from 40 to 256.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mlagen import work
from mlagen.errors import LimitError
from mlagen.plan.family import TiledFamily
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.sm90.dense_fwd import DenseFwdSm90Plan, make_dense_fwd_sm90
from mlagen.plan.targets import SM90, TARGETS, Target
from mlagen.plan.tiles import fits
from mlagen.plan.tiles.chunks import Chunk, make_chunks
from mlagen.plan.tiles.tile import UNALIGNED_REASON, DenseFwdRow, DenseFwdTile, row_bytes
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import Spec
from mlagen.work import ITEMSIZE

CACHED_BYTES = 24 << 20  # of K and V; programs that run side by side should find most of them in L2
NARROW_ROWS = 64  # rows of a tile for short requests, such as the next tokens of sequences that are decoded
DESCRIPTOR = "portable_descriptor"  # the portable kernel that copies k and v by tensor descriptor
LOAD_COLUMNS = 8  # of 16 bytes, behind one address of two registers
BARRIER_BYTES = 1024  # for barriers of copies by descriptor and of tcgen05, and for the tiles' alignment behind them


@dataclass(frozen=True, kw_only=True)
class DenseFwdPlan(TiledFamily[DenseFwdRow]):
    """Numbers of the kernels.

    Attributes:
        d_qk, d_v: columns of a row of q and k, and of v.
        k_chunks, v_chunks: blocks of a row of k (q is cut likewise) and of v, in column order.
        descriptor_targets: targets that copy blocks of k and v by tensor descriptor; the others load them by pointers.
        cached_bytes: bytes of K and V of the heads that run side by side.
        window: keys that a row sees, including its own; None: all.
        sm90: the sm90 kernel's numbers; None without one. It has no window.
    """

    NAME: ClassVar = fits.DENSE_FWD
    WRAPPERS: ClassVar = {
        "flash_attn_varlen_func": Op(
            (), {"out": "out", "lse": None}, ("return_softmax_lse", "return_attn_probs", "window_size")
        ),
    }

    SM90_KERNELS: ClassVar = {"sm90": "_dense_fwd_sm90"}

    d_qk: int
    d_v: int
    k_chunks: tuple[Chunk, ...]
    v_chunks: tuple[Chunk, ...]
    descriptor_targets: tuple[str, ...]
    cached_bytes: int
    window: int | None
    sm90: DenseFwdSm90Plan | None

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> DenseFwdPlan | None:
        """Derives the numbers; see `Family`."""
        heads = spec.multi_head
        if heads is None or not cls.wanted(spec):
            return None
        targets = [TARGETS[name] for name in spec.targets]
        sm90 = make_dense_fwd_sm90(spec, TARGETS[SM90].shared_limit)
        described = heads.addressing == "descriptors"
        dims, dtype = (heads.qk_head_dim, heads.v_head_dim), spec.model.dtype
        return make_dense_fwd_plan(*dims, dtype, targets, sm90, descriptors=described, window=heads.window)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that a call can run, as schedules and `_launch.force` have them."""
        portable, *others = super().kernels
        return (portable, *((DESCRIPTOR,) if self.descriptor_targets else ()), *others)

    def like(self, row: DenseFwdRow, tile: DenseFwdTile, target: Target, reason: str, *, aligned: bool) -> DenseFwdRow:
        """A row like another with this tile; see `TiledFamily`."""
        described = aligned and target.name in self.descriptor_targets
        shared = expected_shared(tile, self.k_chunks, self.v_chunks, target, descriptors=described)
        if shared > target.shared_limit:
            raise LimitError(
                f"{target.name}: tile {tile} of multi-head attention needs {shared:,} bytes of shared memory, "
                f"{shared - target.shared_limit:,} more than the {target.shared_limit:,} a program gets"
            )
        return replace(row, tile=tile, expected_shared=shared, reason=reason)

    def flops(self, pairs: int, num_heads: int) -> int:
        """FLOPs of a call with so many pairs of a row and a key that it sees."""
        return work.flops(1, num_heads, pairs, self.d_qk, self.d_v)

    def bytes(self, queries: int, keys: int, num_heads: int, num_kv_heads: int) -> int:
        """Fewest bytes of a call of so many rows of q and of k: q, k, v and out once."""
        kv_bytes = keys * num_kv_heads * (self.d_qk + self.d_v) * ITEMSIZE
        return work.attention_bytes(queries, num_heads, 0, self.d_qk, self.d_v, kv_bytes)


# Most wanted first, by the instruction that tl.dot becomes. Last those of very wide heads.
LAST = (DenseFwdTile(32, 32, 4, 2), DenseFwdTile(32, 16, 4, 2), DenseFwdTile(16, 16, 4, 2), DenseFwdTile(16, 16, 4, 1))
MMA = (
    DenseFwdTile(128, 64, 8, 2),
    DenseFwdTile(128, 32, 8, 2),
    DenseFwdTile(64, 32, 4, 2),
    DenseFwdTile(64, 32, 8, 2),
    *LAST,
)
CANDIDATES: dict[str, tuple[DenseFwdTile, ...]] = {
    "mma": MMA,
    "wgmma": (DenseFwdTile(128, 128, 8, 2), DenseFwdTile(128, 64, 8, 3), DenseFwdTile(128, 64, 8, 2), *MMA[1:]),
    "tcgen05": (DenseFwdTile(128, 128, 8, 2), DenseFwdTile(128, 64, 8, 2), *MMA[1:]),
    "mfma": (DenseFwdTile(128, 64, 4, 2), DenseFwdTile(128, 32, 4, 2), DenseFwdTile(64, 32, 4, 2), *LAST),
}
NARROW = (DenseFwdTile(64, 64, 4, 2), DenseFwdTile(64, 32, 4, 2), DenseFwdTile(64, 32, 8, 2))
# For calls that are not aligned: loads of single elements take many registers, so the tile is small.
UNALIGNED = (DenseFwdTile(32, 32, 4, 1), DenseFwdTile(32, 16, 4, 1), DenseFwdTile(16, 16, 4, 1))
# Registers a thread, as `registers` counts them. From here on, loops spill.
REGISTERS = {"mma": 110, "wgmma": 170, "tcgen05": 170, "mfma": 110}


def registers(
    tile: DenseFwdTile, k: Sequence[Chunk], v: Sequence[Chunk], target: Target, *, descriptors: bool
) -> float:
    """Registers a thread for accumulators, scores (with half as many for weights) and the addresses of its loads."""
    threads = tile.num_warps * target.warp_size
    accumulators = tile.block_m * row_bytes(v) // ITEMSIZE
    scores = tile.block_m * tile.block_n
    loaded = 0 if descriptors else tile.block_n * (row_bytes(k) + row_bytes(v)) // ITEMSIZE
    return (accumulators + 1.5 * scores + 2 * loaded / LOAD_COLUMNS) / threads


def expected_shared(
    tile: DenseFwdTile, k: Sequence[Chunk], v: Sequence[Chunk], target: Target, *, descriptors: bool
) -> int:
    """Bytes of shared memory that a program is expected to need.

    wgmma and tcgen05 keep q and as many tiles of K and V as there are stages; mma.sync keeps one less, and the weights
    on their way from one layout to another; CDNA stages q, then tiles of K and V. Zeros for rows past a request's end
    make a copy of V where a descriptor had brought it and fewer tiles are there.
    """
    q, kv = tile.block_m * row_bytes(k), tile.block_n * (row_bytes(k) + row_bytes(v))
    weights = tile.block_m * tile.block_n * ITEMSIZE
    copies = max(1, tile.num_stages - 1)
    if target.backend == "hip":
        widest = max(chunk.block for chunk in (*k, *v)) * ITEMSIZE
        return max(tile.block_m * widest, copies * kv + (weights if tile.block_m <= NARROW_ROWS else 0))
    barriers = BARRIER_BYTES if descriptors or target.dot == "tcgen05" else 0
    if tile.block_m >= NARROW_ROWS and target.dot in ("wgmma", "tcgen05"):
        return q + tile.num_stages * kv + barriers
    zeroed = tile.block_n * row_bytes(v) if descriptors else 0
    return q + copies * kv + weights + zeroed + barriers


def _fits(tile: DenseFwdTile, k: Sequence[Chunk], v: Sequence[Chunk], target: Target, *, descriptors: bool) -> bool:
    if expected_shared(tile, k, v, target, descriptors=descriptors) > target.shared_limit:
        return False
    return registers(tile, k, v, target, descriptors=descriptors) <= REGISTERS[target.dot]


def _first(
    candidates: Iterable[DenseFwdTile], k: Sequence[Chunk], v: Sequence[Chunk], target: Target, *, descriptors: bool
) -> DenseFwdTile | None:
    return next((tile for tile in candidates if _fits(tile, k, v, target, descriptors=descriptors)), None)


def make_rows(
    k: Sequence[Chunk], v: Sequence[Chunk], target: Target, *, descriptors: bool
) -> tuple[tuple[DenseFwdRow, ...], DenseFwdRow]:
    """The rows of a target's tile table, and the row of calls that are not aligned.

    Raises:
        LimitError: no tile fits.
    """
    wide = _first(CANDIDATES[target.dot], k, v, target, descriptors=descriptors)
    narrow = _first(NARROW, k, v, target, descriptors=descriptors)
    small = _first(UNALIGNED, k, v, target, descriptors=False)
    if wide is None or small is None:
        smallest = UNALIGNED[-1]
        shared = expected_shared(smallest, k, v, target, descriptors=False)
        needed = registers(smallest, k, v, target, descriptors=False)
        raise LimitError(
            f"{target.name}: head dims {k[-1].start + k[-1].columns} and {v[-1].start + v[-1].columns} take {shared:,} "
            f"bytes of shared memory and {needed:.0f} registers a thread for operands in tile {smallest}; "
            f"there are {target.shared_limit:,} and {REGISTERS[target.dot]}"
        )
    reason = f"the first of {len(CANDIDATES[target.dot])} that fits {target.shared_limit:,} bytes and the registers"
    rows = [DenseFwdRow(None, wide, expected_shared(wide, k, v, target, descriptors=descriptors), reason)]
    if narrow is not None and wide.block_m > narrow.block_m:
        shared = expected_shared(narrow, k, v, target, descriptors=descriptors)
        rows.insert(0, DenseFwdRow(narrow.block_m, narrow, shared, f"the first of {len(NARROW)} for short requests"))
    shared = expected_shared(small, k, v, target, descriptors=False)
    return tuple(rows), DenseFwdRow(None, small, shared, UNALIGNED_REASON)


def make_dense_fwd_plan(
    d_qk: int,
    d_v: int,
    dtype: str,
    targets: Iterable[Target],
    sm90: DenseFwdSm90Plan | None = None,
    *,
    descriptors: bool,
    window: int | None = None,
) -> DenseFwdPlan:
    """The numbers for heads of `d_qk` and `d_v` columns.

    Args:
        d_qk, d_v: columns of a row of q and k, and of v.
        dtype: of all of them.
        targets: the spec's.
        sm90: the sm90 kernel's numbers; None without one.
        descriptors: targets with hardware for it copy blocks of k and v by tensor descriptor.
        window: keys that a row sees, including its own; None: all.

    Raises:
        LimitError: a target cannot hold any tile of these dims.
    """
    targets = tuple(targets)
    k, v = make_chunks([("k", d_qk)], 0), make_chunks([("v", d_v)], d_v)
    described = tuple(target.name for target in targets if descriptors and target.copies_tensors)
    rows = {target.name: make_rows(k, v, target, descriptors=target.name in described) for target in targets}
    return DenseFwdPlan(
        fits=fits.dense_fwd(dtype, k, v, descriptors=descriptors, window=window is not None),
        d_qk=d_qk,
        d_v=d_v,
        k_chunks=k,
        v_chunks=v,
        descriptor_targets=described,
        tiles=tuple((name, table) for name, (table, _) in rows.items()),
        unaligned=tuple((name, (small,)) for name, (_, small) in rows.items()),
        cached_bytes=CACHED_BYTES,
        window=window,
        sm90=sm90,
    )
